"""float32 parameters that a forward pass reads in another dtype, for engines that keep every
parameter unsharded.

The cast is part of the autograd graph, so gradients arrive in float32 at the parameters;
recomputation repeats it.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Make reads of a parameter as an attribute of its module return it in `dtype`.

    `named_parameters` still yields the float32 parameters under the same names, for the optimizer.

    Args:
        model: Changed in place.
        dtype: The compute dtype; float32 changes nothing.
    """
    if dtype == torch.float32:
        return
    for module in model.modules():
        names = tuple(
            name for name, parameter in module._parameters.items() if parameter is not None
        )
        if names:
            kind: Any = type(module)
            # Properties are looked up in the class, and before `nn.Module.__getattr__`, which finds
            # parameters.
            module.__class__ = _build_casting_class(kind, names, dtype)


@cache
def _build_casting_class(kind: Any, names: tuple[str, ...], dtype: torch.dtype) -> Any:
    """Return a subclass of `kind` with a casting property for each name."""
    return type(kind.__name__, (kind,), {name: _build_cast_property(name, dtype) for name in names})


def _build_cast_property(name: str, dtype: torch.dtype) -> property:
    def cast_parameter(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        return None if parameter is None else parameter.to(dtype)

    return property(cast_parameter)
