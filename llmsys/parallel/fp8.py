"""fp8 matmuls through torchao, applied before anything else: linear layers of blocks become torchao's.

Masters, names and shapes do not change. Inputs, weights and gradients are rounded to 8 bits just before each matmul,
with a scale per row (Micikevicius 2022, arXiv:2209.05433, has the formats). Everything between matmuls stays bfloat16.
"""

import importlib.util
from dataclasses import replace

import torch
from torch import nn

from llmsys.errors import LaunchError
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock

MULTIPLE = 16
"""Both widths of a matmul must be multiples of it: the kernels read 16 bytes at a time."""

MIN_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs that multiply fp8 (Ada)."""


def require_fp8(device: torch.device) -> None:
    """Check that this machine can multiply fp8.

    Args:
        device: The device of the run.

    Raises:
        LaunchError: The device, its compute capability or the installation does not allow it.
    """
    missing = _find_missing_requirement(device)
    if missing is not None:
        raise LaunchError(f"train.matmul_dtype=fp8: {missing}, or set train.matmul_dtype=compute.")


def _find_missing_requirement(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"this run uses {device.type}, which has no fp8 matmuls. Use an Ada or Hopper GPU, or newer"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name, have = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return f"{name} has compute capability {have}, but fp8 matmuls need 8.9. Use an Ada or Hopper GPU, or newer"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed. Install llmsys[fp8]"
    return None


def list_fp8_layers(model: Transformer) -> list[str]:
    """List the linear layers that multiply in fp8: those of blocks whose two widths are multiples of 16.

    Left out: the router, whose choice depends on small differences; embeddings and head, where rounding costs most; and
    routed experts, whose grouped matmuls torchao offers as a prototype only.
    """
    return [
        f"{prefix}.{name}"
        for prefix, block in model.named_modules()
        if isinstance(block, TransformerBlock)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
    ]


def convert_to_fp8(model: Transformer, *, emulate: bool = False) -> None:
    """Replace the layers of `list_fp8_layers` by torchao's, in place.

    Args:
        model: The model on the meta device.
        emulate: Round as fp8 but multiply in bfloat16, on any device.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = set(list_fp8_layers(model))
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in chosen)
