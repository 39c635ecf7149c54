"""Sums whose order is fixed by what is summed and never by who holds it.

A step is a fixed list of micro-batches, numbered over all ranks. Their gradients are the leaves of one binary tree:
0 with 1, 2 with 3, then pairs of pairs, and so on. Rank r of W takes the leaves r, W + r, 2W + r, …; so the leaves of
one turn stand side by side, and when W is a power of two they are a whole subtree, whichever rank had which. Each sum
here is made of single additions of two tensors, elementwise: no kernel is free to choose another order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmsys.parallel.process_group import all_reduce_sum

# R rows, K columns, L leaves

BLOCK = 1 << 16
"""Squares that are added up first, in float64; they stay in cache."""


def sum_tree(leaves: Tensor) -> Tensor:
    """The sum over the first dim, a power of two, by the tree. Overwrites `leaves`."""
    while len(leaves) > 1:
        leaves = leaves.unflatten(0, (-1, 2))
        leaves = leaves[:, 0].add_(leaves[:, 1])
    return leaves[0]


class StreamingTreeSum:
    """The tree over leaves that come one after another: at most one unfinished sum of each size is kept.

    A leaf is a list of tensors, and is overwritten.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []

    def add_leaf(self, leaf: list[Tensor]) -> None:
        """The next leaf, or the next whole subtree when all are of one size."""
        level = 0
        while self._sums and self._sums[-1][0] == level:
            _, earlier = self._sums.pop()
            torch._foreach_add_(earlier, leaf)
            leaf, level = earlier, level + 1
        self._sums.append((level, leaf))

    def compute_total(self) -> list[Tensor]:
        """The sum of all leaves: what is unfinished is added from the smallest sum on."""
        _, total = self._sums.pop()
        while self._sums:
            _, earlier = self._sums.pop()
            torch._foreach_add_(earlier, total)
            total = earlier
        return total


def sum_rows_pairwise(x_RK: Tensor) -> Tensor:
    """The sum of each row, by adding the second half of the columns to the first until one is left. Overwrites x."""
    columns = x_RK.shape[1]
    while columns > 1:
        half = (columns + 1) // 2
        x_RK[:, : columns - half].add_(x_RK[:, half:columns])
        columns = half
    return x_RK[:, 0]


def compute_row_squared_norms(gradient: Tensor) -> Tensor:
    """The sum of squares of each row (index of the first dim), float64; whatever other rows there are."""
    x_RK = gradient[:, None].flatten(1)
    num_rows = max(1, BLOCK // max(1, x_RK.shape[1]))
    found = gradient.new_empty(len(x_RK), dtype=torch.float64)
    for start in range(0, len(x_RK), num_rows):
        blocks = [
            sum_rows_pairwise(part.double().square_()) for part in x_RK[start : start + num_rows].split(BLOCK, dim=1)
        ]
        found[start : start + num_rows] = sum_rows_pairwise(torch.stack(blocks, dim=1))
    return found


@torch.no_grad()
def compute_gradient_norm(parameters: Sequence[Tensor], gradients: Sequence[Tensor], *, counts: bool) -> float:
    """The norm over all parameters, from the rows that this rank holds of each gradient. Collective.

    Every row's sum of squares goes to its place in the list of all rows, where every other rank has a zero; so the sum
    over ranks only collects. `counts` is false on ranks whose rows another rank has too.
    """
    squares = torch.zeros(1, sum(map(len, parameters)), dtype=torch.float64, device=gradients[0].device)
    first = 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if counts:
            start = first + get_first_row(parameter)
            squares[0, start : start + len(gradient)] = compute_row_squared_norms(gradient)
        first += len(parameter)
    return float(sum_rows_pairwise(all_reduce_sum(squares)).sqrt())


def get_first_row(parameter: Tensor) -> int:
    """The number of this rank's first row in the whole parameter; only rows may be dealt out."""
    if not isinstance(parameter, DTensor):
        return 0
    if any(isinstance(placement, Shard) and placement.dim != 0 for placement in parameter.placements):
        raise ValueError(f"{parameter.placements} splits rows, whose squares are summed on one rank. Split dim 0.")
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0]
