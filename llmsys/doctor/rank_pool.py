"""Run tasks on a pool of processes of this machine as ranks, and yield each result as soon as it is
there.

A rank that fails or hangs ends its group only: the task is yielded as failed with the rank and the
reason, and a new group continues with the next task. A group that does not start is started again.
"""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from llmsys.log import get_logger
from llmsys.parallel.port import find_free_port

# Seconds that ranks get to import and join, on a machine with other work.
START_SECONDS = 300.0

# A port may be taken before rank 0 binds it, and gloo's connections of a start may break on a busy
# machine.
MAX_STARTS = 3

# Tasks of one group of processes: every communicator that a task opens keeps threads, and hundreds
# slow all tasks.
MAX_GROUP_TASKS = 32

# (index of the task) → its result; rank 0's is used. Must be importable: it is sent to new
# processes by name.
Task = Callable[[int], Any]


log = get_logger(__name__)


class TaskFailure(str):
    """The reason why a task was not finished."""

    __slots__ = ()


class _StartError(Exception):
    """The processes of a group did not meet; the text is the reason."""


def run_tasks(
    task: Task, numbers: Sequence[int], ranks: int, timeout_seconds: float
) -> Iterator[tuple[int, Any]]:
    """Run tasks in order on `ranks` processes.

    Args:
        task: function of a task's index.
        numbers: indices of the tasks.
        ranks: number of processes.
        timeout_seconds: maximum seconds of one task.

    Yields:
        (index, result of rank 0 or TaskFailure) for each task.
    """
    left, starts = list(numbers), 0
    while left:
        done, starts = 0, starts + 1
        try:
            for number, result in _run_group(task, left[:MAX_GROUP_TASKS], ranks, timeout_seconds):
                yield number, result
                done += 1
        except _StartError as error:
            if starts < MAX_STARTS:
                log.warning("%d ranks did not start: %s; starting them again", ranks, error)
                continue
            yield left[0], TaskFailure(str(error))
            done = 1
        left, starts = left[done:], 0


def _run_group(
    task: Task, numbers: Sequence[int], ranks: int, timeout_seconds: float
) -> Iterator[tuple[int, Any]]:
    """Yield results up to and including the first failure. Raise _StartError if the processes do
    not meet.
    """
    # Forked processes would inherit threads and CUDA state of this one.
    context = multiprocessing.get_context("spawn")
    # Plain pickle copies tensors. torch's reducers would share each one by an open file, of which
    # 1,024 are allowed.
    task_bytes = pickle.dumps(task)
    port = find_free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(
            target=_run_rank,
            args=(sender, task_bytes, list(numbers), rank, ranks, port),
            daemon=True,
        )
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()  # or the pipe would not end with its process
    receivers = [receiver for receiver, _ in pipes]
    try:
        started = _receive_answer(receivers, START_SECONDS)
        if isinstance(started, TaskFailure):
            raise _StartError(started)
        for number in numbers:
            result = _receive_answer(receivers, timeout_seconds)
            yield number, result
            if isinstance(result, TaskFailure):
                return
    finally:
        for process in processes:
            process.kill()  # nothing happens to one that has ended
            process.join()


def _receive_answer(receivers: list[Connection], timeout_seconds: float) -> Any:
    """Return rank 0's result when all ranks have answered, or a TaskFailure for the first that
    did not.
    """
    deadline = time.monotonic() + timeout_seconds
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    answer: Any = None
    while waiting:
        ready = wait_for(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank in waiting.values())
            return TaskFailure(f"rank {late} did not answer within {timeout_seconds:.0f} s")
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                kind, value = receiver.recv()
            except EOFError:
                return TaskFailure(f"rank {rank} ended without an answer")
            if kind == "error":
                return TaskFailure(f"rank {rank}: {value}")
            if rank == 0:
                answer = value
    return answer


def _run_rank(
    sender: Connection, task_bytes: bytes, numbers: list[int], rank: int, ranks: int, port: int
) -> None:
    local = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in local.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    import logging

    import torch

    # It warns about gathering full tensors, which parity must do.
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    from llmsys.parallel.process_group import init_process_group

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with init_process_group():
        task: Task = pickle.loads(task_bytes)
        sender.send(("result", "started"))
        for number in numbers:
            try:
                sender.send(("result", task(number)))
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                # as text, because not every exception can be pickled
                sender.send(
                    ("error", f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
                )
                return
