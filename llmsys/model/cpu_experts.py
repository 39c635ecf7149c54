"""Grouped products for bfloat16 on the CPU, whose numbers of rows are rounded up.

torch's own grouped product computes each group with the matrix product of oneDNN, which writes machine code for every
shape it has not met. Experts get another number of rows in every step, so it would never stop writing: as much as the
product itself costs at 250 rows of width 256. Here a product takes the rows of a group and as many rows behind them as
make a multiple of STEP; the results of these are overwritten by the next group's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# M rows grouped by expert, E experts, D width of a row, F width of its product

STEP = 32


def is_cpu_grouped_mm_supported(x_MD: Tensor) -> bool:
    """Whether this path applies; float32 goes another way through the CPU's libraries."""
    return x_MD.device.type == "cpu" and x_MD.dtype == torch.bfloat16


@torch.library.custom_op("llmsys::grouped_product", mutates_args=())
def compute_grouped_mm(x_MD: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """The rows of expert e times its weights, (M, F); they end before row `ends_E[e]`, the last ones at M."""
    y_MF = x_MD.new_empty(len(x_MD), weight_EDF.shape[2])
    for expert, start, _, behind in _iter_groups(ends_E):
        torch.mm(x_MD[start:behind], weight_EDF[expert], out=y_MF[start:behind])
    return y_MF


@compute_grouped_mm.register_fake
def _(x_MD: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    return x_MD.new_empty(len(x_MD), weight_EDF.shape[2])


@torch.library.custom_op("llmsys::grouped_weight_gradient", mutates_args=())
def _compute_weight_gradient(x_MD: Tensor, gradient_MF: Tensor, ends_E: Tensor) -> Tensor:
    """(E, D, F); the rows behind a group count with a gradient of zero."""
    found_EDF = x_MD.new_zeros(len(ends_E), x_MD.shape[1], gradient_MF.shape[1])
    for expert, start, end, behind in _iter_groups(ends_E):
        own = gradient_MF[start:behind]
        if behind > end:
            own = own.clone()
            own[end - start :] = 0
        torch.mm(x_MD[start:behind].t(), own, out=found_EDF[expert])
    return found_EDF


@_compute_weight_gradient.register_fake
def _(x_MD: Tensor, gradient_MF: Tensor, ends_E: Tensor) -> Tensor:
    return x_MD.new_empty(len(ends_E), x_MD.shape[1], gradient_MF.shape[1])


def _save_grouped_mm_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _compute_grouped_mm_gradients(ctx: Any, gradient_MF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_MD, weight_EDF, ends_E = ctx.saved_tensors
    gradient_MF = gradient_MF.contiguous()
    of_rows, of_weights, _ = ctx.needs_input_grad
    return (
        compute_grouped_mm(gradient_MF, weight_EDF.transpose(1, 2), ends_E) if of_rows else None,
        _compute_weight_gradient(x_MD, gradient_MF, ends_E) if of_weights else None,
        None,
    )


compute_grouped_mm.register_autograd(_compute_grouped_mm_gradients, setup_context=_save_grouped_mm_inputs)
OPERATION = torch.ops.llmsys.grouped_product.default


def _iter_groups(ends_E: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """(expert, first row, row behind its last one, the same rounded up as far as there are rows) where it has rows."""
    ends, start = ends_E.tolist(), 0
    for expert, end in enumerate(ends):
        if end > start:
            rows = -(-(end - start) // STEP) * STEP
            yield expert, start, end, min(start + rows, ends[-1])
        start = end
