"""The device and dtype that the kernel of attention is chosen by."""

from functools import cache

import torch
from torch import Tensor

from llmsys.config.attention_device import AttentionDevice, AttentionDtype

CPU = AttentionDevice("cpu")
NAMES: dict[torch.dtype, AttentionDtype] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def describe_device(device: torch.device) -> AttentionDevice:
    """Return what the choice of a kernel depends on.

    The masks of a forward pass are built by this answer alone. A dry run or a test that pretends
    another device replaces this function in this module.

    Args:
        device: The device of the hidden states.

    Returns:
        Kind and compute capability.
    """
    return CPU if device.type == "cpu" else _describe_accelerator(device.type, device.index)


@cache
def _describe_accelerator(kind: str, index: int | None) -> AttentionDevice:
    if kind != "cuda":
        return AttentionDevice(kind)
    if torch.version.hip is not None:  # no kernel here was tried on AMD's devices
        return AttentionDevice("hip")
    return AttentionDevice(kind, torch.cuda.get_device_capability(index))


def get_attention_dtype(like: Tensor) -> AttentionDtype:
    """Return the dtype of queries, keys and values in a forward pass.

    Args:
        like: The embedded tokens.

    Returns:
        That of autocast where it is active, else that of `like`; float64 counts as fp32.
    """
    kind = like.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype
    return NAMES.get(dtype, "fp32")
