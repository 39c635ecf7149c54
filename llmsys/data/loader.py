"""The loader: step n's micro-batches for one data rank, read ahead in a thread.

Reads packed documents, gives lists of batches, and promises that the sequences of step n are
`n * sequences .. (n + 1) * sequences` whatever the number of ranks and the micro-batch size; only who handles which
sequence changes. A thread, not a process: memory-mapped reads release the interpreter, and handing tensors between
processes costs more than making them (measured in the loader benchmark).
"""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from llmsys.data.batch import Batch, make_batch
from llmsys.data.packing import PackedDocuments
from llmsys.errors import ConfigError


@dataclass(frozen=True)
class StepPlan:
    """How the sequences of a step are dealt to data ranks and micro-batches. Sizes are counted in sequences."""

    sequences: int
    data_ranks: int
    data_rank: int
    micro_sequences: int

    def __post_init__(self) -> None:
        """Refuse what does not divide, saying what would."""
        if self.sequences % self.data_ranks:
            near = max(1, round(self.sequences / self.data_ranks)) * self.data_ranks
            raise ConfigError(
                f"batch.sequences={self.sequences} cannot be dealt evenly to {self.data_ranks} data ranks. "
                f"Use batch.sequences={near} or another number of processes."
            )
        if self.per_rank % self.micro_sequences:
            legal = [size for size in range(1, self.per_rank + 1) if self.per_rank % size == 0]
            raise ConfigError(
                f"batch.micro_sequences={self.micro_sequences} does not divide the {self.per_rank} sequences of a "
                f"rank. Use one of {', '.join(map(str, legal))}."
            )

    @property
    def per_rank(self) -> int:
        """Sequences of one rank in one step."""
        return self.sequences // self.data_ranks

    def micro_batches(self, step: int) -> list[range]:
        """The sequence numbers of each micro-batch of this rank in step `step`."""
        first = step * self.sequences + self.data_rank * self.per_rank
        starts = range(first, first + self.per_rank, self.micro_sequences)
        return [range(start, start + self.micro_sequences) for start in starts]


class StepLoader:
    """(step, micro-batches) in order, `ahead` steps read in advance; `wait_seconds` is the wait for the last one."""

    def __init__(self, packed: PackedDocuments, plan: StepPlan, *, separate_documents: bool, ahead: int = 2) -> None:
        self.packed = packed
        self.plan = plan
        self.separate_documents = separate_documents
        self.ahead = ahead
        self.wait_seconds = 0.0

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of one step, made here and now: what the background thread does too."""
        return [
            make_batch([self.packed.window(index) for index in numbers], separate_documents=self.separate_documents)
            for numbers in self.plan.micro_batches(step)
        ]

    def steps(self, start: int, stop: int) -> Iterator[tuple[int, list[Batch]]]:
        """Steps `start` to `stop - 1` in order. An error of the reading thread is raised here, at its step."""
        ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(maxsize=self.ahead)
        closed = threading.Event()
        thread = threading.Thread(target=self._read_ahead, args=(ready, closed, start, stop), daemon=True)
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
        self, ready: "queue.Queue[list[Batch] | BaseException]", closed: threading.Event, start: int, stop: int
    ) -> None:
        for step in range(start, stop):
            item: list[Batch] | BaseException
            try:
                item = self.step(step)
            except Exception as error:
                item = error
            while not closed.is_set():
                try:
                    ready.put(item, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if closed.is_set() or isinstance(item, BaseException):
                return
