"""Numbers that the host reads from a device, for shapes that depend on data.

Each read makes the host wait until the device has computed everything before it, so an accelerator
runs empty. Reads of a block that activation checkpointing repeats are made once
(llmsys/parallel/activation_checkpoint.py).
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

Value = TypeVar("Value")
_local = threading.local()


def is_on_host(x: Tensor) -> bool:
    """Return whether `x` can be read, or its values be used as indices, without waiting for a
    device.

    Args:
        x: Any tensor.

    Returns:
        True for tensors of the CPU.
    """
    return x.device.type == "cpu"


class RepeatedReads:
    """The values that the first pass of a block has read, for the pass that repeats it."""

    def __init__(self) -> None:
        self._values: deque[Any] = deque()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the values of `read_once` inside the context."""
        with _enter_reads(self._values.append, None):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Let `read_once` return the recorded values, in their order."""
        # A copy: a block may be repeated more than once, and each time from the first value.
        with _enter_reads(None, deque(self._values).popleft):
            yield


def read_once(read: Callable[[], Value]) -> Value:
    """Return `read()`, or what it returned in the pass that this one repeats.

    Args:
        read: Reads numbers from the device; may communicate. Tensors in its result have no
            gradients.

    Returns:
        Its result.
    """
    record, replay = getattr(_local, "reads", (None, None))
    if replay is not None:
        value: Value = replay()
        return value
    value = read()
    if record is not None:
        record(value)
    return value


@contextmanager
def _enter_reads(
    record: Callable[[Any], None] | None, replay: Callable[[], Any] | None
) -> Iterator[None]:
    # Per thread: autograd repeats blocks in a separate thread for each accelerator.
    outer = getattr(_local, "reads", (None, None))
    _local.reads = record, replay
    try:
        yield
    finally:
        _local.reads = outer
