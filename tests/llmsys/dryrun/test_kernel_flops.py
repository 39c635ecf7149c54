"""Laws of counted FLOPs: packed attention and grouped products equal a count of every pair and product."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmsys.dryrun.kernel_flops import count_kernel_flops

HEADS, WIDTH = 3, 8
STARTS = [0, 5, 6, 16]


def count_visible_pairs(causal: bool, left: int, right: int) -> int:
    """Pairs of positions one by one."""
    pairs = 0
    for start, end in pairwise(STARTS):
        for query in range(start, end):
            for key in range(start, end):
                is_near = (left < 0 or query - key <= left) and (right < 0 or key - query <= right)
                pairs += is_near and (not causal or key <= query)
    return pairs


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, -1)), (False, (-1, 0)), (False, (3, 0)), (False, (2, 1)),
                                                (False, (-1, -1))])  # fmt: skip
def test_packed_attention_counts_what_each_document_sees(causal: bool, window: tuple[int, int]) -> None:
    q = torch.empty(16, HEADS, WIDTH, device="meta")
    starts = torch.tensor(STARTS)
    forward: Any = SimpleNamespace(_opname="_varlen_attn")
    backward: Any = SimpleNamespace(_opname="_varlen_attn_backward")
    pairs = count_visible_pairs(causal, *window)
    arguments = (q, q, q, starts, starts, 10, 10, causal, None, list(window))
    assert count_kernel_flops(forward, arguments, {}, q) == 4 * pairs * HEADS * WIDTH
    arguments = (q, q, q, q, q, q, starts, starts, 10, 10, causal, q, None, list(window))
    assert count_kernel_flops(backward, arguments, {}, q) == 10 * pairs * HEADS * WIDTH


def test_grouped_products_count_each_row_once() -> None:
    rows, inner, outer, experts = 10, 4, 6, 3
    op: Any = SimpleNamespace(_opname="_grouped_mm")
    x, w = torch.empty(rows, inner), torch.empty(experts, inner, outer)
    assert count_kernel_flops(op, (x, w), {}, torch.empty(rows, outer)) == 2 * rows * inner * outer
    gradient = torch.empty(rows, outer)
    assert count_kernel_flops(op, (x.T, gradient), {}, w) == 2 * rows * inner * outer
