"""Laws of counted FLOPs: packed attention and grouped products equal a count of every pair and
product.
"""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmsys.dryrun.kernel_flops import (
    BACKWARD_TILE,
    FORWARD_TILE,
    count_attention_flops,
    count_kernel_flops,
    count_tile_pairs,
)
from llmsys.kernels import key_split
from llmsys.kernels.attention_kernel import FLEX_BLOCK
from llmsys.model import fake_flex_attention, varlen_attention  # noqa: F401  # they register their operations

OPERATIONS = torch.ops.llmsys
VARLEN, VARLEN_BACKWARD = (
    OPERATIONS.varlen_attention.default,
    OPERATIONS.varlen_attention_backward.default,
)
FLEX, FLEX_BACKWARD = (
    OPERATIONS.fake_flex_attention.default,
    OPERATIONS.fake_flex_attention_backward.default,
)
HEADS, WIDTH = 3, 8
STARTS = [0, 5, 6, 16]


def count_visible_pairs(left: int, right: int) -> int:
    """Pairs of positions one by one."""
    pairs = 0
    for start, end in pairwise(STARTS):
        for query in range(start, end):
            for key in range(start, end):
                pairs += (left < 0 or query - key <= left) and (right < 0 or key - query <= right)
    return pairs


@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (2, 1), (-1, -1)])
def test_packed_attention_counts_what_each_document_sees(window: tuple[int, int]) -> None:
    q = torch.empty(16, HEADS, WIDTH, device="meta")
    starts = torch.tensor(STARTS)
    scores = count_visible_pairs(*window) * HEADS * WIDTH
    assert (
        count_kernel_flops(VARLEN, (q, q, q, None, starts, 10, *window, 1.0), {}, q) == 4 * scores
    )
    assert (
        count_kernel_flops(VARLEN_BACKWARD, (q, q, q, q, q, q, starts, 10, *window, 1.0), {}, q)
        == 10 * scores
    )


def test_flex_attention_counts_the_blocks_that_are_read_and_widths_as_powers_of_two() -> None:
    q, v = (torch.empty(1, HEADS, 300, width, device="meta") for width in (192, 128))
    blocks, pairs = torch.tensor([[[1, 2, 3]]]), 6 * FLEX_BLOCK**2 * HEADS
    for count in (count_attention_flops, lambda op, args: count_kernel_flops(op, args, {}, q)):
        assert count(FLEX, (q, q, v, None, blocks)) == 2 * pairs * (256 + 128)
        # Scores and their gradients twice: for the gradients of queries, and for those of keys and
        # values.
        assert count(FLEX_BACKWARD, (q, q, q, v, q, q, None, blocks)) == 2 * pairs * (
            4 * 256 + 3 * 128
        )


def test_grouped_products_count_each_row_once() -> None:
    rows, inner, outer, experts = 10, 4, 6, 3
    op: Any = SimpleNamespace(_opname="_grouped_mm")
    x, w = torch.empty(rows, inner), torch.empty(experts, inner, outer)
    assert count_kernel_flops(op, (x, w), {}, torch.empty(rows, outer)) == 2 * rows * inner * outer
    gradient = torch.empty(rows, outer)
    assert count_kernel_flops(op, (x.T, gradient), {}, w) == 2 * rows * inner * outer


@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (7, 2), (-1, -1)])
@pytest.mark.parametrize("tile", [(4, 2), (2, 4), (16, 8)])
def test_a_tile_counts_whole_where_one_of_its_pairs_is_seen(
    window: tuple[int, int], tile: tuple[int, int]
) -> None:
    for length in (1, 5, 16, 19):
        seen = {
            (query // tile[0], key // tile[1])
            for query in range(length)
            for key in range(length)
            if (window[0] < 0 or query - key <= window[0])
            and (window[1] < 0 or key - query <= window[1])
        }
        assert count_tile_pairs(length, window, tile) == len(seen) * tile[0] * tile[1]


@pytest.mark.parametrize("key", [64, 192])
def test_kernels_compute_tiles_of_each_document(key: int) -> None:
    """Keys as wide as values take FlashAttention-2, wider ones llmsys/model/varlen_kernel.py;
    none is padded.
    """
    q, v = torch.empty(400, HEADS, key, device="meta"), torch.empty(400, HEADS, 64, device="meta")
    starts = torch.tensor([0, 100, 400])
    tiles = (
        (FORWARD_TILE, BACKWARD_TILE)
        if key == 64
        else (key_split.FORWARD_TILE, key_split.BACKWARD_TILE)
    )
    for op, args, tile, channels in (
        (VARLEN, (q, q, v, None, starts, 300, -1, 0, 1.0), tiles[0], 2 * (key + 64)),
        (
            VARLEN_BACKWARD,
            (q, q, q, v, q, q, starts, 300, -1, 0, 1.0),
            tiles[1],
            2 * (3 * key + 2 * 64),
        ),
    ):
        pairs = sum(count_tile_pairs(length, (-1, 0), tile) for length in (100, 300))
        assert count_attention_flops(op, args) == pairs * HEADS * channels
    assert count_attention_flops(torch.ops.aten.mm.default, ()) == 0


def test_arguments_that_the_dispatcher_leaves_out_have_their_defaults() -> None:
    """A ring sees all keys of some ranks: `is_causal=False` is not among the arguments then."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.empty(1, HEADS, 256, 64, device="meta")
    short, whole = (
        count_attention_flops(flash, (q, q, q)),
        count_attention_flops(flash, (q, q, q, 0.0, False)),
    )
    assert short == whole == 4 * HEADS * 256 * 256 * 64


def test_products_into_another_dtype_count_like_others() -> None:
    total, a, b = (torch.empty(shape, device="meta") for shape in ((5, 7), (5, 3), (3, 7)))
    for op, args in (
        (torch.ops.aten.mm.dtype, (a, b)),
        (torch.ops.aten.addmm.dtype, (total, a, b)),
    ):
        assert count_kernel_flops(op, (*args, torch.float32), {}, total) == 2 * 5 * 3 * 7
