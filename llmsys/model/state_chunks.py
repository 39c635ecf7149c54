"""Chunks of rows for rules with a state, over packed documents: segments, convolution and decays.

Documents need no lengths: where two positions belong to different segments of a row, the decay
between them is 0. So shapes never depend on data.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# B rows, T positions, G key heads, S value heads of a key head, K channels of a key, V of a value,
# N chunks, C positions of a chunk, D channels of the convolution, W positions that it reads


class RowStart(NamedTuple):
    """The state that rows continue from.

    Attributes:
        state: the state after the position before the first one, (B, G, S, K, V); or what gives it
            for the change that these positions make, see `StateExchange.find_state`.
        segment_B: its segment. None: one segment for each row.
    """

    state: Tensor | Callable[[Tensor, Tensor], Tensor]
    segment_B: Tensor | None


class ChunkDecays(NamedTuple):
    """Decays of a chunk; 0 where they lead from one segment to another.

    Attributes:
        pair: from position j to position i, (B, G, S, N, C, C).
        head: from before the chunk to a position, (B, G, S, N, C).
        tail: from a position to the end of the chunk, (B, G, S, N, C).
        whole: over the chunk, (B, G, S, N).
    """

    pair: Tensor
    head: Tensor
    tail: Tensor
    whole: Tensor


def number_segments(documents_BT: Tensor) -> Tensor:
    """Number the runs of equal documents in each row, from 0.

    Args:
        documents_BT: document of each position.

    Returns:
        Integers, (B, T).
    """
    changes_BT = documents_BT[:, 1:] != documents_BT[:, :-1]
    return F.pad(changes_BT.long(), (1, 0)).cumsum(1)


def apply_causal_convolution(
    x_BTD: Tensor, weight_DW: Tensor, segments_BT: Tensor | None
) -> Tensor:
    """Weight each position and the W - 1 before it, channel by channel.

    Args:
        x_BTD: inputs, with W - 1 positions before the first output.
        weight_DW: weights, of the own position last.
        segments_BT: segments of the inputs; those of other segments count as 0. None: one segment.

    Returns:
        Outputs, (B, T - W + 1, D).
    """
    taps = weight_DW.shape[1]
    length = x_BTD.shape[1] - taps + 1
    y_BTD = torch.zeros_like(x_BTD[:, :length])
    for tap in range(taps):
        seen_BTD = x_BTD[:, tap : tap + length] * weight_DW[:, tap]
        if segments_BT is not None and tap < taps - 1:
            is_same_BT = segments_BT[:, tap : tap + length] == segments_BT[:, taps - 1 :]
            seen_BTD = seen_BTD * is_same_BT[..., None]
        y_BTD = y_BTD + seen_BTD
    return y_BTD


def cut_chunks(x: Tensor, size: int, fill: int, *, heads: int) -> Tensor:
    """Cut rows into chunks.

    Args:
        x: (B, T, heads …, …).
        size: positions of a chunk.
        fill: positions of zeros after each row.
        heads: dims of heads.

    Returns:
        (B, heads …, N, C, …).
    """
    padded = F.pad(x, (0, 0) * (x.ndim - 2) + (0, fill))
    filled: Tensor = padded.unflatten(1, (-1, size))
    rest = range(3 + heads, filled.ndim)
    return filled.permute(0, *range(3, 3 + heads), 1, 2, *rest)


def compute_decays(
    log_decay_BGSNC: Tensor, segments_BT: Tensor | None, before_B: Tensor | None
) -> ChunkDecays:
    """Compute the decays of all chunks.

    Args:
        log_decay_BGSNC: logarithms of the decays, at most 0.
        segments_BT: segments of the positions. None: one for each row.
        before_B: segment before the first position; None: no state comes from there.

    Returns:
        The decays.
    """
    size = log_decay_BGSNC.shape[-1]
    total = log_decay_BGSNC.cumsum(-1)
    last = total[..., -1:]
    is_seen = torch.ones(size, size, dtype=torch.bool, device=total.device).tril()
    # Of later positions the exponent is positive, and could overflow.
    pair = (total[..., :, None] - total[..., None, :]).masked_fill(~is_seen, -torch.inf).exp()
    decays = ChunkDecays(pair, total.exp(), (last - total).exp(), last[..., 0].exp())
    if segments_BT is None:
        return decays
    passages = find_passages(segments_BT, size, before_B)
    return ChunkDecays(
        decays.pair * passages.pair,
        decays.head * passages.head,
        decays.tail * passages.tail,
        decays.whole * passages.whole,
    )


def find_passages(segments_BT: Tensor, size: int, before_B: Tensor | None) -> ChunkDecays:
    """Find where a chunk leads from a segment to the same segment.

    Args:
        segments_BT: segments of the positions.
        size: positions of a chunk.
        before_B: segment before the first position; None: no state comes from there.

    Returns:
        Booleans in place of decays, of one head.
    """
    segments = segments_BT.unflatten(1, (-1, size))[:, None, None]
    ends = segments[..., -1]
    none_yet = torch.full_like(ends[..., :1], -1)
    first = none_yet if before_B is None else before_B[:, None, None, None]
    incoming = torch.cat([first, ends[..., :-1]], dim=-1)
    return ChunkDecays(
        segments[..., :, None] == segments[..., None, :],
        segments == incoming[..., None],
        segments == ends[..., None],
        ends == incoming,
    )
