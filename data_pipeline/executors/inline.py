"""Tasks in this very process, one after the other: for debugging, for tests, and the plain twin of other executors.

Reads jobs, gives events. A job's own error fails the job, and the others go on.
"""

import errno
import traceback
from collections.abc import Iterator, Sequence

from data_pipeline.executors.base import Event, Job, Report, TaskDone, TaskFailed, TaskProgress
from llmsys.errors import LlmsysError, to_data_error
from llmsys.redact import redact_secrets

# What another try cannot mend, and what no input is to blame for.
_PLACE_ERRORS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS))


class InlineExecutor:
    """Does each job when its event is asked for; nothing here can end a job that takes too long."""

    eager_jobs = None

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event]:
        """Yield what happens, job by job."""
        for index, job in enumerate(jobs):
            progress: list[TaskProgress] = []

            def report_progress(
                amount: float, dropped: int, index: int = index, progress: list[TaskProgress] = progress
            ) -> None:
                progress.append(TaskProgress(index, amount, dropped))

            outcome = try_job(index, job, report_progress)
            yield from progress
            yield outcome

    def close(self) -> None:
        """Nothing to end."""


def try_job(index: int, job: Job, report: Report) -> TaskDone | TaskFailed:
    """Try one job; an error that a person can mend is its message, any other comes with its traceback."""
    try:
        return TaskDone(index, job(report))
    except LlmsysError as error:
        return TaskFailed(index, str(error), "", "mend")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _PLACE_ERRORS and (problem := to_data_error(error)):
            return TaskFailed(index, str(problem), "", "mend")
        said, where = f"{type(error).__name__}: {error}", traceback.format_exc()
        return TaskFailed(index, redact_secrets(said), redact_secrets(where))
