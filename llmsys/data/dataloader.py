"""The data loader: the micro-batches of each step for one data rank, read ahead in a thread.

Reads `StepBatches`. A thread, not a process: memory-mapped reads release the GIL, and passing
tensors between processes costs more than building them (tools/bench/loader.py).
"""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from llmsys.data.batch import Batch
from llmsys.data.pinned_buffers import PinnedBuffers
from llmsys.data.step_batches import StepBatches


class StepLoader:
    """Iterator over (step, micro-batches) in order, with `ahead` steps read in advance.

    Attributes:
        wait_seconds: Time that the consumer waited for the latest step (data stall).
    """

    def __init__(self, source: StepBatches, ahead: int = 2, *, pinned: bool = False) -> None:
        """Read from `source`.

        `pinned` is for accelerators: batches are in pinned memory, which is copied while the device
        computes, and have the lengths of their documents. A step's batches are overwritten once the
        one after it has been taken, so the device must have copied them by then: an engine waits
        for it at the end of each step.
        """
        self.source = source
        self.ahead = ahead
        self.pinned = pinned
        self.wait_seconds = 0.0

    def get_step_metrics(self, step: int) -> dict[str, Any]:
        """Return metrics of a step over all ranks, for the log."""
        return self.source.get_step_metrics(step)

    def iter_steps(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        """Yield steps `start` to `stop - 1` in order. An error of the reading thread is raised
        here, at its step.
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
