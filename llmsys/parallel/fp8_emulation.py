"""fp8 matmuls by rounding to 8 bits and multiplying in float32, for tests and for comparisons on
any device.

A linear layer is the case of one expert. Each of the three products of forward and backward rounds
both inputs with scales along the dim that it sums over: channels in, channels out, and rows of an
expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.model import cpu_kernels

# M rows grouped by expert, E experts, K channels in, N channels out

# Neighbours with one scale, and rows and columns of a tile.
BLOCK = 128

MAX_E4M3 = 448.0


def compute_fp8_matmul(x_MK: Tensor, weight_EKN: Tensor, ends_E: Tensor, in_blocks: bool) -> Tensor:
    """Return the rows of each expert times its weights, with inputs rounded to e4m3, in backward
    too.

    Args:
        x_MK: Rows grouped by expert.
        weight_EKN: Weights; with `in_blocks` of widths that BLOCK divides.
        ends_E: End of each expert's rows, int32.
        in_blocks: Scales of 128 neighbours and of 128 × 128 tiles of weights; else of full rows.

    Returns:
        The products, (M, N), in the dtype of `x_MK`.
    """
    y_MN: Tensor = _Fp8Matmul.apply(x_MK, weight_EKN, ends_E, in_blocks)  # type: ignore[no-untyped-call]
    return y_MN


class _Fp8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_EKN: Tensor, ends_E: Tensor, in_blocks: bool
    ) -> Tensor:
        ctx.save_for_backward(x_MK, weight_EKN, ends_E)
        ctx.in_blocks = in_blocks
        weight = _round_weights(weight_EKN, 1, in_blocks)
        y_MN: Tensor = cpu_kernels.compute_grouped_mm(_round_rows(x_MK, in_blocks), weight, ends_E)
        return y_MN.to(x_MK.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_MK, weight_EKN, ends_E = ctx.saved_tensors
        gradient_MN = gradients[0].contiguous()
        in_blocks = ctx.in_blocks
        weight = _round_weights(weight_EKN, 2, in_blocks).transpose(1, 2)
        dx_MK = cpu_kernels.compute_grouped_mm(_round_rows(gradient_MN, in_blocks), weight, ends_E)
        groups = _number_row_groups(len(x_MK), ends_E, in_blocks)
        rounded = (_round_columns(value, *groups, in_blocks) for value in (x_MK, gradient_MN))
        dweight_EKN = cpu_kernels.compute_grouped_weight_gradient(*rounded, ends_E)
        return dx_MK.to(x_MK.dtype), dweight_EKN.to(weight_EKN.dtype), None, None


def _round_to_e4m3(x: Tensor, largest: Tensor, in_blocks: bool) -> Tensor:
    """Round float32 values to e4m3 with the scale that makes `largest` its greatest number, or
    nearly so.
    """
    # A row of zeros has no largest value to divide by.
    scale = largest.clamp(min=1e-12) / MAX_E4M3
    if not in_blocks:
        scale = scale.log2().ceil().exp2()  # torchao rounds the scales of rows up to powers of two
    return (x / scale).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn).float() * scale


def _round_rows(x_MK: Tensor, in_blocks: bool) -> Tensor:
    x_MK = x_MK.float()
    if not in_blocks:
        return _round_to_e4m3(x_MK, x_MK.abs().amax(1, keepdim=True), in_blocks)
    x_MBK = x_MK.unflatten(1, (-1, BLOCK))
    return _round_to_e4m3(x_MBK, x_MBK.abs().amax(2, keepdim=True), in_blocks).flatten(1)


def _round_weights(weight_EKN: Tensor, summed: int, in_blocks: bool) -> Tensor:
    """Round weights with scales along the summed dim, or by tiles."""
    weight_EKN = weight_EKN.float()
    if not in_blocks:
        return _round_to_e4m3(weight_EKN, weight_EKN.abs().amax(summed, keepdim=True), in_blocks)
    tiles = weight_EKN.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    return (
        _round_to_e4m3(tiles, tiles.abs().amax((2, 4), keepdim=True), in_blocks)
        .flatten(3)
        .flatten(1, 2)
    )


def _round_columns(x_MK: Tensor, group_M: Tensor, num_groups: int, in_blocks: bool) -> Tensor:
    """Round with a scale for each column of each group of rows."""
    x_MK = x_MK.float()
    largest_GK = x_MK.new_zeros(num_groups, x_MK.shape[1])
    largest_GK = largest_GK.scatter_reduce(0, group_M[:, None].expand_as(x_MK), x_MK.abs(), "amax")
    return _round_to_e4m3(x_MK, largest_GK[group_M], in_blocks)


def _number_row_groups(num_rows: int, ends_E: Tensor, in_blocks: bool) -> tuple[Tensor, int]:
    """Return the group of each row, (M,), and a bound on their number: an expert's rows, or up
    to 128 of them.
    """
    row_M = torch.arange(num_rows, device=ends_E.device)
    # Ends are exclusive: the row with that number is the next expert's.
    expert_M = torch.searchsorted(ends_E.long(), row_M, right=True)
    if not in_blocks:
        return expert_M, len(ends_E)
    starts_E = F.pad(ends_E[:-1], (1, 0))
    blocks_E = (ends_E - starts_E + BLOCK - 1) // BLOCK
    first_E = blocks_E.cumsum(0) - blocks_E
    # Each expert adds at most one block that is not full.
    return first_E[expert_M] + (row_M - starts_E[expert_M]) // BLOCK, num_rows // BLOCK + len(
        ends_E
    )
