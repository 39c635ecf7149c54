"""Tasks in this very process, one after the other: for debugging, for tests, and the plain twin of the local executor.

Reads jobs, gives events. A job's own error fails the job, and the others go on.
"""

import traceback
from collections.abc import Iterator, Sequence

from data_pipeline.executors.event import Advanced, Done, Event, Failed, Job, Report
from llmsys.errors import LlmsysError


class Inline:
    """Does each job when its event is asked for."""

    def run(self, jobs: Sequence[Job]) -> Iterator[Event]:
        """Yield what happens, job by job."""
        for index, job in enumerate(jobs):
            progress: list[Advanced] = []

            def report(amount: float, dropped: int, progress: list[Advanced] = progress) -> None:
                progress.append(Advanced(amount, dropped))

            outcome = attempt(index, job, report)
            yield from progress
            yield outcome

    def close(self) -> None:
        """Nothing to end."""


def attempt(index: int, job: Job, report: Report) -> Done | Failed:
    """Do one job; an error that a person can mend is its message, any other comes with its traceback."""
    try:
        return Done(index, job(report))
    except LlmsysError as error:
        return Failed(index, str(error), "")
    except Exception as error:
        return Failed(index, f"{type(error).__name__}: {error}", traceback.format_exc())
