"""Triton kernels of flash attention over packed sequences, for keys that are wider than values
(FlashAttention-2).

torch's flash attention takes one width: with the 192 and 128 channels of DeepSeek-V3 it would
compute a fifth more. flex_attention rounds widths up to powers of two and computes 1.5 to 1.7 times
as much. A head of keys is multiplied in two parts whose widths are powers of two, 128 and 64. The
backward makes the five products of a tile once (Dao 2023, arXiv:2307.08691, algorithm 2), and adds
to the gradients of queries in float32 by atomic operations.

Imported where a kernel runs: triton comes with torch's CUDA wheels only.

Invariants:
- Tiles of queries and keys begin where a document begins, and no tile beyond the diagonal is
  computed.
- With `torch.use_deterministic_algorithms` equal inputs give equal bits: the backward then starts
  once for each tile of keys of a document, one after another.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmsys.kernels.key_split import (
    BACKWARD_TILE,
    FORWARD_TILE,
    choose_backward_tile,
    choose_options,
    split_width,
)

# P packed positions, H heads, K width of a key, V width of a value, N documents

LOG2_E = tl.constexpr(math.log2(math.e))
DELTA_ROWS = 64


@triton.jit
def _load_tile(base, rows, stride, is_row, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    """Return channels OFFSET to OFFSET + WIDTH of rows, zeros where `is_row` is False."""
    # int64: 131,072 positions of 128 heads have more than 2**31 elements.
    places = base + rows.to(tl.int64)[:, None] * stride + OFFSET + tl.arange(0, WIDTH)[None, :]
    return tl.load(places, mask=is_row[:, None], other=0.0)


@triton.jit
def _store_tile(base, rows, stride, is_row, tile, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    places = base + rows.to(tl.int64)[:, None] * stride + OFFSET + tl.arange(0, WIDTH)[None, :]
    tl.store(places, tile.to(base.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def _add_to_tile(base, rows, stride, is_row, tile, OFFSET: tl.constexpr, WIDTH: tl.constexpr):
    places = base + rows.to(tl.int64)[:, None] * stride + OFFSET + tl.arange(0, WIDTH)[None, :]
    tl.atomic_add(places, tile, mask=is_row[:, None], sem="relaxed")


@triton.jit
def _score_keys(q_1, q_2, k_1, k_2, WIDTH_2: tl.constexpr):
    """Return the scores of queries and keys whose channels are in two parts, or in one."""
    scores = tl.dot(q_1, k_1.T)
    if WIDTH_2:
        scores += tl.dot(q_2, k_2.T)
    return scores


@triton.jit
def _add_keys(
    q_1, q_2, state, keys, values, key_row, value_row, rows, begin, length, scale_log2,
    IS_CAUSAL: tl.constexpr, IS_MASKED: tl.constexpr,
    WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, WIDTH_V: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Return maximum, denominator and output of a tile of queries after one more tile of keys."""
    highest, total, out = state
    columns = begin + tl.arange(0, TILE_K)
    is_key = columns < length
    k_1 = _load_tile(keys, columns, key_row, is_key, 0, WIDTH_1)
    k_2 = k_1
    if WIDTH_2:
        k_2 = _load_tile(keys, columns, key_row, is_key, WIDTH_1, WIDTH_2)
    scores = _score_keys(q_1, q_2, k_1, k_2, WIDTH_2) * scale_log2
    if IS_MASKED:
        is_seen = is_key[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (columns[None, :] <= rows[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - new_highest[:, None])
    correction = tl.exp2(highest - new_highest)
    v = _load_tile(values, columns, value_row, is_key, 0, WIDTH_V)
    out = tl.dot(weights.to(v.dtype), v, out * correction[:, None])
    return new_highest, total * correction + tl.sum(weights, 1), out


@triton.jit
def compute_tile(
    queries, keys, values, outputs, lse_HP, cu_lengths,
    query_row, query_head, key_row, key_head, value_row, value_head, num_positions, num_tiles,
    scale_log2,
    IS_CAUSAL: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, WIDTH_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Compute the output and the log-sum-exp of a tile of queries of one document and head."""
    document = tl.program_id(0) // num_tiles
    head = tl.program_id(1)
    # The longest rows of a causal triangle first.
    begin = (num_tiles - 1 - tl.program_id(0) % num_tiles) * TILE_Q
    start = tl.load(cu_lengths + document)
    length = tl.load(cu_lengths + document + 1) - start
    if begin >= length:
        return
    origin = start.to(tl.int64)
    rows = begin + tl.arange(0, TILE_Q)
    is_query = rows < length
    queries += origin * query_row + head * query_head
    keys += origin * key_row + head * key_head
    values += origin * value_row + head * value_head
    q_1 = _load_tile(queries, rows, query_row, is_query, 0, WIDTH_1)
    q_2 = q_1
    if WIDTH_2:
        q_2 = _load_tile(queries, rows, query_row, is_query, WIDTH_1, WIDTH_2)
    state = (
        tl.full([TILE_Q], float("-inf"), tl.float32), tl.zeros([TILE_Q], tl.float32),
        tl.zeros([TILE_Q, WIDTH_V], tl.float32),
    )  # fmt: skip
    end = length
    whole = length // TILE_K * TILE_K
    if IS_CAUSAL:
        end = tl.minimum(begin + TILE_Q, length)
        whole = begin
    for at in range(0, whole, TILE_K):
        state = _add_keys(
            q_1, q_2, state, keys, values, key_row, value_row, rows, at, length, scale_log2,
            IS_CAUSAL, False, WIDTH_1, WIDTH_2, WIDTH_V, TILE_K,
        )  # fmt: skip
    for at in range(whole, end, TILE_K):
        state = _add_keys(
            q_1, q_2, state, keys, values, key_row, value_row, rows, at, length, scale_log2,
            IS_CAUSAL, True, WIDTH_1, WIDTH_2, WIDTH_V, TILE_K,
        )  # fmt: skip
    highest, total, out = state
    out_row = tl.num_programs(1) * WIDTH_V
    outputs += origin * out_row + head * WIDTH_V
    _store_tile(outputs, rows, out_row, is_query, out / total[:, None], 0, WIDTH_V)
    places = lse_HP + head.to(tl.int64) * num_positions + origin + rows
    tl.store(places, (highest + tl.log2(total)) / LOG2_E, mask=is_query)


@triton.jit
def compute_delta(outputs, gradients, delta_HP, gradient_row, gradient_head, num_positions,
    WIDTH: tl.constexpr,
                  ROWS: tl.constexpr):  # fmt: skip
    """Compute the dot products of outputs and their gradients, which the softmax's derivative
    needs.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    is_row = rows < num_positions
    out_row = tl.num_programs(1) * WIDTH
    out = _load_tile(outputs + head * WIDTH, rows, out_row, is_row, 0, WIDTH).to(tl.float32)
    dout = _load_tile(gradients + head * gradient_head, rows, gradient_row, is_row, 0, WIDTH).to(
        tl.float32
    )
    tl.store(
        delta_HP + head.to(tl.int64) * num_positions + rows, tl.sum(out * dout, 1), mask=is_row
    )


@triton.jit
def compute_tile_gradients(
    queries, keys, values, gradients, lse_HP, delta_HP, dq_PHK, dk_PHK, dv_PHV, cu_lengths,
    query_row, query_head, key_row, key_head, value_row, value_head, gradient_row, gradient_head,
    num_positions, num_tiles, first_tile, scale,
    IS_CAUSAL: tl.constexpr, WIDTH_1: tl.constexpr, WIDTH_2: tl.constexpr, WIDTH_V: tl.constexpr,
    TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and values, and add its share to those of the
    queries that see it.
    """
    document = tl.program_id(0) // num_tiles
    head = tl.program_id(1)
    begin = (first_tile + tl.program_id(0) % num_tiles) * TILE_K
    start = tl.load(cu_lengths + document)
    length = tl.load(cu_lengths + document + 1) - start
    if begin >= length:
        return
    origin = start.to(tl.int64)
    columns = begin + tl.arange(0, TILE_K)
    is_key = columns < length
    queries += origin * query_row + head * query_head
    gradients += origin * gradient_row + head * gradient_head
    keys += origin * key_row + head * key_head
    values += origin * value_row + head * value_head
    own_row = tl.num_programs(1) * (WIDTH_1 + WIDTH_2)
    dq_PHK += origin * own_row + head * (WIDTH_1 + WIDTH_2)
    dk_PHK += origin * own_row + head * (WIDTH_1 + WIDTH_2)
    dv_PHV += origin * tl.num_programs(1) * WIDTH_V + head * WIDTH_V
    numbers = head.to(tl.int64) * num_positions + origin
    k_1 = _load_tile(keys, columns, key_row, is_key, 0, WIDTH_1)
    v = _load_tile(values, columns, value_row, is_key, 0, WIDTH_V)
    dk_1 = tl.zeros([TILE_K, WIDTH_1], tl.float32)
    dv = tl.zeros([TILE_K, WIDTH_V], tl.float32)
    k_2 = k_1
    dk_2 = dk_1
    if WIDTH_2:
        k_2 = _load_tile(keys, columns, key_row, is_key, WIDTH_1, WIDTH_2)
        dk_2 = tl.zeros([TILE_K, WIDTH_2], tl.float32)
    first = 0
    if IS_CAUSAL:
        first = begin // TILE_Q * TILE_Q
    for at in range(first, length, TILE_Q):
        rows = at + tl.arange(0, TILE_Q)
        is_query = rows < length
        q_1 = _load_tile(queries, rows, query_row, is_query, 0, WIDTH_1)
        q_2 = q_1
        if WIDTH_2:
            q_2 = _load_tile(queries, rows, query_row, is_query, WIDTH_1, WIDTH_2)
        scores = _score_keys(q_1, q_2, k_1, k_2, WIDTH_2)
        lse = tl.load(lse_HP + numbers + rows, mask=is_query, other=0.0)
        delta = tl.load(delta_HP + numbers + rows, mask=is_query, other=0.0)
        is_seen = (
            is_query[:, None]
            & is_key[None, :]
            & ((columns[None, :] <= rows[:, None]) | (not IS_CAUSAL))
        )
        weights = tl.where(is_seen, tl.exp2((scores * scale - lse[:, None]) * LOG2_E), 0.0)
        dout = _load_tile(gradients, rows, gradient_row, is_query, 0, WIDTH_V)
        dv = tl.dot(weights.to(dout.dtype).T, dout, dv)
        dscores = (weights * (tl.dot(dout, v.T) - delta[:, None]) * scale).to(q_1.dtype)
        dk_1 = tl.dot(dscores.T, q_1, dk_1)
        _add_to_tile(dq_PHK, rows, own_row, is_query, tl.dot(dscores, k_1), 0, WIDTH_1)
        if WIDTH_2:
            dk_2 = tl.dot(dscores.T, q_2, dk_2)
            _add_to_tile(dq_PHK, rows, own_row, is_query, tl.dot(dscores, k_2), WIDTH_1, WIDTH_2)
    _store_tile(dv_PHV, columns, tl.num_programs(1) * WIDTH_V, is_key, dv, 0, WIDTH_V)
    _store_tile(dk_PHK, columns, own_row, is_key, dk_1, 0, WIDTH_1)
    if WIDTH_2:
        _store_tile(dk_PHK, columns, own_row, is_key, dk_2, WIDTH_1, WIDTH_2)


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_lengths: Tensor,
    max_length: int,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention within documents and its log-sum-exp.

    Args:
        q: Queries, fp16 or bf16, (P, H, K), contiguous in the last dim.
        k: Keys, (P, H, K).
        v: Values, (P, H, V).
        cu_lengths: Cumulative lengths of the documents, int32 (N + 1,).
        max_length: At least the tokens of the longest document.
        is_causal: Whether later keys are hidden.
        scale: Factor on the scores.

    Returns:
        The output, (P, H, V), and the log-sum-exp of each query's scores, float32 (H, P).
    """
    positions, heads, _ = q.shape
    out = q.new_empty(positions, heads, v.shape[2])
    lse_HP = q.new_empty(heads, positions, dtype=torch.float32)
    num_tiles = -(-max_length // FORWARD_TILE[0])
    options = choose_options(_find_capability(q), is_backward=False)
    compute_tile[((len(cu_lengths) - 1) * num_tiles, heads)](
        q, k, v, out, lse_HP, cu_lengths, *_list_strides(q, k, v), positions, num_tiles,
        scale * math.log2(math.e),
        is_causal, *split_width(q.shape[2]), v.shape[2], *FORWARD_TILE, **options,
    )  # fmt: skip
    return out, lse_HP


def run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_HP: Tensor, cu_lengths: Tensor,
    max_length: int,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values.

    Args:
        dout: Gradient of the output, (P, H, V), contiguous in the last dim.
        q: Queries, (P, H, K).
        k: Keys, (P, H, K).
        v: Values, (P, H, V).
        out: Output, (P, H, V), contiguous.
        lse_HP: Log-sum-exp, float32.
        cu_lengths: Cumulative lengths, int32 (N + 1,).
        max_length: At least the tokens of the longest document.
        is_causal: Whether later keys are hidden.
        scale: Factor on the scores.

    Returns:
        The gradients, contiguous: of queries in float32, of keys and values in their dtype.
    """
    positions, heads, width = v.shape
    delta_HP = torch.empty_like(lse_HP)
    compute_delta[(-(-positions // DELTA_ROWS), heads)](
        out, dout, delta_HP, *dout.stride()[:2], positions, width, DELTA_ROWS
    )
    dq = q.new_zeros(q.shape, dtype=torch.float32)
    dk = k.new_empty(k.shape)
    dv = v.new_empty(v.shape)
    num_tiles = -(-max_length // BACKWARD_TILE[1])
    documents = len(cu_lengths) - 1
    capability = _find_capability(q)
    tile = choose_backward_tile(capability)
    options = choose_options(capability, is_backward=True)
    # Atomic sums have no order within one start.
    starts = range(num_tiles) if torch.are_deterministic_algorithms_enabled() else (0,)
    for first in starts:
        tiles = num_tiles // len(starts)
        compute_tile_gradients[(documents * tiles, heads)](
            q, k, v, dout, lse_HP, delta_HP, dq, dk, dv, cu_lengths, *_list_strides(q, k, v, dout),
            positions, tiles,
            first, scale, is_causal, *split_width(q.shape[2]), width, *tile, **options,
        )  # fmt: skip
    return dq, dk, dv


def _find_capability(x: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else None


def _list_strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]
