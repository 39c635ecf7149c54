"""Counts where the host would wait for an accelerator, in code that runs on the CPU as it would
run there.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llmsys.engine import micro_batch_loss
from llmsys.model import token_dispatcher
from llmsys.train import cross_entropy

DECIDED_BY_DEVICE = (micro_batch_loss, token_dispatcher, cross_entropy)
"""Modules that take another way on accelerators."""


class WaitCounter(TorchDispatchMode):
    """Lists operations whose result the host must see: numbers, and tensors whose shape follows
    from values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sites: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _must_wait(func, args, kwargs or {}):
            self.record_site()
        return func(*args, **(kwargs or {}))

    def record_site(self) -> None:
        """Record the line of this project that waits; what torch itself does in other places is
        no wait of ours.
        """
        frames = [
            f
            for f in traceback.extract_stack()
            if "/llmsys/" in f.filename and "/tests/" not in f.filename
        ]
        if frames:
            self.sites.append(f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}")


def _must_wait(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.ops.aten.index.Tensor or func is torch.ops.aten.index_put_.default:
        return any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    tags = (
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )
    return tags and func not in (torch.ops.aten.index.Tensor, torch.ops.aten.nonzero_static.default)


@contextmanager
def count_host_waits() -> Iterator[WaitCounter]:
    """Count waits inside the context, with the choices of code that an accelerator would get."""
    counter, to_list = WaitCounter(), Tensor.tolist

    def count_and_convert(x: Tensor) -> Any:
        counter.record_site()
        return to_list(x)

    choices = [patch.object(module, "is_on_host", lambda x: False) for module in DECIDED_BY_DEVICE]
    with (
        patch.object(Tensor, "tolist", count_and_convert),
        choices[0],
        choices[1],
        choices[2],
        counter,
    ):
        yield counter
