"""The state space dual over packed documents, in chunks (Dao and Gu 2024, arXiv:2405.21060, 6).

At each position a head lets its state S, keys by values, decay by d, and adds the product of key
and value: S ← d S + kᵀ v. The output of query q is q S. Within a chunk this is masked attention;
what chunks add to the states is computed for all at once, and between them a state only decays.
"""

import torch
from torch import Tensor

from llmsys.model.state_chunks import RowStart, compute_decays, cut_chunks

# B rows, T positions, G key heads, S value heads of a key head, K channels of a key, V of a value,
# N chunks, C positions of a chunk


def apply_state_space_dual(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTGSV: Tensor,
    log_decay_BTGS: Tensor,
    *,
    chunk_length: int,
    segments_BT: Tensor | None = None,
    start: RowStart | None = None,
    keeps_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run the rule over rows.

    Args:
        q_BTGK: queries.
        k_BTGK: keys.
        v_BTGSV: values, times their steps.
        log_decay_BTGS: logarithms of the decays, at most 0.
        chunk_length: positions computed at once.
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
    q, k = (cut_chunks(x, chunk_length, fill, heads=1)[:, :, None] for x in (q_BTGK, k_BTGK))
    v, log_decay = (cut_chunks(x, chunk_length, fill, heads=2) for x in (v_BTGSV, log_decay_BTGS))
    if segments_BT is not None:
        # Filled positions change nothing, so they may belong to the last segment.
        segments_BT = torch.cat([segments_BT, segments_BT[:, -1:].expand(-1, fill)], dim=1)
    decays = compute_decays(log_decay, segments_BT, None if start is None else start.segment_B)
    y = ((q @ k.mT) * decays.pair) @ v
    # The first chunk has no state without a start, and the last one's is not read unless kept.
    is_shared = start is not None and not isinstance(start.state, Tensor)
    changed = slice(None) if keeps_state or is_shared else slice(0, -1)
    tail = decays.tail[:, :, :, changed, :, None]
    added = (k[:, :, :, changed] * tail).mT @ v[:, :, :, changed]
    state = None
    if start is not None:
        given = start.state
        state = given if isinstance(given, Tensor) else given(*_compose_chunks(added, decays.whole))
    states, state = _scan_states(added, decays.whole, state)
    if states:
        first = y.shape[3] - len(states)
        q_seen = q[:, :, :, first:] * decays.head[:, :, :, first:, :, None]
        seen = q_seen @ torch.stack(states, dim=3)
        y = torch.cat([y[:, :, :, :first], y[:, :, :, first:] + seen], dim=3)
    y_BTGSV = y.flatten(3, 4).permute(0, 3, 1, 2, 4)
    return y_BTGSV[:, :length], state if keeps_state else None


def _scan_states(
    added: Tensor, whole: Tensor, state: Tensor | None
) -> tuple[list[Tensor], Tensor | None]:
    """Return the state before each chunk that has one, and the last state; `added` has an entry for
    each chunk, or for all but the last one.
    """
    chunks = whole.shape[3]
    states = [] if state is None else [state]
    for number, one in enumerate(added.unbind(3), start=1):
        decay = whole[:, :, :, number - 1, None, None]
        state = one if state is None else state * decay + one
        if number < chunks:
            states.append(state)
    return states, state


def _compose_chunks(added: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return how all chunks together change a state: a column of one decay (B, G, S, K, 1), and
    what is added (B, G, S, K, V).
    """
    _, offset = _scan_states(added, whole, None)
    assert offset is not None
    return whole.prod(-1)[..., None, None].expand(*offset.shape[:-1], 1), offset
