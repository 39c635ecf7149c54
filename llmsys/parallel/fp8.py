"""fp8 matmuls of linear layers in blocks and of routed experts, applied before anything else.

Masters, names and shapes do not change. Inputs, weights and gradients are rounded to 8 bits (e4m3)
just before each matmul, with scales along the dim that is summed over. Everything between matmuls
stays bfloat16.

- `fp8`: a scale per row (Micikevicius 2022, arXiv:2209.05433, has the formats).
- `fp8_block`: a scale per 128 neighbours of a row of activations and gradients, and per 128 × 128
  tile of weights (DeepSeek-V3, arXiv:2412.19437, 3.3.2).

On GPUs the kernels are torchao's; those of experts and of block scales are its prototypes. The
emulation in fp8_emulation.py, for any device, rounds alike and multiplies in float32.
"""

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, assert_never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.errors import LaunchError
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.fp8_emulation import BLOCK, compute_fp8_matmul

Fp8Recipe = Literal["fp8", "fp8_block"]

# Both widths of a matmul must be multiples of it: kernels read 16 bytes at a time, and tiles of
# weights are square.
MULTIPLES: dict[Fp8Recipe, int] = {"fp8": 16, "fp8_block": BLOCK}

# CUDA compute capability of the first GPUs that multiply fp8 (Ada), and take block scales (Hopper).
MIN_CAPABILITIES: dict[Fp8Recipe, tuple[int, int]] = {"fp8": (8, 9), "fp8_block": (9, 0)}

# (x, weight as (out, in)) → x · weightᵀ.
Multiply = Callable[[Tensor, Tensor], Tensor]
# (rows grouped by expert, weights as (E, in, out), end of each group) → the product of each group.
MultiplyGroups = Callable[[Tensor, Tensor, Tensor], Tensor]


def require_fp8(
    device: torch.device, recipe: Fp8Recipe = "fp8", key: str = "train.matmul_dtype"
) -> None:
    """Check that this machine can multiply fp8.

    Args:
        device: The device of the run.
        recipe: How it is scaled.
        key: The setting that asks for it.

    Raises:
        LaunchError: The device, its compute capability or the installation does not allow it.
    """
    missing = _find_missing_requirement(device, recipe)
    if missing is not None:
        raise LaunchError(f"{key}={recipe}: {missing}, or set {key}=compute.")


def _find_missing_requirement(device: torch.device, recipe: Fp8Recipe) -> str | None:
    newer = "Use an Ada or Hopper GPU, or newer" if recipe == "fp8" else "Use a Hopper GPU or newer"
    if device.type != "cuda":
        return f"this run uses {device.type}, which has no fp8 matmuls. {newer}"
    capability = torch.cuda.get_device_capability(device)
    needed = MIN_CAPABILITIES[recipe]
    if capability < needed:
        name, have, least = (
            torch.cuda.get_device_name(device),
            *(".".join(map(str, c)) for c in (capability, needed)),
        )
        return f"{name} has compute capability {have}, but fp8 matmuls need {least}. {newer}"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed. Install llmsys[fp8]"
    return None


def list_fp8_layers(
    model: Transformer, recipe: Fp8Recipe = "fp8", tensor_ranks: int = 1
) -> list[str]:
    """List the linear layers that multiply in fp8: those of blocks whose widths suit the kernels.

    Left out: the router, whose choice depends on small differences, and embeddings and head, where
    rounding costs most.

    Args:
        model: The model before it is sharded.
        recipe: How fp8 is scaled.
        tensor_ranks: Ranks that split matrices; each shard must suit.
    """
    return [
        f"{prefix}.{name}"
        for prefix, block in model.named_modules()
        if isinstance(block, TransformerBlock)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and _is_supported((module.in_features, module.out_features), recipe, tensor_ranks)
    ]


def _is_supported(widths: tuple[int, ...], recipe: Fp8Recipe, ranks: int = 1) -> bool:
    return not any(width % (MULTIPLES[recipe] * ranks) for width in widths)


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in fp8. Made from an nn.Linear by `convert_to_fp8`."""

    multiply: Multiply

    def forward(self, input: Tensor) -> Tensor:
        """Map the last dim."""
        return apply_linear(self, input, self.weight, self.bias)


def apply_linear(linear: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, in fp8 where `linear` is converted.

    Args:
        linear: The layer.
        x: Its input, (…, in).
        weight: Its weight, or some of its rows or columns, (out, in).
        bias: Its bias, or some of it; None without.

    Returns:
        The output, (…, out).
    """
    if not isinstance(linear, Fp8Linear):
        return F.linear(x, weight, bias)
    y = linear.multiply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))
    return y if bias is None else y + bias


def convert_to_fp8(
    model: Transformer, recipe: Fp8Recipe = "fp8", *, tensor_ranks: int = 1, emulate: bool = False
) -> None:
    """Make the layers of `list_fp8_layers` multiply in fp8, in place.

    Args:
        model: The model on the meta device.
        recipe: How fp8 is scaled.
        tensor_ranks: See `list_fp8_layers`.
        emulate: Round as fp8 but multiply in float32, on any device.
    """
    multiply = _build_multiply(recipe, emulate)
    for name in list_fp8_layers(model, recipe, tensor_ranks):
        linear = model.get_submodule(name)
        # The object stays, and with it its parameters, its name and its hooks.
        linear.__class__ = Fp8Linear
        linear.multiply = multiply  # type: ignore[assignment]


def convert_experts_to_fp8(model: Transformer, recipe: Fp8Recipe, *, emulate: bool = False) -> None:
    """Make routed experts whose widths suit the kernels multiply in fp8, in place.

    Args:
        model: The model on the meta device.
        recipe: How fp8 is scaled.
        emulate: See `convert_to_fp8`.
    """
    multiply_groups = _build_multiply_groups(recipe, emulate)
    for layer in model.list_moe_layers():
        if _is_supported(layer.experts.widths, recipe):
            layer.experts.multiply_groups = multiply_groups


def _build_multiply(recipe: Fp8Recipe, emulate: bool) -> Multiply:
    if emulate:
        return partial(_compute_emulated_linear, in_blocks=recipe == "fp8_block")
    match recipe:
        case "fp8":
            return _compute_rowwise
        case "fp8_block":
            return _compute_blockwise
        case unreachable:
            assert_never(unreachable)


def _compute_emulated_linear(x_NK: Tensor, weight_FK: Tensor, *, in_blocks: bool) -> Tensor:
    ends_E = torch.full((1,), len(x_NK), dtype=torch.int32, device=x_NK.device)
    return compute_fp8_matmul(x_NK, weight_FK.t()[None], ends_E, in_blocks)


@cache
def _get_rowwise_arguments() -> tuple[Any, Any]:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name("rowwise")
    # Only the settings are read from it.
    with torch.device("meta"):
        like = Float8Linear.from_float(nn.Linear(16, 16, bias=False), config)
    return like.linear_mm_config, config


def _compute_rowwise(x_NK: Tensor, weight_FK: Tensor) -> Tensor:
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    y_NF: Tensor = matmul_with_hp_or_float8_args.apply(
        x_NK, weight_FK.t(), *_get_rowwise_arguments()
    )
    return y_NF


def _compute_blockwise(x_NK: Tensor, weight_FK: Tensor) -> Tensor:
    from torchao.prototype.blockwise_fp8_training.linear import fp8_blockwise_mm

    y_NF: Tensor = fp8_blockwise_mm.apply(x_NK, weight_FK, BLOCK)
    return y_NF


def _build_multiply_groups(recipe: Fp8Recipe, emulate: bool) -> MultiplyGroups:
    if emulate:
        return partial(compute_fp8_matmul, in_blocks=recipe == "fp8_block")
    return partial(_compute_groups, recipe)


def _compute_groups(recipe: Fp8Recipe, x_MD: Tensor, weight_EDF: Tensor, ends_E: Tensor) -> Tensor:
    # Their kernels take weights whose columns are adjacent.
    weight_EDF = weight_EDF.transpose(1, 2).contiguous().transpose(1, 2)
    y_MF: Tensor
    match recipe:
        case "fp8":
            from torchao.prototype.moe_training.fp8_grouped_mm import (
                _to_fp8_rowwise_then_scaled_grouped_mm,
            )

            y_MF = _to_fp8_rowwise_then_scaled_grouped_mm(x_MD, weight_EDF, ends_E)
        case "fp8_block":
            from torchao.prototype.moe_training.blockwise_fp8.grouped_mm import (
                _to_fp8_blockwise_then_scaled_grouped_mm,
            )

            y_MF = _to_fp8_blockwise_then_scaled_grouped_mm(x_MD, weight_EDF, ends_E)
        case unreachable:
            assert_never(unreachable)
    return y_MF
