"""The kernel of torch's AdamW: fused, foreach or a loop, by the devices and meshes of the
parameters.

| parameters | kernel | reason |
|---|---|---|
| floating point, on devices with a fused kernel, one mesh per list | fused | one kernel per list |
| the same, on devices without one that have lists of tensors | foreach | several kernels per list |
| several meshes in one list, not floating point, elsewhere | loop | kernels per parameter |
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._foreach_utils import (
    _get_foreach_kernels_supported_devices,
    _get_fused_kernels_supported_devices,
)


class AdamWKernel(NamedTuple):
    """The kernel that steps all lists of parameters, and why."""

    kind: Literal["fused", "foreach", "loop"]
    reason: str


def choose_adamw_kernel(lists: Iterable[Sequence[Tensor]]) -> AdamWKernel:
    """Choose the fastest kernel that takes every list of parameters.

    Args:
        lists: Parameters of each group, plain tensors or DTensors.

    Returns:
        The kernel and the reason.
    """
    lists = list(lists)
    if any(
        len({getattr(one, "device_mesh", None) for one in parameters}) > 1 for parameters in lists
    ):
        return AdamWKernel(
            "loop", "a list holds shards of several meshes, which torch steps one by one"
        )
    everything = [parameter for parameters in lists for parameter in parameters]
    if others := {str(one.dtype) for one in everything if not torch.is_floating_point(one)}:
        return AdamWKernel(
            "loop", f"{', '.join(sorted(others))} has neither a fused kernel nor lists"
        )
    kinds = {parameter.device.type for parameter in everything}
    if not (others := kinds - set(_get_fused_kernels_supported_devices())):
        return AdamWKernel("fused", f"torch has a fused kernel on {', '.join(sorted(kinds))}")
    names = ", ".join(sorted(others))
    if kinds <= set(_get_foreach_kernels_supported_devices()):
        return AdamWKernel("foreach", f"torch has no fused kernel on {names}")
    return AdamWKernel("loop", f"torch has neither a fused kernel nor lists of tensors on {names}")
