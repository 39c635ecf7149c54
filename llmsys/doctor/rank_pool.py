"""Processes of this machine as ranks that do one task after another, each result told as soon as it is there.

A rank that fails or hangs spoils its group, never the answer: the group is ended, the task is told as failed with the
rank and the reason, and a new group goes on with the next task.
"""

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from typing import Any

from llmsys.port import find_free_port

START_SECONDS = 300.0
"""How long ranks may take to import what they need and to meet, on a machine that has other work."""

MAX_GROUP_TASKS = 32
"""Then new processes go on: every communicator that a task opens keeps threads, and hundreds of them slow all down."""

Task = Callable[[int], Any]
"""(number of the task) → what rank 0 tells of it. Must be importable: it is sent to new processes by name."""


class TaskFailure(str):
    """Why a task was not finished, in words."""

    __slots__ = ()


def run_tasks(task: Task, numbers: Sequence[int], ranks: int, timeout_seconds: float) -> Iterator[tuple[int, Any]]:
    """(number, result of rank 0, or Failed) for each task, in order, on `ranks` processes."""
    left = list(numbers)
    while left:
        done = 0
        for number, result in _run_group(task, left[:MAX_GROUP_TASKS], ranks, timeout_seconds):
            yield number, result
            done += 1
        left = left[done:]


def _run_group(task: Task, numbers: Sequence[int], ranks: int, timeout_seconds: float) -> Iterator[tuple[int, Any]]:
    """Results until the first failure, which is the last."""
    context = multiprocessing.get_context("spawn")
    port = find_free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_run_rank, args=(sender, task, list(numbers), rank, ranks, port), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()  # so that the end of a process is the end of its pipe
    receivers = [receiver for receiver, _ in pipes]
    try:
        started = _receive_answer(receivers, START_SECONDS)
        for number in numbers:
            result = started if isinstance(started, TaskFailure) else _receive_answer(receivers, timeout_seconds)
            yield number, result
            if isinstance(result, TaskFailure):
                return
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()


def _receive_answer(receivers: list[Connection], timeout_seconds: float) -> Any:
    """What rank 0 says when all ranks have answered; Failed for the first that did not."""
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


def _run_rank(sender: Connection, task: Task, numbers: list[int], rank: int, ranks: int, port: int) -> None:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in local.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    import logging

    import torch

    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # gathering what is split is our business here
    from llmsys.parallel.process_group import init_process_group

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with init_process_group():
        sender.send(("result", "started"))
        for number in numbers:
            try:
                sender.send(("result", task(number)))
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                sender.send(("error", f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"))
                return
