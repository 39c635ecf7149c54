"""The gated delta rule over packed documents, in chunks (Yang 2024, arXiv:2412.06464, section 3.3).

At each position a head lets its state S, keys by values, decay by d, and moves what it holds for
the key k by a share b towards the value v: S ← d S + b kᵀ(v − k d S). The output of query q is q S.
Within a chunk the updates are one triangular system; between chunks the state is a product.

Documents need no lengths: where two positions belong to different segments of a row, the decay
between them is 0. So shapes never depend on data.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.model.state_chunks import RowStart, compute_decays, cut_chunks

# B rows, T positions, G key heads, S value heads of a key head, K channels of a key, V of a value,
# N chunks, C positions of a chunk, D channels of the convolution, W positions that it reads


class DeltaChunks(NamedTuple):
    """Work of chunks on a state, of all value heads or of their key heads.

    Attributes:
        scores: weights of what is written in the outputs, (B, G, S, N, C, C).
        queries: of the state before the chunk, (B, G, S, N, C, K).
        keys: of what is written, decayed to the end of the chunk, (B, G, S, N, C, K).
        written: what the chunk writes into an empty state, (B, G, S, N, C, V).
        read: keys whose values in the state before are taken away from it, (B, G, S, N, C, K).
        whole: decays over the chunk, (B, G, S, N, 1 or K, 1).
    """

    scores: Tensor
    queries: Tensor
    keys: Tensor
    written: Tensor
    read: Tensor
    whole: Tensor


def normalize_heads(x: Tensor) -> Tensor:
    """Divide each head by its length.

    Args:
        x: heads, (..., channels).

    Returns:
        Heads of length 1.
    """
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def apply_gated_delta_rule(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTGSV: Tensor,
    log_decay_BTGS: Tensor,
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
        log_decay_BTGS: logarithms of the decays, at most 0.
        beta_BTGS: shares of the updates, 0 to 1.
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
    q, k = (
        cut_chunks(x, chunk_length, fill, heads=1)[:, :, None]
        for x in (q_BTGK * q_BTGK.shape[-1] ** -0.5, k_BTGK)
    )
    v, log_decay, beta = (
        cut_chunks(x, chunk_length, fill, heads=2) for x in (v_BTGSV, log_decay_BTGS, beta_BTGS)
    )
    if segments_BT is not None:
        # Filled positions change nothing, so they may belong to the last segment.
        segments_BT = torch.cat([segments_BT, segments_BT[:, -1:].expand(-1, fill)], dim=1)
    before_B = None if start is None else start.segment_B
    decays = compute_decays(log_decay, segments_BT, before_B)
    beta = beta[..., None]
    inputs = torch.cat([v * beta, k * (beta * decays.head[..., None])], dim=-1)
    system = (k @ k.mT) * beta * decays.pair
    solved = torch.linalg.solve_triangular(system, inputs, upper=False, unitriangular=True)
    written, read = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    chunks = DeltaChunks(
        (q @ k.mT) * decays.pair,
        q * decays.head[..., None],
        k * decays.tail[..., None],
        written,
        read,
        decays.whole[..., None, None],
    )
    y_BTGSV, state = run_delta_chunks(chunks, start, keeps_state=keeps_state)
    return y_BTGSV[:, :length], state


def run_delta_chunks(
    chunks: DeltaChunks, start: RowStart | None, *, keeps_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Take the state from chunk to chunk.

    Args:
        chunks: what they do with it.
        start: what rows continue from. None: from zero.
        keeps_state: return the last state.

    Returns:
        The outputs, (B, N · C, G, S, V), and the last state, (B, G, S, K, V), or None where it is
        not kept.
    """
    state: Tensor | None = None
    if start is not None:
        given = start.state
        state = given if isinstance(given, Tensor) else given(*_compose_chunks(chunks))
    y_BGSNCV, state = _scan_chunks(chunks, state, keeps_state=keeps_state)
    return y_BGSNCV.flatten(3, 4).permute(0, 3, 1, 2, 4), state


def _compose_chunks(parts: DeltaChunks) -> tuple[Tensor, Tensor]:
    """Return how all chunks together change a state: the matrix (B, G, S, K, K) that it is
    multiplied with, and what is added (B, G, S, K, V).
    """
    _, _, *rest = parts
    width = parts.keys.shape[-1]
    change = torch.eye(width, dtype=parts.keys.dtype, device=parts.keys.device)
    change = F.pad(change, (0, parts.written.shape[-1]))
    for keys, written, read, whole in zip(*(part.unbind(3) for part in rest), strict=True):
        new = F.pad(written, (width, 0)) - read @ change
        change = change * whole + keys.mT @ new
    return change[..., :width], change[..., width:]


def _scan_chunks(
    parts: DeltaChunks, state: Tensor | None, *, keeps_state: bool
) -> tuple[Tensor, Tensor | None]:
    """Take the state from chunk to chunk; return the outputs (B, G, S, N, C, V) and the last state.

    The first chunk without a state, and the last one whose state nobody reads, have no product
    with a state.
    """
    # Their gradients are joined once; a chunk by its index would have one of the whole row.
    chunks = list(zip(*(part.unbind(3) for part in parts), strict=True))
    outputs = []
    for number, (scores, queries, keys, written, read, whole) in enumerate(chunks, start=1):
        new = written if state is None else written - read @ state
        output = scores @ new
        if state is not None:
            output = output + queries @ state
        outputs.append(output)
        if number == len(chunks) and not keeps_state:
            return torch.stack(outputs, dim=3), None
        added = keys.mT @ new
        state = added if state is None else state * whole + added
    return torch.stack(outputs, dim=3), state
