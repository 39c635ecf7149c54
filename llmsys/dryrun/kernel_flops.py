"""FLOPs of products and attention, by operation: torch's formulas, and those that torch lacks.

Invariants:
- `count_kernel_flops` counts attention over packed documents by document and the half that a causal
  mask leaves; flex_attention as `count_attention_flops` does.
- `count_attention_flops` counts what kernels compute: whole tiles, head widths as the kernel pads
  them, and products that it makes twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from llmsys.config.section import round_up_to_power_of_two
from llmsys.dryrun.known_values import get_known, leave_fake_mode
from llmsys.kernels import key_split
from llmsys.kernels.attention_kernel import FLEX_BLOCK


def count_forward_channels(key: int, value: int) -> int:
    """Return the multiplications and additions for a pair of positions and a head: its score, and
    its value's share.

    Args:
        key: channels of a key.
        value: channels of a value.

    Returns:
        Operations of the forward pass.
    """
    return 2 * (key + value)


def count_backward_channels(key: int, value: int, repeats: bool = False) -> int:
    """Return the same of flash attention's backward: the score again, and four gradients (Dao 2022,
    section 3.1).

    Args:
        key: channels of a key.
        value: channels of a value.
        repeats: count flex_attention's, which has a loop for gradients of queries and one for those
            of keys and values: both compute the score and its gradient.

    Returns:
        Operations of the backward pass.
    """
    return 2 * (4 * key + 3 * value if repeats else 3 * key + 2 * value)


Channels = Callable[[int, int], int]


def count_kernel_flops(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> int:
    """Return the FLOPs of one call, 0 for what is neither product nor attention.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its named arguments.
        outputs: its results.

    Returns:
        Multiplications and additions.
    """
    if count := OWN_FORMULAS.get(func._opname):
        return count(args, outputs)
    formula: Any = flop_registry.get(func._overloadpacket)
    # Products into another dtype take it as an argument, which torch's formulas do not know.
    args = tuple(one for one in args if not isinstance(one, torch.dtype))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


def count_attention_flops(func: OpOverload, args: tuple[Any, ...]) -> int:
    """Return the FLOPs that an attention kernel computes, 0 for what is none.

    A kernel computes whole tiles of queries × keys, also those that a border of a document or the
    diagonal cuts.

    Args:
        func: the operation.
        args: its arguments.

    Returns:
        Multiplications and additions.
    """
    if (count := ATTENTION_FORMULAS.get(func._opname)) is None:
        return 0
    # The dispatcher leaves out arguments at the end that have their default values, such as
    # is_causal=False.
    return count((*args, *(one.default_value for one in func._schema.arguments[len(args) :])))


def _count_varlen_tiles(
    query: Tensor,
    value: Tensor,
    starts: Tensor,
    window: tuple[int, int],
    count: Channels,
    tile: tuple[int, int],
) -> int:
    tiles = sum(count_tile_pairs(length, window, tile) for length in _list_lengths(query, starts))
    return tiles * query.shape[1] * count(query.shape[2], value.shape[2])


def _count_flash_tiles(
    query: Tensor, value: Tensor, is_causal: bool, count: Channels, tile: tuple[int, int]
) -> int:
    """Count dense flash attention over (rows, heads, positions, width)."""
    rows, heads, length, width = query.shape
    pairs = count_tile_pairs(length, (-1, 0 if is_causal else -1), tile)
    return rows * heads * pairs * count(width, value.shape[3])


def _count_table_scores(query: Tensor, key: Tensor, value: Tensor, count: Channels) -> int:
    rows, heads, length, width = query.shape
    return rows * heads * length * key.shape[2] * count(width, value.shape[3])


def count_tile_pairs(length: int, window: tuple[int, int], tile: tuple[int, int]) -> int:
    """Return the pairs of positions in the tiles that a document touches.

    Args:
        length: tokens of the document.
        window: keys to the left and to the right that a query sees; -1: all.
        tile: queries and keys of a tile.

    Returns:
        Queries times keys, both rounded up to tiles.
    """
    rows, columns = tile
    pairs = 0
    for start in range(0, length, rows):
        first = 0 if window[0] < 0 else max(0, start - window[0])
        last = length - 1 if window[1] < 0 else min(length, start + rows) - 1 + window[1]
        pairs += rows * columns * (min(last, length - 1) // columns - first // columns + 1)
    return pairs


def _count_grouped_products(args: tuple[Any, ...], outputs: Tensor) -> int:
    """2 · rows · in · out, where the rows are the ragged dim of grouped_mm."""
    left: Tensor = args[0]
    # (M, K) x (E, K, N) -> (M, N), or (K, M) x (M, N) -> (E, K, N).
    return 2 * left.shape[0] * left.shape[1] * outputs.shape[-1]


def _count_varlen_forward(args: tuple[Any, ...], outputs: Any) -> int:
    # (q, k, v, sinks, starts, longest, left, right, scale)
    return _count_packed_scores(
        args[0], args[2], args[4], (args[6], args[7]), count_forward_channels
    )


def _count_varlen_backward(args: tuple[Any, ...], outputs: Any) -> int:
    # (gradient, q, k, v, out, lse, starts, longest, left, right, scale)
    return _count_packed_scores(
        args[1], args[3], args[6], (args[8], args[9]), count_backward_channels
    )


def _count_packed_scores(
    query: Tensor, value: Tensor, starts: Tensor, window: tuple[int, int], count: Channels
) -> int:
    """Return the operations of the pairs of positions that see each other, over all documents
    and heads.
    """
    pairs = sum(_count_pairs(length, window) for length in _list_lengths(query, starts))
    return pairs * query.shape[1] * count(query.shape[2], value.shape[2])


def _list_lengths(query: Tensor, starts: Tensor) -> list[int]:
    """Return the lengths of packed documents."""
    known = get_known(starts)
    with leave_fake_mode():
        return (
            [query.shape[0]] if known is None else [int(length) for length in known.diff().tolist()]
        )


def _count_flex_forward(args: tuple[Any, ...], outputs: Any) -> int:
    # (q, k, v, table, blocks)
    return _count_blocks(args[0], args[1].shape[2], args[4]) * count_forward_channels(
        *_get_widths(args[0], args[2])
    )


def _count_flex_backward(args: tuple[Any, ...], outputs: Any) -> int:
    # (gradient, q, k, v, out, lse, table, blocks)
    widths = _get_widths(args[1], args[3])
    return _count_blocks(args[1], args[2].shape[2], args[7]) * count_backward_channels(
        *widths, repeats=True
    )


def _count_blocks(query: Tensor, num_keys: int, blocks: Tensor) -> int:
    """Return the pairs of positions in the blocks that are read, over all heads."""
    known = get_known(blocks)
    with leave_fake_mode():
        all_blocks = blocks.numel() * -(-num_keys // FLEX_BLOCK)
        num_blocks = all_blocks if known is None else int(known.sum())
    return num_blocks * FLEX_BLOCK**2 * query.shape[1]


def _get_widths(query: Tensor, value: Tensor) -> tuple[int, int]:
    """Return head widths as powers of two, as Triton's tiles are."""
    return round_up_to_power_of_two(query.shape[3], 16), round_up_to_power_of_two(
        value.shape[3], 16
    )


def _count_pairs(length: int, window: tuple[int, int]) -> int:
    left = length - 1 if window[0] < 0 else min(window[0], length - 1)
    right = length - 1 if window[1] < 0 else min(window[1], length - 1)
    # Positions near the ends see fewer keys.
    return length * (left + right + 1) - left * (left + 1) // 2 - right * (right + 1) // 2


OWN_FORMULAS: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "_grouped_mm": _count_grouped_products,
    "varlen_attention": _count_varlen_forward,
    "varlen_attention_backward": _count_varlen_backward,
    "fake_flex_attention": _count_flex_forward,
    "fake_flex_attention_backward": _count_flex_backward,
}
# Queries and keys of FlashAttention-2's tiles for heads of 128 channels on data center GPUs.
FORWARD_TILE = (128, 64)
BACKWARD_TILE = (64, 128)


def _count_varlen_kernel(args: tuple[Any, ...]) -> int:
    # (q, k, v, sinks, starts, longest, left, right, scale)
    is_own = args[0].shape[2] != args[2].shape[2]
    tile = key_split.FORWARD_TILE if is_own else FORWARD_TILE
    return _count_varlen_tiles(
        args[0], args[2], args[4], (args[6], args[7]), count_forward_channels, tile
    )


def _count_varlen_backward_kernel(args: tuple[Any, ...]) -> int:
    # (gradient, q, k, v, out, lse, starts, longest, left, right, scale)
    is_own = args[1].shape[2] != args[3].shape[2]
    tile = key_split.BACKWARD_TILE if is_own else BACKWARD_TILE
    return _count_varlen_tiles(
        args[1], args[3], args[6], (args[8], args[9]), count_backward_channels, tile
    )


# Arguments: flex as above; torch's flash (q, k, v, dropout, is_causal) and (gradient, q, k, v, out,
# lse, starts, starts, longest, longest, dropout, is_causal); efficient (q, k, v, …) and (gradient,
# q, k, v, …).
ATTENTION_FORMULAS: dict[str, Callable[[tuple[Any, ...]], int]] = {
    "varlen_attention": _count_varlen_kernel,
    "varlen_attention_backward": _count_varlen_backward_kernel,
    "fake_flex_attention": lambda a: _count_flex_forward(a, None),
    "fake_flex_attention_backward": lambda a: _count_flex_backward(a, None),
    "_scaled_dot_product_flash_attention": lambda a: _count_flash_tiles(
        a[0], a[2], a[4], count_forward_channels, FORWARD_TILE
    ),
    "_scaled_dot_product_flash_attention_backward": lambda a: _count_flash_tiles(
        a[1], a[3], a[11], count_backward_channels, BACKWARD_TILE
    ),
    "_scaled_dot_product_efficient_attention": lambda a: _count_table_scores(
        a[0], a[1], a[2], count_forward_channels
    ),
    "_scaled_dot_product_efficient_attention_backward": lambda a: _count_table_scores(
        a[1], a[2], a[3], count_backward_channels
    ),
}
