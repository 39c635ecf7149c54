"""torch's operators of variable-length flash attention on the CPU, behind the same contract,
without flash.

`register_cpu_kernels` gives `torch_attn::_varlen_attn` and its backward a CPU kernel in this
process. So the project's own calls run: packing, order of arguments, windows, groups, and the
log-sum-exp, (H, T), that the backward is given. As in the CUDA kernel, probabilities of the
backward come from the lse and the output that it is given.
"""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor


def _hide_keys(lengths: list[int], window: list[int], is_causal: bool) -> Tensor:
    """Return which of all packed keys a packed query sees, (T, T): the rule of the kernel, by
    two loops.
    """
    total, (left, right) = lengths[-1], window
    if is_causal:
        right = 0
    visible = torch.zeros(total, total, dtype=torch.bool)
    for begin, end in pairwise(lengths):
        for t in range(begin, end):
            first = begin if left < 0 else max(begin, t - left)
            last = end - 1 if right < 0 else min(end - 1, t + right)
            visible[t, first : last + 1] = True
    return visible


def _score(q: Tensor, k: Tensor, visible: Tensor, scale: float) -> Tensor:
    return (torch.einsum("thk,shk->hts", q, k) * scale).masked_fill(~visible, -torch.inf)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = cu_seq_q.tolist()
    assert cu_seq_q.dtype == torch.int32
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert lengths[0] == 0
    assert lengths[-1] == len(q)
    assert max_q == max_k >= max(b - a for a, b in pairwise(lengths))
    shared_by = q.shape[1] // k.shape[1]
    assert enable_gqa == (shared_by > 1)
    visible = _hide_keys(lengths, window_size or [-1, -1], is_causal)
    qd, kd, vd = q.double(), *(x.double().repeat_interleave(shared_by, 1) for x in (k, v))
    scores = _score(qd, kd, visible, scale or q.shape[-1] ** -0.5)
    out = torch.einsum("hts,shk->thk", scores.softmax(-1), vd)
    # Strides as the CUDA kernel makes them: those of its inputs.
    strided = torch.empty_like(q) if out.shape == q.shape else q.new_empty(out.shape)
    return strided.copy_(out), scores.logsumexp(-1).float(), torch.zeros(2, dtype=torch.uint64)


def compute_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shared_by = q.shape[1] // k.shape[1]
    scale = scale or q.shape[-1] ** -0.5
    visible = _hide_keys(cu_seq_q.tolist(), window_size or [-1, -1], is_causal)
    qd, od, dd = q.double(), out.double(), dout.double()
    kd, vd = (x.double().repeat_interleave(shared_by, 1) for x in (k, v))
    p = (_score(qd, kd, visible, scale) - lse.double()[..., None]).exp()
    dp = torch.einsum("thk,shk->hts", dd, vd)
    ds = p * (dp - (dd * od).sum(-1).T[..., None]) * scale
    dq = torch.einsum("hts,shk->thk", ds, kd)
    dk, dv = torch.einsum("hts,thk->shk", ds, qd), torch.einsum("hts,thk->shk", p, dd)
    dk, dv = (x.unflatten(1, (-1, shared_by)).sum(2) for x in (dk, dv))
    dq, dk, dv = (torch.empty_like(x).copy_(g) for x, g in ((q, dq), (k, dk), (v, dv)))
    return dq, dk, dv


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The contract of llmsys/model/varlen_kernel.py."""
    out, lse, _ = attend(q, k, v, cu_lengths, cu_lengths, max_length, max_length, is_causal, scale)
    return out, lse


def run_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_HP: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `run_forward`; gradients of queries are float32."""
    lengths, unused = (
        (cu_lengths, cu_lengths, max_length, max_length),
        torch.zeros(2, dtype=torch.uint64),
    )
    dq, dk, dv = compute_gradients(dout, q, k, v, out, lse_HP, *lengths, is_causal, unused, scale)
    return dq.float(), dk, dv


@cache
def register_cpu_kernels() -> None:
    """Give torch's operators a CPU kernel; on other devices nothing changes."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(attend)
    varlen._varlen_attn_backward.register_kernel("cpu")(compute_gradients)
