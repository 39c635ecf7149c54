"""fp8 products through torchao, applied from outside before anything else: linear maps of blocks become its own.

Their masters, names and shapes stay; inputs, weights and gradients are rounded to 8 bits just before each product, with
a scale for each row (Micikevicius 2022, arXiv:2209.05433, has the formats). Everything between products stays in bf16.
"""

import importlib.util
from dataclasses import replace

import torch
from torch import nn

from llmsys.errors import LaunchError
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock

MULTIPLE = 16
"""What both widths of a product must be multiples of: the kernels read 16 bytes at a time."""

LEAST_CAPABILITY = (8, 9)
"""CUDA compute capability of the first GPUs that multiply fp8."""


def require_fp8(device: torch.device) -> None:
    """LaunchError where this machine cannot multiply fp8."""
    why = _find_missing_requirement(device)
    if why is not None:
        raise LaunchError(f"train.matmul_dtype=fp8: {why}, or set train.matmul_dtype=compute.")


def _find_missing_requirement(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"this run computes on {device.type}, which has no fp8 products. Use a GPU of the Ada or Hopper kind"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        name, have = torch.cuda.get_device_name(device), ".".join(map(str, capability))
        return f"{name} has compute capability {have}, and fp8 products need 8.9. Use a GPU of the Ada or Hopper kind"
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed. Install llmsys[fp8]"
    return None


def list_fp8_layers(model: Transformer) -> list[str]:
    """Names of the linear maps that multiply in fp8: those of blocks whose two widths are multiples of 16.

    Not the router, whose choice hangs on small differences, nor embeddings and head, where rounding costs most, nor
    routed experts, whose grouped products torchao offers as a prototype only.
    """
    return [
        f"{place}.{name}"
        for place, block in model.named_modules()
        if isinstance(block, TransformerBlock)
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE)
    ]


def convert_to_fp8(model: Transformer, *, emulate: bool = False) -> None:
    """Make those layers torchao's. With `emulate` they round as fp8 and multiply in bf16, on any device."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = set(list_fp8_layers(model))
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name in chosen)
