"""Flash attention over packed sequences: documents as lengths, windows, grouped heads and sinks,
without a table.

The kernel is torch's (torch.nn.attention.varlen: FlashAttention-2 (Dao 2023, arXiv:2307.08691), or
3 and 4 where they are installed and activated), and varlen_kernel.py where keys are wider than
values. It runs on CUDA in fp16 and bf16.

A sink s adds exp(s) to the denominator of the softmax. With lse the log-sum-exp of a query's
scores, L = log(exp(lse) + exp(s)), the output is out · exp(lse - L). torch's backward ignores the
gradient of lse, so out · sigmoid(lse - s) would lose a part of the gradients of queries and keys.
Here the kernel's backward gets the folded output and L instead of its own: with those the formulas
of FlashAttention-2 are exact.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llmsys.kernels.attention_kernel import MAX_FLASH_WIDTH
from llmsys.kernels.key_split import can_split_keys
from llmsys.model.document_lengths import DocumentLengths

# B rows, T query positions, H query heads, G key-value heads, K width of a head, V width of a
# value, P = B · T packed positions

FLASH_DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class VarlenMask:
    """Documents that attend to themselves alone.

    Attributes:
        lengths: Their lengths.
        window: Keys to the left and to the right that a query sees, itself not counted; -1: all.
    """

    lengths: DocumentLengths
    window: tuple[int, int]


def build_varlen_mask(lengths: DocumentLengths, *, causal: bool, window: int | None) -> VarlenMask:
    """Return the mask of packed documents.

    Args:
        lengths: Lengths of the documents.
        causal: Whether later keys are hidden.
        window: Keys that a query sees, itself included; None: no limit.

    Returns:
        The mask.
    """
    # The kernel does not count the query itself.
    reach = -1 if window is None else window - 1
    return VarlenMask(lengths, (reach, 0 if causal else reach))


def compute_varlen_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    mask: VarlenMask,
    *,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return attention within documents, (B, T, H, V).

    Args:
        q_BTHK: Queries, fp16 or bf16.
        k_BTGK: Keys.
        v_BTGV: Values.
        mask: Documents and window.
        scale: Factor on the scores.
        sinks_H: An extra score per head that takes weight and has no value.

    Returns:
        The output, in the dtype of the values.

    Raises:
        ValueError: A dtype, width or shape that the kernel does not take.
    """
    # Under autocast a norm may have left queries and keys in float32.
    q, k, v = (x.to(v_BTGV.dtype).flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGV))
    lengths, (left, right) = mask.lengths, mask.window
    q = q.contiguous()  # the output gets the strides of the queries
    out_PHV, _ = _run_varlen(
        q, k, v, sinks_H, lengths.cu_lengths, lengths.max_length, left, right, scale
    )
    out_BTHV: Tensor = out_PHV.unflatten(0, q_BTHK.shape[:2])
    return out_BTHV


# A custom op, so that selective checkpointing saves its outputs, compiled blocks keep it whole, and
# fake tensors pass.


@torch.library.custom_op("llmsys::varlen_attention", mutates_args=())
def _run_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    cu_lengths: Tensor,
    max_length: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output, (P, H, V), and the log-sum-exp of each query's scores and sink, float32
    (H, P).
    """
    _check_inputs(q, k, v, cu_lengths, (left, right))
    is_causal = (left, right) == (-1, 0)
    if q.shape[-1] != v.shape[-1]:
        out, lse_HP = _get_wide_key_kernel().run_forward(
            q, k, v, cu_lengths, max_length, is_causal, scale
        )
    else:
        _load_kernel()
        lengths, grouped = (
            (cu_lengths, cu_lengths, max_length, max_length),
            q.shape[1] != k.shape[1],
        )
        out, lse_HP, _ = torch.ops.torch_attn._varlen_attn(
            q, k, v, *lengths, is_causal, scale, [left, right], grouped
        )
    if sinks_H is None:
        return out, lse_HP
    whole_HP = torch.logaddexp(lse_HP, sinks_H.float()[:, None])
    weight_PH1 = (lse_HP - whole_HP).exp_().T[..., None]
    # Into the dtype of the output at once: `*` would make a float32 copy of it.
    return torch.mul(out, weight_PH1, out=torch.empty_like(out)), whole_HP


@_run_varlen.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks_H: Tensor | None,
    cu_lengths: Tensor,
    max_length: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    _check_inputs(q, k, v, cu_lengths, (left, right))
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(
        (q.shape[1], q.shape[0]), dtype=torch.float32
    )


@torch.library.custom_op("llmsys::varlen_attention_backward", mutates_args=())
def _compute_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_HP: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; of queries in float32 where keys are
    wider than values.
    """
    is_causal = (left, right) == (-1, 0)
    if q.shape[-1] != v.shape[-1]:
        inputs = (dout, q, k, v, out, lse_HP, cu_lengths, max_length)
        dq, dk, dv = _get_wide_key_kernel().run_backward(*inputs, is_causal, scale)
        return dq, dk, dv
    _load_kernel()
    lengths = (cu_lengths, cu_lengths, max_length, max_length)
    # The random state of a dropout that is not used.
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
        dout, q, k, v, out, lse_HP, *lengths, is_causal, no_dropout, scale, [left, right]
    )
    return dq, dk, dv


@_compute_gradients.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.shape[-1] == v.shape[-1]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    return q.new_empty(q.shape, dtype=torch.float32), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks_H, cu_lengths, *ctx.constants = inputs
    ctx.set_materialize_grads(False)  # nothing needs a gradient of the log-sum-exp
    ctx.save_for_backward(q, k, v, sinks_H, cu_lengths, *output)


def _run_backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks_H, cu_lengths, out, lse_HP = ctx.saved_tensors
    dout = dout.contiguous()
    dq, dk, dv = _compute_gradients(dout, q, k, v, out, lse_HP, cu_lengths, *ctx.constants)
    dsinks_H = None
    if sinks_H is not None and ctx.needs_input_grad[3]:
        # A sink's value is zero, so its score gets minus its weight times gradient · output.
        dots_HP = (dout.float() * out.float()).sum(-1).T
        dsinks_H = -((sinks_H.float()[:, None] - lse_HP).exp() * dots_HP).sum(-1).to(sinks_H.dtype)
    return dq.to(q.dtype), dk, dv, dsinks_H, None, None, None, None, None


_run_varlen.register_autograd(_run_backward, setup_context=_save_inputs)
OPERATION = torch.ops.llmsys.varlen_attention.default


def _load_kernel() -> None:
    """Register torch's operators. Not at the top: the import loads torch's compiler, which takes
    seconds.
    """
    import torch.nn.attention.varlen  # noqa: F401


def _get_wide_key_kernel() -> ModuleType:
    """Return the kernels for keys that are wider than values. Not at the top: CPU wheels do not
    bring triton.
    """
    from llmsys.model import varlen_kernel

    return varlen_kernel


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, cu_lengths: Tensor, window: tuple[int, int]
) -> None:
    """Raise ValueError for what the kernel does not take; torch's fake implementation accepts
    all of it.
    """
    fix = "Choose the kernel by llmsys.kernels.attention_kernel, which takes flex_attention there."
    if q.dtype not in FLASH_DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"varlen attention of {q.dtype}, {k.dtype} and {v.dtype}: it takes fp16 or bf16 "
            f"alone. {fix}"
        )
    is_alike = q.shape == k.shape and v.shape[:2] == k.shape[:2]
    is_split = is_alike and window[0] < 0 and can_split_keys(k.shape[-1], v.shape[-1])
    if not is_split and (v.shape != k.shape or q.shape[-1] != k.shape[-1]):
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(
            f"varlen attention of queries, keys and values {shapes}: their widths must be equal; "
            "without windows and groups of heads, keys may also be the sum of two powers of two "
            f"and values another. {fix}"
        )
    if q.shape[-1] > MAX_FLASH_WIDTH or q.shape[-1] % 8:
        raise ValueError(
            f"varlen attention of heads of {q.shape[-1]} channels: at most {MAX_FLASH_WIDTH}, in "
            f"multiples of 8. {fix}"
        )
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"varlen attention of {tuple(q.shape)} queries and {tuple(k.shape)} keys: one query "
            f"per key, and query heads that are a multiple of key heads. {fix}"
        )
    if cu_lengths.dtype != torch.int32:
        raise ValueError(
            f"cumulative lengths are {cu_lengths.dtype}, and the kernel reads int32. Convert them."
        )
