"""Attention of a rank's queries to the keys of one other rank: a partial result, and its gradients.

A partial result is (out, lse): the softmax over these keys alone, and the log-sum-exp of their
scores. Results of disjoint keys are merged by `merge_block` (Milakov 2018, arXiv:1805.02867). With
the merged out and lse the gradients of the blocks add up (Dao 2022, arXiv:2205.14135, appendix B).

Two ways to compute a block: torch's flash attention, where whole halves of queries see whole halves
of keys, and plain products in float32 over chunks of queries.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

# B rows, L queries, S keys, H query heads, G key-value heads, R = H / G, K width of a key, V width
# of a value, P rows of positions: B, or 1 where all rows have the same

# Queries of one product, so that scores take H · 256 · S floats.
CHUNK = 256

# Where a rank's pair of chunks comes from, compared with that of the queries: its first chunk lies
# before theirs where its rank is lower, and its second chunk after theirs.
Side = Literal["own", "before", "after"]

aten = torch.ops.aten


@dataclass(frozen=True)
class BlockRule:
    """The scores of a block, and which of them count.

    Attributes:
        scale: Factor on the scores.
        softcap: Scores become cap · tanh(score / cap) before the bias is added.
        is_fused: There are no documents or windows, so that flash attention applies.
        is_dealt: Positions are in zigzag order; False: ranks have neighbouring ones.
        side: The source of the keys.
        queries_PL: Positions of the queries.
        keys_PS: Positions of the keys, ascending in each row.
        lower_PL: The first position that a query sees.
        upper_PL: The last position that a query sees.
        slopes_H: ALiBi: −slope · |distance| is added to the scores.
    """

    scale: float
    softcap: float | None
    is_fused: bool
    is_dealt: bool
    side: Side
    queries_PL: Tensor
    keys_PS: Tensor
    lower_PL: Tensor
    upper_PL: Tensor
    slopes_H: Tensor | None


def merge_block(out_BLHV: Tensor, lse_BHL: Tensor, part_BLHV: Tensor, part_lse_BHL: Tensor) -> None:
    """Add the result of further keys to that of all keys so far, in place, in float32.

    Args:
        out_BLHV: Attention to the keys so far; 0 where there were none.
        lse_BHL: Log-sum-exp of their scores; minus infinity where there were none.
        part_BLHV: Attention to the further keys.
        part_lse_BHL: Log-sum-exp of their scores.
    """
    total_BHL = torch.logaddexp(lse_BHL, part_lse_BHL)
    finite_BHL = total_BHL.clamp_min(torch.finfo(torch.float32).min)  # -inf - -inf would be NaN
    out_BLHV.mul_(_weigh(lse_BHL - finite_BHL)).add_(part_BLHV * _weigh(part_lse_BHL - finite_BHL))
    lse_BHL.copy_(total_BHL)


def _weigh(log_share_BHL: Tensor) -> Tensor:
    return log_share_BHL.exp().transpose(1, 2)[..., None]


def add_block(
    out_BLHV: Tensor, lse_BHL: Tensor, q: Tensor, k: Tensor, v: Tensor, rule: BlockRule
) -> None:
    """Attend to a block of keys, and merge the result into that of all blocks so far.

    Args:
        out_BLHV: Merged output so far, float32, changed in place.
        lse_BHL: Its log-sum-exp, float32, changed in place.
        q: Queries, (B, L, H, K).
        k: Keys, (B, S, G, K).
        v: Values, (B, S, G, V).
        rule: The scores.
    """
    if rule.is_fused:
        queries, keys = _select_seen(q.shape[1], rule)
        if keys.stop == 0:
            return
        part, part_lse = _run_flash(q[:, queries], k[:, keys], v[:, keys], rule)
        merge_block(out_BLHV[:, queries], lse_BHL[:, :, queries], part, part_lse)
        return
    for chunk in _iter_chunks(q, k, v, rule):
        scores, _ = chunk.compute_scores()
        part_lse = scores.logsumexp(-1)
        # A query without a visible key has a log-sum-exp of -inf, and -inf - -inf would be NaN.
        weights = (scores - part_lse.clamp_min(torch.finfo(torch.float32).min)[..., None]).exp_()
        part = chunk.split_heads(weights @ chunk.v).transpose(1, 2)
        merge_block(
            out_BLHV[:, chunk.rows], lse_BHL[:, :, chunk.rows], part, part_lse.flatten(1, 2)
        )


def add_block_gradients(
    dq: Tensor,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_BHL: Tensor,
    rule: BlockRule,
) -> tuple[Tensor, Tensor]:
    """Add a block's share to the gradient of the queries, and return those of its keys and values.

    Args:
        dq: Gradient of the queries, float32 (B, L, H, K), changed in place.
        dout: Gradient of the merged output, (B, L, H, V).
        q: Queries, (B, L, H, K).
        k: Keys, (B, S, G, K).
        v: Values, (B, S, G, V).
        out: Merged output, (B, L, H, V).
        lse_BHL: Log-sum-exp of the scores of all blocks.
        rule: The scores.

    Returns:
        The gradients of keys and values, float32 or the dtype of the keys.
    """
    dk = k.new_zeros(k.shape, dtype=torch.float32)
    dv = v.new_zeros(v.shape, dtype=torch.float32)
    if rule.is_fused:
        queries, keys = _select_seen(q.shape[1], rule)
        if keys.stop == 0:
            return dk, dv
        halves = k[:, keys], v[:, keys], out[:, queries], lse_BHL[:, :, queries]
        parts = _run_flash_backward(dout[:, queries], q[:, queries], *halves, rule)
        for total, part in zip((dq[:, queries], dk[:, keys], dv[:, keys]), parts, strict=True):
            total.add_(part)
        return dk, dv
    for chunk in _iter_chunks(q, k, v, rule):
        scores, slope = chunk.compute_scores()
        # By the log-sum-exp of all keys, so the weights are those of the whole softmax.
        weights = (scores - chunk.stack_rows(lse_BHL[:, :, chunk.rows])[..., None]).exp_()
        d_chunk, out_chunk = (chunk.stack_heads(x[:, chunk.rows]) for x in (dout, out))
        # The sum over all keys of weight · gradient of the weight, which a block alone could not
        # know.
        delta = (d_chunk * out_chunk).sum(-1, keepdim=True)
        dscores = weights * (d_chunk @ chunk.v.transpose(-1, -2) - delta) * rule.scale
        dscores = dscores if slope is None else dscores * slope
        dq[:, chunk.rows] += chunk.split_heads(dscores @ chunk.k).transpose(1, 2)
        # Query heads that share a key-value head are added up.
        dk[:, chunk.keys] += (dscores.transpose(-1, -2) @ chunk.q).sum(2).transpose(1, 2)
        dv[:, chunk.keys] += (weights.transpose(-1, -2) @ d_chunk).sum(2).transpose(1, 2)
    return dk, dv


def _select_seen(length: int, rule: BlockRule) -> tuple[slice, slice]:
    """Return the queries and the keys that see each other, without documents and windows."""
    if not rule.is_dealt:
        return slice(0, length), slice(0, 0 if rule.side == "after" else length)
    half = length // 2
    match rule.side:
        case "own":
            return slice(0, length), slice(0, length)
        # the first chunk of a lower rank lies before both chunks here, its second one after both
        case "before":
            return slice(0, length), slice(0, half)
        case "after":
            # Both chunks of a higher rank lie between the two chunks here.
            return slice(half, length), slice(0, length)


def _run_flash(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> tuple[Tensor, Tensor]:
    given = [x.transpose(1, 2) for x in (q, k, v)]
    is_causal = rule.side == "own"
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *given, 0.0, is_causal, scale=rule.scale
        )
    else:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            *given, 0.0, is_causal, False, scale=rule.scale
        )
    return out.transpose(1, 2), lse


def _run_flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: BlockRule
) -> list[Tensor]:
    given = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    is_causal = rule.side == "own"
    if q.device.type == "cpu":
        run = aten._scaled_dot_product_flash_attention_for_cpu_backward
        parts = run(*given, lse, 0.0, is_causal, scale=rule.scale)
    else:
        # without dropout nothing is drawn
        seed = q.new_zeros(2, dtype=torch.uint64)
        none = None
        run = aten._scaled_dot_product_flash_attention_backward
        lengths = (none, none, q.shape[1], k.shape[1])
        parts = run(
            *given, lse.contiguous(), *lengths, 0.0, is_causal, seed, seed[:0], scale=rule.scale
        )
    return [part.transpose(1, 2) for part in parts]


@dataclass(frozen=True)
class _Chunk:
    """Some queries, and the keys that they may see, in float32 with query heads stacked: (B, G,
    R, rows, width).
    """

    rows: slice
    keys: slice
    q: Tensor
    k: Tensor
    v: Tensor
    first_PL: Tensor
    last_PL: Tensor
    rule: BlockRule

    def compute_scores(self) -> tuple[Tensor, Tensor | None]:
        """Return the scores, minus infinity where hidden, (B, G, R, rows, keys), and the slope
        of the soft cap.
        """
        rule = self.rule
        slope = None
        scores = self.q @ self.k.transpose(-1, -2) * rule.scale
        if rule.softcap is not None:
            capped = torch.tanh(scores / rule.softcap)
            # The derivative of cap · tanh(s / cap) is 1 - tanh².
            scores = rule.softcap * capped
            slope = 1 - capped.square()
        if rule.slopes_H is not None:
            queries = rule.queries_PL[:, self.rows]
            keys = rule.keys_PS[:, self.keys]
            distances_PLS = (queries[:, :, None] - keys[:, None, :]).abs()
            slopes = rule.slopes_H.float().view(1, self.q.shape[1], -1, 1, 1)
            scores = scores - slopes * distances_PLS[:, None, None]
        places_S = torch.arange(rule.keys_PS.shape[1], device=scores.device)[self.keys]
        is_visible_PLS = (places_S >= self.first_PL[..., None]) & (
            places_S <= self.last_PL[..., None]
        )
        return scores.masked_fill(~is_visible_PLS[:, None, None], -torch.inf), slope

    def stack_heads(self, x_BLHK: Tensor) -> Tensor:
        """Return (B, G, R, L, K) in float32."""
        return _stack_heads(x_BLHK, self.k.shape[1])

    def stack_rows(self, x_BHL: Tensor) -> Tensor:
        """Return (B, G, R, L)."""
        stacked: Tensor = x_BHL.unflatten(1, (self.k.shape[1], -1))
        return stacked

    def split_heads(self, x: Tensor) -> Tensor:
        """Return (B, H, L, K) of (B, G, R, L, K)."""
        return x.flatten(1, 2)


def _stack_heads(x_BLHK: Tensor, groups: int) -> Tensor:
    stacked: Tensor = x_BLHK.float().transpose(1, 2).unflatten(1, (groups, -1))
    return stacked


def _iter_chunks(q: Tensor, k: Tensor, v: Tensor, rule: BlockRule) -> Iterator[_Chunk]:
    """Yield chunks of queries with the keys that they may see. A CPU skips what none of them
    sees.
    """
    groups = k.shape[2]
    num_keys = k.shape[1]
    keys_PS = rule.keys_PS.contiguous()
    # Keys are in ascending order, so those that a query sees are a range of indices.
    first_PL = torch.searchsorted(keys_PS, rule.lower_PL.contiguous())
    last_PL = torch.searchsorted(keys_PS, rule.upper_PL.contiguous(), right=True) - 1
    queries, all_keys, all_values = (
        _stack_heads(x, g) for x, g in ((q, groups), (k, groups), (v, groups))
    )
    for start in range(0, q.shape[1], CHUNK):
        rows = slice(start, start + CHUNK)
        first = first_PL[:, rows]
        last = last_PL[:, rows]
        keys = slice(0, num_keys)
        if q.device.type == "cpu":  # elsewhere the host would wait
            keys = slice(int(first.min()), int(last.max()) + 1)
            if not bool((first <= last).any()):
                continue
        yield _Chunk(
            rows,
            keys,
            queries[..., rows, :],
            all_keys[..., keys, :],
            all_values[..., keys, :],
            first,
            last,
            rule,
        )
