"""Grouped matrix products, RMSNorm and rotary embedding for bfloat16 on the CPU.

Each computes in float32 over pieces that stay in cache, where torch's own operations write float32
tensors as large as the activations.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# M rows grouped by expert, E experts, D width of a row, F width of its product

# rows; without rounding, code generation cost as much as the product itself at 250 rows of width
# 256
STEP = 32
# resident memory of the code of one shape, which oneDNN never frees: measured over 64 shapes of
# three products (25 to 2,048 rows, widths of 256) with oneDNN of torch 2.13
CODE_BYTES = 650_000
# an expert gets up to this many times its mean rows while routing is not balanced yet
MOST_ROWS_OVER_MEAN = 4


def estimate_code_bytes(mean_rows: float, widths: tuple[int, int]) -> int:
    """Estimate the memory of the code that grouped products of a run generate.

    Args:
        mean_rows: Mean rows of an expert in a forward pass.
        widths: Channels of a row and of its product.

    Returns:
        Bytes: forward, and gradients of rows and of weights, of every rounded number of rows.
    """
    shapes = math.ceil(MOST_ROWS_OVER_MEAN * mean_rows / STEP)
    # the up and the down projection, which are alike where both widths are equal
    return 3 * len(set(widths)) * shapes * CODE_BYTES


def is_cpu_grouped_mm_supported(x_MD: Tensor) -> bool:
    """Return whether `compute_grouped_mm` applies.

    Args:
        x_MD: Rows of all experts.

    Returns:
        True for bfloat16 on the CPU.
    """
    return x_MD.device.type == "cpu" and x_MD.dtype == torch.bfloat16


@torch.library.custom_op("llmsys::grouped_product", mutates_args=())
def compute_grouped_mm(x_MD: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply the rows of each expert by its weights.

    oneDNN generates code for every new shape, and experts get another number of rows in every
    step. So the number of rows is rounded up to a multiple of STEP; the surplus rows are
    overwritten by the next group, and zeros where none follows.

    Args:
        x_MD: Rows sorted by expert.
        weight_EDF: Weights of each expert.
        ends_E: Expert e's rows end before row `ends_E[e]`.

    Returns:
        The products, (M, F).
    """
    y_MF = x_MD.new_empty(len(x_MD), weight_EDF.shape[2])
    for expert, start, _, padded_end, num_rows in _iter_groups(ends_E):
        part, weight = x_MD[start:padded_end], weight_EDF[expert]
        if len(part) == num_rows:
            torch.mm(part, weight, out=y_MF[start:padded_end])
        else:
            y_MF[start:padded_end] = torch.mm(_pad_rows(part, num_rows), weight)[: len(part)]
    return y_MF


@compute_grouped_mm.register_fake
def _(x_MD: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    return x_MD.new_empty(len(x_MD), weight_EDF.shape[2])


@torch.library.custom_op("llmsys::grouped_weight_gradient", mutates_args=())
def compute_grouped_weight_gradient(x_MD: Tensor, gradient_MF: Tensor, ends_E: Tensor) -> Tensor:
    """Return the weight gradients of `compute_grouped_mm`, (E, D, F).

    Args:
        x_MD: Rows grouped by expert.
        gradient_MF: Gradient of their products. Surplus rows of a group get a gradient of zero.
        ends_E: End of each expert's rows.
    """
    # Zeros: an expert without rows gets no product.
    dweight_EDF = x_MD.new_zeros(len(ends_E), x_MD.shape[1], gradient_MF.shape[1])
    for expert, start, end, padded_end, num_rows in _iter_groups(ends_E):
        dy = gradient_MF[start:end]
        if num_rows > end - start:
            # The surplus rows are those of the next experts.
            dy = _pad_rows(dy, num_rows)
        x = _pad_rows(x_MD[start:padded_end], num_rows)
        torch.mm(x.t(), dy, out=dweight_EDF[expert])
    return dweight_EDF


@compute_grouped_weight_gradient.register_fake
def _(x_MD: Tensor, gradient_MF: Tensor, ends_E: Tensor) -> Tensor:
    return x_MD.new_empty(len(ends_E), x_MD.shape[1], gradient_MF.shape[1])


def _save_grouped_mm_inputs(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs)


def _compute_grouped_mm_gradients(
    ctx: Any, gradient_MF: Tensor
) -> tuple[Tensor | None, Tensor | None, None]:
    x_MD, weight_EDF, ends_E = ctx.saved_tensors
    gradient_MF = gradient_MF.contiguous()
    needs_dx, needs_dweight, _ = ctx.needs_input_grad
    return (
        compute_grouped_mm(gradient_MF, weight_EDF.transpose(1, 2), ends_E) if needs_dx else None,
        compute_grouped_weight_gradient(x_MD, gradient_MF, ends_E) if needs_dweight else None,
        None,
    )


compute_grouped_mm.register_autograd(
    _compute_grouped_mm_gradients, setup_context=_save_grouped_mm_inputs
)
OPERATION = torch.ops.llmsys.grouped_product.default


def _pad_rows(x_MD: Tensor, num_rows: int) -> Tensor:
    """Return rows followed by zeros, `num_rows` in all; the rows themselves where they are as
    many.
    """
    if len(x_MD) == num_rows:
        return x_MD
    padded = x_MD.new_zeros(num_rows, x_MD.shape[1])
    padded[: len(x_MD)] = x_MD
    return padded


def _iter_groups(ends_E: Tensor) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (expert, first row, end row, end row rounded up as far as there are rows, number of
    rows rounded up) of each expert with rows.
    """
    ends = ends_E.tolist()
    start = 0
    for expert, end in enumerate(ends):
        if end > start:
            rows = -(-(end - start) // STEP) * STEP
            # Nothing follows the last group that could be read in its place.
            yield expert, start, end, min(start + rows, ends[-1]), rows
        start = end


# N rows, D width

ELEMENTS = 1 << 18  # of one piece: 1 MiB in float32, which fits the L2 cache of a core


def is_cpu_norm_supported(x: Tensor, weight: Tensor) -> bool:
    """Return whether `compute_rms_norm` applies.

    Args:
        x: Input of the norm.
        weight: Its weight.

    Returns:
        True for bfloat16 input and weight on the CPU; a DTensor has to take torch's own path.
    """
    plain = not (hasattr(x, "to_local") or hasattr(weight, "to_local"))
    return plain and x.device.type == "cpu" and x.dtype == weight.dtype == torch.bfloat16


def compute_rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Compute weight · x / sqrt(mean(x²) + eps) over the last dim in pieces that stay in cache.

    torch's own kernel takes 2 to 4 times as long for bfloat16 on CPUs.

    Args:
        x: Input, (..., D).
        weight_D: Weight.
        eps: Added to the mean square.

    Returns:
        The norm in the shape and dtype of `x`; computed in float32.
    """
    y_ND: Tensor = _RmsNormFunction.apply(x.reshape(-1, x.shape[-1]), weight_D, eps)  # type: ignore[no-untyped-call]
    return y_ND.view(x.shape)


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y_ND = torch.empty_like(x_ND)
        weight = weight_D.float()
        scale_N1 = x_ND.new_empty(len(x_ND), 1, dtype=torch.float32)
        for rows in _iter_row_slices(x_ND):
            x = x_ND[rows].float()
            # one pass, without a tensor of squares
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            scale = torch.rsqrt(norm.square_().div_(x.shape[1]).add_(eps), out=scale_N1[rows])
            y_ND[rows] = x.mul_(scale).mul_(weight)
        ctx.save_for_backward(x_ND, weight_D, scale_N1)
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        # With s the scale and g = weight * dy: dx = s g − x s³ (g · x) / D, and dweight = the sum
        # of dy x s over rows.
        x_ND, weight_D, scale_N1 = ctx.saved_tensors
        dx_ND = torch.empty_like(x_ND)
        weight = weight_D.float()
        dweight_D = torch.zeros_like(weight)
        for rows in _iter_row_slices(x_ND):
            x = x_ND[rows].float()
            dy = gradients[0][rows].float()
            scale = scale_N1[rows]
            product = dy * x
            dweight_D.addmv_(product.T, scale[:, 0])
            inner = torch.mv(product, weight)[:, None].mul_(scale.pow(3)).div_(x.shape[1])
            dx_ND[rows] = dy.mul_(weight).mul_(scale).sub_(x.mul_(inner))
        return dx_ND, dweight_D.to(weight_D.dtype), None


def _iter_row_slices(x_ND: Tensor) -> Iterator[slice]:
    size = max(1, ELEMENTS // x_ND.shape[1])
    for start in range(0, len(x_ND), size):
        yield slice(start, start + size)


# B rows, T positions, H heads, R rotated channels of a head


def is_cpu_rotary_supported(x_BTHR: Tensor, cos_T1R: Tensor) -> bool:
    """Return whether `rotate_halves` applies.

    Args:
        x_BTHR: Rotated channels of queries or keys.
        cos_T1R: Table of cosines.

    Returns:
        True for bfloat16 on the CPU with one table for all rows.
    """
    return x_BTHR.device.type == "cpu" and x_BTHR.dtype == torch.bfloat16 and cos_T1R.dim() == 3


def rotate_halves(x_BTHR: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Compute x · cos + roll(x, R / 2) · sin over the last dim in pieces that stay in cache.

    Args:
        x_BTHR: Channels to rotate.
        cos_T1R: Cosines.
        sin_T1R: Sines; those of the first half are negative.

    Returns:
        The rotation in the shape and dtype of `x_BTHR`; computed in float32.
    """
    y_BTHR: Tensor = _HalfRotationFunction.apply(x_BTHR, cos_T1R, sin_T1R)  # type: ignore[no-untyped-call]
    return y_BTHR


class _HalfRotationFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTHR: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1R, sin_T1R)
        return _apply_rotation(x_BTHR, cos_T1R, sin_T1R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Of y_i = x_i cos_i + x_j sin_i, with j the partner of i, the transpose: dx_i = dy_i cos_i
        # + dy_j sin_j.
        cos_T1R, sin_T1R = ctx.saved_tensors
        return (
            _apply_rotation(gradients[0], cos_T1R, sin_T1R.roll(sin_T1R.shape[-1] // 2, dims=-1)),
            None,
            None,
        )


def _apply_rotation(x_BTHR: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    y_BTHR = torch.empty(x_BTHR.shape, dtype=x_BTHR.dtype)
    half = x_BTHR.shape[-1] // 2
    size = max(1, ELEMENTS // math.prod(x_BTHR.shape[2:]))
    for start in range(0, x_BTHR.shape[1], size):
        piece = slice(start, start + size)
        cos, sin = cos_T1R[piece], sin_T1R[piece]
        for x, y in zip(x_BTHR[:, piece], y_BTHR[:, piece], strict=True):
            x = x.float()
            rotated = x * cos
            rotated[..., :half].addcmul_(x[..., half:], sin[..., :half])
            rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
            y.copy_(rotated)
    return y_BTHR
