"""A task of the graph: what it makes, what that depends on, and what makes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.core.journal import TaskRecord, compute_json_digest
from data_pipeline.executors.base import Job


@dataclass(frozen=True)
class Task:
    """One call that makes some files.

    Attributes:
        name: "stage/what", unique in the graph; also the name of its record.
        inputs: everything that decides the outputs, besides the code: plain data that JSON can hold.
        outputs: the files it publishes, relative to the dataset folder.
        job: what makes them; picklable.
        amount: its share of the stage's progress, in the stage's unit.
        without: gives, from the reason, the result that stands for a quarantined input; None: the stage needs the task.
    """

    name: str
    inputs: Sequence[Any]
    outputs: Sequence[str]
    job: Job
    progress_amount: float
    fallback_result: Callable[[str], dict[str, Any]] | None = None

    def compute_key(self, code: str) -> str:
        """What the journal knows its record by: everything that decides the outputs, `code` being what makes them."""
        return compute_json_digest(code, self.name, self.inputs)


Stage = Callable[[str, list[Task], str], list[TaskRecord]]
"""Does the tasks of one stage, by its name, with the unit of its progress, and gives their records in order."""
