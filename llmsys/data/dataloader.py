"""The data loader: the micro-batches of each step for one data rank, read ahead in a thread.

Reads `StepBatches`. A thread, not a process: memory-mapped reads release the GIL, and passing
tensors between processes costs more than building them (tools/bench/loader.py).
"""

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmsys.data.batch import Batch
from llmsys.data.step_batches import StepBatches

# Bytes of a cache line.
ALIGNMENT = 64


class StepLoader:
    """Iterator over (step, micro-batches) in order, with `ahead` steps read in advance.

    Attributes:
        wait_seconds: Time that the consumer waited for the latest step (data stall).
    """

    def __init__(self, source: StepBatches, ahead: int = 2, *, pinned: bool = False) -> None:
        """Read steps ahead.

        Args:
            source: The micro-batches of each step.
            ahead: Steps that are read in advance.
            pinned: For accelerators: batches are in pinned memory, which is copied while the
                device computes, and have the lengths of their documents. A step's batches are
                overwritten once the one after it has been taken, so the device must have copied
                them by then: an engine waits for it at the end of each step.
        """
        self.source = source
        self.ahead = ahead
        self.pinned = pinned
        self.wait_seconds = 0.0

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """Describe the data of a step, for the log.

        Args:
            step: The step, counted from 0. It need not have been read.

        Returns:
            Fields of the `step` event, over all ranks.
        """
        return self.source.get_step_metrics(step)

    def iter_steps(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        """Yield the micro-batches of steps in order.

        Args:
            start: The first step.
            stop: The end of the steps.

        Yields:
            (step, micro-batches). An error of the reading thread is raised here, at its step.
        """
        ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(maxsize=self.ahead)
        closed = threading.Event()
        # A daemon: a read that hangs must not keep the process from ending.
        thread = threading.Thread(
            target=self._read_ahead, args=(ready, closed, start, stop), daemon=True
        )
        thread.start()
        try:
            for step in range(start, stop):
                began = time.perf_counter()
                batches = ready.get()
                self.wait_seconds = time.perf_counter() - began
                if isinstance(batches, BaseException):
                    raise batches
                yield step, batches
        finally:
            closed.set()

    def _read_ahead(
        self,
        ready: "queue.Queue[list[Batch] | BaseException]",
        closed: threading.Event,
        start: int,
        stop: int,
    ) -> None:
        # One step in each place of the queue, one at the consumer, and one that is read.
        buffers = PinnedBuffers(self.ahead + 2)
        for step in range(start, stop):
            item: list[Batch] | BaseException
            try:
                batches = self.source.get_micro_batches(step)
                if self.pinned:
                    batches = buffers.copy_batches([batch.count_documents() for batch in batches])
                item = batches
            except Exception as error:
                item = error
            while not closed.is_set():
                try:
                    # A timeout, so that a consumer that stopped early does not leave this thread
                    # blocked.
                    ready.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if closed.is_set() or isinstance(item, BaseException):
                return


class PinnedBuffers:
    """Pinned host memory for the batches of several steps, allocated once and used in turn.

    Pinning is a call of the driver that waits for the device, so no step may do it. The batches of
    a step are overwritten `num_steps` steps later.
    """

    def __init__(self, num_steps: int) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(num_steps)]
        self._turn = 0

    def copy_batches(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches of the next step in pinned memory.

        Args:
            batches: Micro-batches of one step, on the CPU.

        Returns:
            Copies, valid until the call `num_steps` later.
        """
        self._turn = (self._turn + 1) % len(self._buffers)
        sizes: list[int] = []

        def measure(tensor: Tensor) -> Tensor:
            sizes.append(_round_up(tensor.nbytes))
            return tensor

        for batch in batches:
            batch.map_tensors(measure)
        parts = iter(self._reserve(sum(sizes)).split(sizes))

        def copy(tensor: Tensor) -> Tensor:
            part: Tensor = next(parts)
            return part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

        return [batch.map_tensors(copy) for batch in batches]

    def _reserve(self, size: int) -> Tensor:
        if self._buffers[self._turn].numel() < size:
            # A quarter more, because the rows of length buckets differ from step to step.
            self._buffers[self._turn] = torch.empty(
                size * 5 // 4, dtype=torch.uint8, pin_memory=True
            )
        return self._buffers[self._turn][:size]


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
