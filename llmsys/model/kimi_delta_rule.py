"""The delta rule with a decay for each channel of a key, over packed documents, in chunks (Kimi
Linear, arXiv:2510.26692, 3; as the gated delta rule of gated_delta_rule.py otherwise).

At each position a head lets the rows of its state S, keys by values, decay by the vector d, and
moves what it holds for the key k by a share b towards the value v: S ← diag(d) S,
S ← S + b kᵀ(v − k S). The output of query q is q S.

A product of two keys of a chunk has the decays between their positions in every channel. Divided
by decays from the begin of the chunk these would overflow, so a chunk is halved again and again:
keys of a first half decay to its end, those of the second half from there, and no exponent is
positive.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.model.gated_delta_rule import DeltaChunks, run_delta_chunks
from llmsys.model.state_chunks import RowStart, cut_chunks, find_passages

# B rows, T positions, G key heads, S value heads of a key head, K channels of a key, V of a value,
# N chunks, C positions of a chunk


def apply_kimi_delta_rule(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTGSV: Tensor,
    log_decay_BTGSK: Tensor,
    beta_BTGS: Tensor,
    *,
    chunk_length: int,
    segments_BT: Tensor | None = None,
    start: RowStart | None = None,
    keeps_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the rule over rows.

    Args:
        q_BTGK: queries of length 1.
        k_BTGK: keys of length 1.
        v_BTGSV: values.
        log_decay_BTGSK: logarithms of the decays, at most 0.
        beta_BTGS: shares of the updates, 0 to 1.
        chunk_length: positions computed at once, a power of two.
        segments_BT: segments of the positions, between which nothing passes. None: one for each
            row.
        start: what rows continue from. None: from zero.
        keeps_state: return the last state.

    Returns:
        The outputs, (B, T, G, S, V), and the state after the last position, (B, G, S, K, V), or
        None where it is not kept.
    """
    length = q_BTGK.shape[1]
    fill = -length % chunk_length
    v, log_decay, beta = (
        cut_chunks(x, chunk_length, fill, heads=2) for x in (v_BTGSV, log_decay_BTGSK, beta_BTGS)
    )
    q, k = (
        cut_chunks(x, chunk_length, fill, heads=1)[:, :, None].expand_as(log_decay)
        for x in (q_BTGK * q_BTGK.shape[-1] ** -0.5, k_BTGK)
    )
    updates = k * beta[..., None]
    (scores, system), head, tail = compute_pair_products((q, updates), k, log_decay)
    head, tail, whole = head.exp(), tail.exp(), head[..., -1, :].exp()
    if segments_BT is not None:
        # Filled positions change nothing, so they may belong to the last segment.
        segments_BT = torch.cat([segments_BT, segments_BT[:, -1:].expand(-1, fill)], dim=1)
        before_B = None if start is None else start.segment_B
        passages = find_passages(segments_BT, chunk_length, before_B)
        scores, system = scores * passages.pair, system * passages.pair
        head, tail = (x * y[..., None] for x, y in ((head, passages.head), (tail, passages.tail)))
        whole = whole * passages.whole[..., None]
    inputs = torch.cat([v * beta[..., None], updates * head], dim=-1)
    solved = torch.linalg.solve_triangular(system, inputs, upper=False, unitriangular=True)
    written, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    chunks = DeltaChunks(scores, q * head, k * tail, written, read, whole[..., None])
    y_BTGSV, state = run_delta_chunks(chunks, start, keeps_state=keeps_state)
    return y_BTGSV[:, :length], state


def compute_pair_products(
    rows: Sequence[Tensor], keys: Tensor, log_decay: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Multiply positions of each chunk with the keys of it and earlier ones, with the decays
    between them, and sum up the decays of the chunk.

    Args:
        rows: what is multiplied with keys, (…, C, K) each.
        keys: keys, (…, C, K).
        log_decay: logarithms of the decays, (…, C, K), at most 0.

    Returns:
        A table of products, (…, C, C), of each of `rows`, with zeros for later keys; logarithms of
        the decays from before the chunk to a position, and from it to the end, (…, C, K).
    """
    size = keys.shape[-2]
    # Of blocks of one position at first: sums up to a position with it, and after it.
    head, tail = log_decay, torch.zeros_like(log_decay)
    tables = [(one * keys).sum(-1)[..., None, None] for one in rows]
    half = 1
    while half < size:
        earlier, later = _cut_halves(head, half)
        earlier_rest, later_rest = _cut_halves(tail, half)
        reached = (_cut_halves(keys, half)[0] * earlier_rest.exp()).mT
        since = later.exp()
        tables = [
            _join_tables(table, (_cut_halves(one, half)[1] * since) @ reached)
            for table, one in zip(tables, rows, strict=True)
        ]
        head = torch.cat([earlier, later + earlier[..., -1:, :]], dim=-2).flatten(-3, -2)
        tail = torch.cat([earlier_rest + later[..., -1:, :], later_rest], dim=-2).flatten(-3, -2)
        half *= 2
    return [table.squeeze(-3) for table in tables], head, tail


def _cut_halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return both halves (…, blocks, half, K) of all blocks of (…, C, K)."""
    first, second = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second


def _join_tables(tables: Tensor, products: Tensor) -> Tensor:
    """Return the tables of blocks from those of their halves, (…, 2 · blocks, half, half), and the
    products of second halves with first ones, (…, blocks, half, half).
    """
    first, second = tables.unflatten(-3, (-1, 2)).unbind(-3)
    lower = torch.cat([products, second], dim=-1)
    return torch.cat([F.pad(first, (0, first.shape[-1])), lower], dim=-2)
