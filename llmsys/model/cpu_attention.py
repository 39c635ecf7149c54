"""Chunked attention for bfloat16 on the CPU, about 2.5 times as fast as SDPA.

The CPU kernel of scaled_dot_product_attention reaches a third of the speed of batched matrix
products on processors with bfloat16 units, and computes the masked upper triangle too. Here each
chunk of queries is multiplied with the keys that it may see, and query heads that share keys are
stacked into one product.

Limits: the probabilities are saved for backward, so long sequences use SDPA. Scores are rounded to
bfloat16, as in transformers' eager attention; the softmax sums in float32.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmsys.kernels.attention_kernel import MAX_CHUNKED_LENGTH

# B rows, T positions, H query heads, G key-value heads, R = H / G query heads per key-value head, K
# width of a head, C queries of a chunk, S keys up to the chunk's end

CHUNK = 128


def is_cpu_attention_supported(q_BTHK: Tensor, k_BSGK: Tensor) -> bool:
    """Return whether `compute_chunked_attention` applies: bfloat16 on the CPU, several queries, at
    most MAX_CHUNKED_LENGTH positions.

    Args:
        q_BTHK: Queries.
        k_BSGK: Keys, with G groups of heads.

    Returns:
        False where SDPA is as fast (one query) or the saved probabilities would be too large.
    """
    bfloat16_on_cpu = q_BTHK.device.type == "cpu" and q_BTHK.dtype == torch.bfloat16
    return (
        bfloat16_on_cpu
        and q_BTHK.shape[1] > 1
        and max(q_BTHK.shape[1], k_BSGK.shape[1]) <= MAX_CHUNKED_LENGTH
    )


def compute_chunked_attention(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, mask_B1TS: Tensor | None, *, causal: bool
) -> Tensor:
    """Compute scaled dot-product attention in chunks of queries.

    SDPA takes 1.4 to 5 times as long for bfloat16 on CPUs.

    Args:
        q_BTHK: Queries; scores are scaled by 1 / sqrt(K) here.
        k_BSGK: Keys; G divides H.
        v_BSGK: Values.
        mask_B1TS: True where a query sees a key. May hide more than `causal` does. Default: all.
        causal: Hide later keys. Requires T = S.

    Returns:
        The output, (B, T, H, K), in the dtype of the queries.
    """
    heads = q_BTHK.shape[2]
    groups = k_BSGK.shape[2]
    q, k, v = (
        _stack_heads(q_BTHK, groups),
        _stack_heads(k_BSGK, groups),
        _stack_heads(v_BSGK, groups),
    )
    # Scaled before the product: queries are fewer numbers than scores.
    return _unstack_heads(
        _compute_stacked_attention(q * (1.0 / math.sqrt(q.shape[-1])), k, v, mask_B1TS, causal)[0],
        heads,
    )


# A custom op, so that selective checkpointing can save its outputs, as it does with fused kernels.
# Inputs are stacked: q (B * G, R, T, K), k and v (B * G, 1, S, K).


@torch.library.custom_op("llmsys::chunked_attention", mutates_args=())
def _compute_stacked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask_B1TS: Tensor | None, causal: bool
) -> list[Tensor]:
    """Return the attention output, shaped as q, and the probabilities of each chunk, (B * G, R *
    C, S).
    """
    results = [torch.empty_like(q)]
    for start, end in _iter_chunks(q.shape[2]):
        seen = end if causal else k.shape[2]
        scores = q[:, :, start:end].flatten(1, 2) @ k[:, 0, :seen].transpose(1, 2)
        if mask_B1TS is not None:
            # A table of the mask has hidden later keys already.
            _mask_hidden_keys(scores, mask_B1TS[:, 0, start:end, :seen], len(q) // len(mask_B1TS))
        elif causal:
            _mask_later_keys(scores, end - start)
        p = scores.softmax(dim=-1)  # bfloat16 in and out; the CPU kernel sums in float32
        results[0][:, :, start:end] = (p @ v[:, 0, :seen]).view(results[0][:, :, start:end].shape)
        results.append(p)
    return results


@_compute_stacked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask_B1TS: Tensor | None, causal: bool) -> list[Tensor]:
    chunks = _iter_chunks(q.shape[2])
    shapes = [
        (len(q), q.shape[1] * (end - start), end if causal else k.shape[2]) for start, end in chunks
    ]
    return [torch.empty_like(q), *(q.new_empty(shape) for shape in shapes)]


def _save_attention_inputs(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)  # nothing needs gradients of the probabilities
    ctx.save_for_backward(*inputs[:3], *output[1:])


def _compute_attention_gradients(
    ctx: Any, gradients: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, v, *probabilities = ctx.saved_tensors
    dy = gradients[0].contiguous()
    dq = torch.empty_like(q)
    # Keys get a gradient from every chunk: bfloat16 sums would lose the later ones.
    dk = torch.zeros_like(k, dtype=torch.float32)
    dv = torch.zeros_like(v, dtype=torch.float32)
    for (start, end), p in zip(_iter_chunks(q.shape[2]), probabilities, strict=True):
        seen = p.shape[-1]
        q_chunk, dy_chunk = (x[:, :, start:end].flatten(1, 2) for x in (q, dy))
        dv[:, 0, :seen] += p.transpose(1, 2) @ dy_chunk
        dp = dy_chunk @ v[:, 0, :seen].transpose(1, 2)
        ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
        dq[:, :, start:end] = (ds @ k[:, 0, :seen]).view(dq[:, :, start:end].shape)
        dk[:, 0, :seen] += ds.transpose(1, 2) @ q_chunk
    return dq, dk.to(q.dtype), dv.to(q.dtype), None, None


_compute_stacked_attention.register_autograd(
    _compute_attention_gradients, setup_context=_save_attention_inputs
)
OPERATION = torch.ops.llmsys.chunked_attention.default


def _iter_chunks(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, CHUNK):
        yield start, min(start + CHUNK, length)


def _stack_heads(x_BTHK: Tensor, groups: int) -> Tensor:
    """Reshape (B, T, H, K) to contiguous (B * G, H / G, T, K)."""
    rows, length, heads, width = x_BTHK.shape
    x = x_BTHK.reshape(rows, length, groups, heads // groups, width).permute(0, 2, 3, 1, 4)
    return x.contiguous().flatten(0, 1)


def _unstack_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (B * G, H / G, T, K) to (B, T, H, K)."""
    _, per_group, length, width = x.shape
    groups = heads // per_group
    return (
        x.view(-1, groups, per_group, length, width)
        .permute(0, 3, 1, 2, 4)
        .reshape(-1, length, heads, width)
    )


def _mask_later_keys(scores: Tensor, size: int) -> None:
    """Set the scores of later keys among the last `size` keys of a chunk to minus infinity, in
    place.
    """
    later_CC = torch.full((size, size), -math.inf, dtype=scores.dtype).triu_(1)
    scores.view(scores.shape[0], -1, size, scores.shape[-1])[..., -size:].add_(later_CC)


def _mask_hidden_keys(scores: Tensor, visible_BCS: Tensor, groups: int) -> None:
    """Set the hidden scores of one chunk, (B * G, R * C, S), to minus infinity, in place."""
    _, size, seen = visible_BCS.shape
    hidden_BCS = torch.zeros(visible_BCS.shape, dtype=scores.dtype).masked_fill_(
        ~visible_BCS, -math.inf
    )
    scores.view(-1, groups, scores.shape[1] // size, size, seen).add_(hidden_BCS[:, None, None])
