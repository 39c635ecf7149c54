"""fp32 parameters that a forward pass sees in another type: masters and gradients stay float32 in the module itself.

For engines that keep every parameter whole and know nothing of masters. The cast is part of what autograd records, so
gradients arrive in float32 at the parameters, where any library may sum them; recomputation repeats it.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """From now on reading a parameter as an attribute of its module gives it in `dtype`.

    `named_parameters` still gives the float32 ones under the same names: those are what an optimizer takes.
    """
    if dtype == torch.float32:
        return
    for module in model.modules():
        names = tuple(name for name, parameter in module._parameters.items() if parameter is not None)
        if names:
            kind: Any = type(module)
            module.__class__ = _build_casting_class(kind, names, dtype)


@cache
def _build_casting_class(kind: Any, names: tuple[str, ...], dtype: torch.dtype) -> Any:
    """A class that differs from `kind` in what these attributes give."""
    return type(kind.__name__, (kind,), {name: _build_cast_property(name, dtype) for name in names})


def _build_cast_property(name: str, dtype: torch.dtype) -> property:
    def cast_parameter(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        return None if parameter is None else parameter.to(dtype)

    return property(cast_parameter)
