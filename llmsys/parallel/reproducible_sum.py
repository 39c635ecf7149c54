"""Sums in an order that depends on the summands alone, never on the ranks that hold them.

A step is a fixed list of micro-batches, numbered over all ranks. Their gradients are the leaves of
one binary tree: 0 with 1, 2 with 3, then pairs of pairs, and so on. Rank r of W takes the leaves r,
W + r, 2W + r, …; so the leaves of one round are adjacent, and when W is a power of two they are a
full subtree.

Invariants:
- Every sum consists of element-wise additions of two tensors: no kernel can choose another order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from llmsys.parallel.process_group import all_reduce_sum

# R rows, K columns, L leaves

# Squares summed at a time, in float64; they stay in cache.
BLOCK = 1 << 16


def sum_tree(leaves: Tensor) -> Tensor:
    """Sum over the first dim by a binary tree: the order of the sum depends on its size alone.

    Args:
        leaves: Summands, (2^k, ...). Overwritten.

    Returns:
        The sum, (...).
    """
    while len(leaves) > 1:
        leaves = leaves.unflatten(0, (-1, 2))
        leaves = leaves[:, 0].add_(leaves[:, 1])
    return leaves[0]


class StreamingTreeSum:
    """The tree over leaves that arrive one after another; at most one unfinished sum of each size
    is kept.

    A leaf is a list of tensors, and is overwritten.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []

    def add_leaf(self, leaf: list[Tensor]) -> None:
        """Add the next leaf, or the next full subtree when all are of one size.

        Args:
            leaf: Tensors of the same shapes in every call. The sum keeps and overwrites them: give
                it copies of what is still needed.
        """
        level = 0
        # As carries of a binary counter: two sums of one size make the next size.
        while self._sums and self._sums[-1][0] == level:
            _, earlier = self._sums.pop()
            torch._foreach_add_(earlier, leaf)
            leaf = earlier
            level = level + 1
        self._sums.append((level, leaf))

    def get_subtree(self) -> list[Tensor]:
        """Return the sum of the leaves so far, whose number is a power of two; the next leaf may
        overwrite it.
        """
        [(_, gradients)] = self._sums
        return gradients

    def compute_total(self) -> list[Tensor]:
        """Return the sum of all leaves; unfinished sums are added from the smallest on."""
        _, total = self._sums.pop()
        while self._sums:
            _, earlier = self._sums.pop()
            torch._foreach_add_(earlier, total)
            total = earlier
        return total


def sum_rows_pairwise(x_RK: Tensor) -> Tensor:
    """Sum each row, by adding the second half of the columns to the first until one is left.

    Args:
        x_RK: R rows of K columns; overwritten.

    Returns:
        The sums, (R,).
    """
    columns = x_RK.shape[1]
    while columns > 1:
        half = (columns + 1) // 2
        # Of an odd number, the middle column is left as it is.
        x_RK[:, : columns - half].add_(x_RK[:, half:columns])
        columns = half
    return x_RK[:, 0]


def compute_row_squared_norms(gradient: Tensor) -> Tensor:
    """Compute the sum of squares of each row, independent of the other rows.

    Args:
        gradient: A gradient; a row is an index of its first dim.

    Returns:
        float64 (rows,).
    """
    x_RK = gradient[:, None].flatten(1)
    num_rows = max(1, BLOCK // max(1, x_RK.shape[1]))
    norms_R = gradient.new_empty(len(x_RK), dtype=torch.float64)
    for start in range(0, len(x_RK), num_rows):
        blocks = [
            sum_rows_pairwise(part.double().square_())
            for part in x_RK[start : start + num_rows].split(BLOCK, dim=1)
        ]
        norms_R[start : start + num_rows] = sum_rows_pairwise(torch.stack(blocks, dim=1))
    return norms_R


@torch.no_grad()
def compute_gradient_norm(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    counts: bool,
    first_rows: Sequence[int],
    num_rows: int,
) -> float:
    """Compute the norm over all parameters, from the rows that this rank holds of each gradient.
    Collective.

    Args:
        parameters: Parameters, full or sharded; of the axes, at most one shards another dim than
            the first.
        gradients: This rank's shard of each gradient.
        counts: False on ranks whose rows another rank counts.
        first_rows: Number of the first row of each parameter, among those of the whole model.
        num_rows: Rows of the whole model, in all stages of a pipeline.

    Returns:
        The norm, equal on all ranks.
    """
    # One slot per row of all parameters. Every other rank has a zero there, so the sum over ranks
    # only collects.
    squares = torch.zeros(1, num_rows, dtype=torch.float64, device=gradients[0].device)
    for parameter, gradient, first in zip(parameters, gradients, first_rows, strict=True):
        first_row, rows = gather_rows(parameter, gradient)
        if counts:
            start = first + first_row
            squares[0, start : start + len(rows)] = compute_row_squared_norms(rows)
    return float(sum_rows_pairwise(all_reduce_sum(squares)).sqrt())


def gather_rows(parameter: Tensor, gradient: Tensor) -> tuple[int, Tensor]:
    """Return full rows of a gradient, and the number of the first of them in the full parameter.

    Collective where an axis shards another dim than the first, as for experts that are split
    inside: there each rank of the axis gets the rows that Shard(0) would give it.

    Args:
        parameter: The parameter; rows are indices of its first dim.
        gradient: This rank's shard of its gradient.
    """
    if not isinstance(parameter, DTensor):
        return 0, gradient
    mesh = parameter.device_mesh
    placements = parameter.placements
    _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim:
            line = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[axis]]
            split = DTensor.from_local(gradient, line, [placement], run_check=False)
            rows = split.redistribute(line, [Shard(0)])
            _, own = compute_local_shape_and_global_offset(split.shape, line, [Shard(0)])
            return offset[0] + own[0], rows.to_local()
    return offset[0], gradient
