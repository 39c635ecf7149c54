"""Run jobs one after another in this process: for debugging, for tests, and as the reference for other executors.

An exception of a job fails this job only.
"""

import errno
import traceback
from collections.abc import Iterator, Sequence

from data_pipeline.executors.base import Event, Job, Report, TaskDone, TaskFailed, TaskProgress
from llmsys.errors import LlmsysError, to_data_error
from llmsys.redact import redact_secrets

# A retry cannot fix these, and no input causes them: disk full, quota, file too large, read-only file system.
_PLACE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))


class InlineExecutor:
    """Runs each job when its event is requested. It cannot stop a job that takes too long."""

    eager_jobs = None

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event]:
        """Yield the events of each job in order."""
        for index, job in enumerate(jobs):
            progress: list[TaskProgress] = []

            def report_progress(
                amount: float, dropped: int, index: int = index, progress: list[TaskProgress] = progress
            ) -> None:
                progress.append(TaskProgress(index, amount, dropped))

            # Progress is collected first: a callback cannot yield.
            outcome = try_job(index, job, report_progress)
            yield from progress
            yield outcome

    def close(self) -> None:
        """Do nothing: there are no workers."""


def try_job(index: int, job: Job, report: Report) -> TaskDone | TaskFailed:
    """Run one job once.

    Args:
        index: Number of the job, returned in the event.
        job: The job.
        report: Progress callback of the job.

    Returns:
        `TaskDone`, or `TaskFailed`. Errors that a user can fix have a message only, others also a traceback.
    """
    try:
        return TaskDone(index, job(report))
    except LlmsysError as error:
        return TaskFailed(index, str(error), "", "mend")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _PLACE_ERRORS and (problem := to_data_error(error)):
            return TaskFailed(index, str(problem), "", "mend")
        message, stack = f"{type(error).__name__}: {error}", traceback.format_exc()
        return TaskFailed(index, redact_secrets(message), redact_secrets(stack))
