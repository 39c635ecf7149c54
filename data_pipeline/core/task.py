"""A task of the graph: its outputs, its inputs and its job."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.core.journal import TaskRecord, compute_json_digest
from data_pipeline.executors.base import Job


@dataclass(frozen=True)
class Task:
    """One call that writes some files.

    Attributes:
        name: `stage/item`, unique in the graph. It also names the record.
        inputs: Everything that decides the outputs besides the code, as values that JSON can hold.
        outputs: Files it publishes, relative to the dataset folder.
        job: The call; picklable.
        progress_amount: Its share of the stage's progress, in the unit of the stage.
        fallback_result: Builds the result for a quarantined input from a reason. None if the stage needs the task.
    """

    name: str
    inputs: Sequence[Any]
    outputs: Sequence[str]
    job: Job
    progress_amount: float
    fallback_result: Callable[[str], dict[str, Any]] | None = None

    def compute_key(self, code: str) -> str:
        """Return the journal key: a digest of the code version, the name and the inputs."""
        return compute_json_digest(code, self.name, self.inputs)


Stage = Callable[[str, list[Task], str], list[TaskRecord]]
"""Runs the tasks of one stage, given its name and progress unit; returns their records in order."""
