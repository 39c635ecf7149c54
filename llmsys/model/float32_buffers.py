"""A module base whose floating-point buffers stay float32 when the module is cast to another dtype.

Engines cast a module with `module.bfloat16()`, which reaches buffers too. A rotary table or a token
count in bfloat16 is silently wrong: bfloat16 cannot count past 256.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn


class Float32BufferModule(nn.Module):
    """A module that keeps its own floating-point buffers in float32. Moves between devices work
    as usual.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._buffers.items():
            old = before[name]
            if (
                buffer is not None
                and old is not None
                and buffer.is_floating_point()
                and buffer.dtype != torch.float32
            ):
                # From the old buffer: the one that was cast has lost its bits.
                self._buffers[name] = old.to(device=buffer.device, dtype=torch.float32)
        return self
