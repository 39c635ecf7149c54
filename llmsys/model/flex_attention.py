"""Attention by torch's flex_attention: any range of keys, soft cap, bias by distance and sinks,
without a table.

On CUDA the function is compiled to Triton kernels, once for all layers. On the CPU, where it has no
backward, its operator runs eagerly: a dense reference with gradients, for tests.

Fake tensors take the operator in fake_flex_attention.py: the eager one would make the scores that
the compiled kernel never makes.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import assert_never

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from llmsys.kernels.attention_kernel import FLEX_BLOCK
from llmsys.model.fake_flex_attention import run_fake_flex_attention
from llmsys.model.key_ranges import KeyRanges

# B rows, T query positions, S key positions, H query heads, G key-value heads, K width of a head, V
# width of a value, R distances, Q blocks of queries, J blocks of keys


@dataclass(frozen=True)
class AlibiBias:
    """−slope · |distance| for query position t + start and key position s."""

    slopes_H: Tensor
    start: int


@dataclass(frozen=True)
class DistanceBias:
    """A number per head and distance: column s − (t + start) + end of query t and key s, with
    end = R // 2.
    """

    table_HR: Tensor
    start: int


ScoreBias = AlibiBias | DistanceBias


@dataclass(frozen=True)
class FlexMask:
    """Visible keys as ranges and as blocks, and the bias of the scores."""

    block_mask: BlockMask
    bias: ScoreBias | None = None


def build_flex_mask(ranges: KeyRanges, bias: ScoreBias | None = None) -> FlexMask:
    """Return the mask of key ranges, built from the ranges alone: torch's create_block_mask makes a
    table first.

    A block of keys is computed whole where every query of a block of queries sees all of it.

    Args:
        ranges: First and last key of each query.
        bias: Bias of the scores.

    Returns:
        The mask.
    """
    first_BT, last_BT = ranges.first_BT, ranges.last_BT
    length = first_BT.shape[1]
    keys = ranges.num_keys
    num_queries = -(-length // FLEX_BLOCK)
    num_keys = -(-keys // FLEX_BLOCK)
    # Queries beyond the last one see what hides no block and fills none.
    earliest_BQ = _split_blocks(first_BT, num_queries, keys).amin(-1)
    latest_BQ = _split_blocks(last_BT, num_queries, 0).amax(-1)
    begins_J = torch.arange(num_keys, device=first_BT.device) * FLEX_BLOCK
    ends_J = begins_J + FLEX_BLOCK - 1
    is_seen_BQJ = (begins_J <= latest_BQ[..., None]) & (ends_J >= earliest_BQ[..., None])
    all_from_BQ = _split_blocks(first_BT, num_queries, keys).amax(-1)
    all_until_BQ = _split_blocks(last_BT, num_queries, -1).amin(-1)
    is_full_BQJ = (begins_J >= all_from_BQ[..., None]) & (ends_J <= all_until_BQ[..., None])

    def is_visible(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return (s >= first_BT[b, t]) & (s <= last_BT[b, t])

    block_mask = BlockMask.from_kv_blocks(
        # Blocks of keys whose scores are masked one by one, then those that are visible as a whole.
        *_order_blocks(is_seen_BQJ & ~is_full_BQJ),
        *_order_blocks(is_full_BQJ),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=is_visible,
        seq_lengths=(length, keys),
    )
    return FlexMask(block_mask, bias)


def _split_blocks(x_BT: Tensor, count: int, filler: int) -> Tensor:
    padded_BT = F.pad(x_BT, (0, count * FLEX_BLOCK - x_BT.shape[1]), value=filler)
    return padded_BT.view(-1, count, FLEX_BLOCK)


def _order_blocks(chosen_BQJ: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen key blocks, int32 (B, 1, Q), and all blocks, the chosen ones
    first, (B, 1, Q, J).
    """
    order_BQJ = chosen_BQJ.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen_BQJ.sum(-1, dtype=torch.int32)[:, None], order_BQJ.to(torch.int32)[:, None]


def compute_flex_attention(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    mask: FlexMask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return softmax(softcap(scale · q kᵀ) + bias) v, (B, T, H, V).

    Args:
        q_BTHK: Queries.
        k_BSGK: Keys.
        v_BSGV: Values.
        mask: Visible keys, and the bias.
        scale: Factor on the scores.
        softcap: Scores become cap · tanh(score / cap) before the bias is added.
        sinks_H: An extra score per head that takes weight and has no value.

    Returns:
        The output, in the dtype of the values.
    """
    q, k, v = (x.to(v_BSGV.dtype).transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGV))
    out_BHTV, lse_BHT = _run_flex(q, k, v, mask, scale, softcap)
    if sinks_H is not None:
        # The gradient of lse is exact here, so the sink's share of the denominator is a factor on
        # the output.
        out_BHTV = out_BHTV * torch.sigmoid(lse_BHT - sinks_H.float()[:, None])[..., None].to(
            out_BHTV.dtype
        )
    return out_BHTV.transpose(1, 2)


def _run_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: FlexMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the output, (B, H, T, V), and the log-sum-exp of the scores, float32 (B, H, T)."""
    if torch.compiler.is_compiling():
        return call_flex_attention(q, k, v, mask, scale, softcap)
    if q.is_meta or isinstance(q, FakeTensor):
        return _run_fake(q, k, v, mask)
    run = _run_operator if q.device.type == "cpu" else _compile_flex_attention()
    # Selective checkpointing's dispatch modes know neither the operator nor compiled code, and
    # compute both again.
    with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
        return run(q, k, v, mask, scale, softcap)


def call_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: FlexMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Call torch's flex_attention; to be compiled, because uncompiled it makes the scores of all
    pairs.

    Args:
        q: Queries, (B, H, T, K).
        k: Keys, (B, G, S, K).
        v: Values, (B, G, S, V).
        mask: Visible keys, and the bias.
        scale: Factor on the scores.
        softcap: Cap of the scores.

    Returns:
        The output, (B, H, T, V), and the log-sum-exp of the scores, float32 (B, H, T).
    """
    change, buffers = _build_score_mod(mask.bias, softcap)

    def change_score(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        return change(score, b, h, t, s, *buffers)

    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=change_score,
        block_mask=mask.block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return out, aux.lse


@cache
def _compile_flex_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    # fullgraph: a graph break would run the operator eagerly, with the scores of all pairs.
    return torch.compile(call_flex_attention, fullgraph=True)


def _run_operator(
    q: Tensor, k: Tensor, v: Tensor, mask: FlexMask, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Run the operator eagerly. Trained tensors are its arguments: those in closures would get
    no gradient.
    """
    # loads the compiler: seconds
    from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing

    change, buffers = _build_score_mod(mask.bias, softcap)
    options = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False, "BACKEND": "AUTO"}
    # The operator traces the gradient of a score, and the hooks of checkpointing would recompute
    # the block for that.
    with _disable_saved_tensors_hooks_during_tracing():
        out, lse_log2, *_ = flex_operator(
            q, k, v, change, mask.block_mask.as_tuple(), scale, options, buffers
        )
    # The operator returns the logarithm to base 2.
    return out, lse_log2 * math.log(2)


def _build_score_mod(
    bias: ScoreBias | None, softcap: float | None
) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """Return a function of a score, its indices and tensors that changes the score, and those
    tensors.
    """

    def cap_score(score: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    match bias:
        case None:
            return lambda score, b, h, t, s: cap_score(score), ()
        case AlibiBias(slopes_H=slopes_H, start=start):
            return (
                lambda score, b, h, t, s, slopes: (
                    cap_score(score) - slopes[h] * (t + start - s).abs()
                ),
                (slopes_H,),
            )
        case DistanceBias(table_HR=table_HR, start=start):
            zero = table_HR.shape[1] // 2 - start
            return lambda score, b, h, t, s, table: cap_score(score) + table[h, s - t + zero], (
                table_HR,
            )
        case unreachable:
            assert_never(unreachable)


def _run_fake(q: Tensor, k: Tensor, v: Tensor, mask: FlexMask) -> tuple[Tensor, Tensor]:
    table_HR = mask.bias.table_HR if isinstance(mask.bias, DistanceBias) else None
    blocks = mask.block_mask
    assert blocks.full_kv_num_blocks is not None
    return run_fake_flex_attention(
        q, k, v, table_HR, blocks.kv_num_blocks + blocks.full_kv_num_blocks
    )
