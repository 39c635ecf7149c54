"""Run jobs on a Ray cluster.

All nodes see the inputs and the dataset folder under the same paths and have llmsys installed.
Progress within a job is reported when the job ends.

Invariants:
    - At most `workers` jobs are submitted at a time, which bounds the memory of the driver.
    - A lost process or node fails one attempt of its jobs only.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmsys.data_pipeline.executors.base import (
    EagerJobs,
    EagerTaskEvent,
    Event,
    Job,
    JobQueue,
    Queue,
    TaskDone,
    TaskFailed,
    TaskProgress,
    try_job,
)
from llmsys.data_pipeline.executors.local import format_timeout, format_worker_loss
from llmsys.errors import ConfigError, DataError

# Keep-alive of a silent host. Ray's default is five minutes: a run then waits for a task on a host
# that was cut off, although its node was declared dead long before. Ray reads it at import.
for _limit in ("time", "timeout"):
    os.environ.setdefault(f"RAY_grpc_client_keepalive_{_limit}_ms", "20000")

try:
    import ray
    from ray.exceptions import RayError
except ImportError:
    raise ConfigError(
        "data.executor.kind=ray needs Ray, which is not installed. Install it with: pip install "
        "'llmsys[ray]'"
    ) from None

_POLL_SECONDS = 1.0
_ENDING_SECONDS = 60.0


class _RunningJob(NamedTuple):
    """A job on some node: its number, when it was submitted, and whether it is one of a later
    stage.
    """

    number: int
    since: float
    is_early: bool


class RayExecutor:
    """A connection to a cluster. Jobs of other users are not touched."""

    def __init__(self, address: str, workers: int) -> None:
        """Connect to a cluster, or start one on this machine.

        Args:
            address: Address of the cluster; "" starts one. Not used where this process is connected
                to Ray already.
            workers: Jobs that run at the same time; 0: one per CPU of the cluster.

        Raises:
            DataError: Nothing answers at the address.
        """
        self._own = not ray.is_initialized()
        if self._own:
            try:
                ray.init(
                    address=address or "local",
                    # Output of workers would break the progress line.
                    log_to_driver=False,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                )
            # of many types, plain Exception among them where a node does not come up
            except Exception as error:
                raise DataError(
                    f"no Ray cluster responds at data.executor.address={address or 'local'}: "
                    f"{error}. Start one with `ray start --head`, correct the address, or use "
                    "data.executor.kind=local."
                ) from error
        self.limit = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self.eager_jobs = EagerJobs()
        self.nodes: set[str] = set()
        # Ray must not retry: retries are counted and reported in graph/tasks.py.
        self._attempt = ray.remote(num_cpus=1, max_retries=0)(_try_job_on_node)

    def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event | EagerTaskEvent]:
        """Yield events until every job is done or failed, and every eager job too."""
        waiting = JobQueue(jobs)
        running: dict[Any, _RunningJob] = {}
        while waiting or running or self.eager_jobs:
            while (waiting or self.eager_jobs) and len(running) < self.limit:
                queue = self._select_queue(waiting)
                index, job = queue.pop_next() if isinstance(queue, JobQueue) else queue.popleft()
                reference = self._attempt.remote(os.getcwd(), index, job)
                running[reference] = _RunningJob(index, time.monotonic(), queue is not waiting)
            polls = seconds or self.eager_jobs.seconds
            ready, _ = ray.wait(
                list(running), num_returns=1, timeout=_POLL_SECONDS if polls else None
            )
            for reference in ready:
                ended = running.pop(reference)
                for event in self._fetch_events(reference, ended.number):
                    yield EagerTaskEvent(event) if ended.is_early else event
            for reference, slow in list(running.items()):
                limit = self.eager_jobs.seconds if slow.is_early else seconds
                if limit and time.monotonic() - slow.since > limit:
                    ray.cancel(reference, force=True)
                    # the next attempt must not overlap this one
                    ray.wait([reference], timeout=_ENDING_SECONDS)
                    del running[reference]
                    failed = TaskFailed(slow.number, format_timeout(limit), "", "slow")
                    yield EagerTaskEvent(failed) if slow.is_early else failed

    def _select_queue(self, waiting: JobQueue) -> Queue | JobQueue:
        """Return the queue of the next job: of the stage itself, unless none is left or many
        eager jobs wait.
        """
        if waiting and len(self.eager_jobs) <= self.limit:
            return waiting
        return self.eager_jobs.next_jobs or self.eager_jobs.later_jobs

    def close(self) -> None:
        """Disconnect. Stop a cluster that was started for this run."""
        if self._own:
            ray.shutdown()

    def _fetch_events(self, reference: Any, index: int) -> list[Event]:
        try:
            node, amount, dropped, outcome = ray.get(reference)
        except RayError as error:
            ending = f"was lost by Ray ({type(error).__name__})"
            return [TaskFailed(index, format_worker_loss(ending), "", "lost")]
        self.nodes.add(node)
        return [TaskProgress(index, amount, dropped), outcome]


# --- inside the process on some node ---


def _try_job_on_node(
    directory: str, index: int, job: Job
) -> tuple[str, float, int, TaskDone | TaskFailed]:
    """Run one job in the working directory of the driver, where relative paths start, and return
    the id of the node.
    """
    os.chdir(directory)
    reports: list[tuple[float, int]] = []
    outcome = try_job(index, job, lambda amount, dropped: reports.append((amount, dropped)))
    node: str = ray.get_runtime_context().get_node_id()
    return (
        node,
        sum(amount for amount, _ in reports),
        sum(dropped for _, dropped in reports),
        outcome,
    )
