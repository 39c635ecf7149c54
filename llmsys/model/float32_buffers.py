"""A module base whose floating-point buffers stay float32 when the module is cast to another dtype.

Engines cast a whole module (`module.bfloat16()`), and that call reaches buffers too. A rotation table or a token count
in bfloat16 is wrong in silence: bfloat16 cannot count past 256. This base undoes the cast, without losing a bit.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn


class Float32BufferModule(nn.Module):
    """Keeps its own floating-point buffers float32; moves between devices go through as usual."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            old = before[name]
            if buffer is not None and old is not None and buffer.is_floating_point() and buffer.dtype != torch.float32:
                self._buffers[name] = old.to(device=buffer.device, dtype=torch.float32)
        return self
