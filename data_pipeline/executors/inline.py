"""Tasks in this very process, one after the other: for debugging, for tests, and the plain twin of the local executor.

Reads jobs, gives events. A job's own error fails the job, and the others go on.
"""

import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from data_pipeline.executors.event import Advanced, Done, Event, Failed, Job
from llmsys.errors import LlmsysError


class Inline:
    """Does each job when its event is asked for."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        """Yield what happens, job by job."""
        for index, job in enumerate(jobs):
            pending: list[Event] = []
            pending.append(
                attempt(index, job, lambda amount, dropped, to=pending: to.append(Advanced(amount, dropped)))
            )
            yield from pending

    def close(self) -> None:
        """Nothing to end."""


def attempt(index: int, job: Job, report: Any) -> Done | Failed:
    """Do one job; an error that a person can mend is its message, any other comes with its traceback."""
    try:
        return Done(index, job(report))
    except LlmsysError as error:
        return Failed(index, str(error), "")
    except Exception as error:
        return Failed(index, f"{type(error).__name__}: {error}", traceback.format_exc())
