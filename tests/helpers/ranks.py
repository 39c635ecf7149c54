"""Runs a function on several real processes joined by gloo, and brings back what each returned
or raised.
"""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 240

# Processes are forked from a server that has imported these and done nothing with them: importing
# torch once for each process of each group would cost more than what most tests do.
PRELOADED = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
]


class CrashError(AssertionError):
    """A rank was ended by a crash of native code."""


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """`function(rank, *arguments)` on `world_size` fresh processes; the results by rank.

    An exception on any rank fails the test with that rank's number and traceback; a rank that hangs
    or dies is named. Seen twice in all runs of the tests: the heap of a rank was damaged where
    torch 2.13 works for gloo. Once its thread (`pt_gloo_runloop`) died of SIGSEGV in malloc, over a
    list of free pieces that was cut short; once free() found a piece freed twice and ended the rank
    by SIGABRT. So that is said, and the ranks run once more.
    """
    try:
        return _run(function, world_size, arguments)
    except CrashError as crash:
        warnings.warn(f"{crash}; the ranks run once more", stacklevel=2)
        return _run(function, world_size, arguments)


def _run(function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...]) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        receivers, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            given = (sender, store, rank, world_size, dict(os.environ), function, arguments)
            process = context.Process(target=_rank_main, args=given, daemon=True)
            process.start()
            sender.close()  # so that the pipe ends with the process
            receivers.append(receiver)
            processes.append(process)
        try:
            return _collect_answers(receivers, processes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect_answers(receivers: list[Connection], processes: list[Any]) -> list[Any]:
    """The results by rank, taken as they come: what one rank raised is told at once, though
    others then wait for it.
    """
    results: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(results) < len(processes):
        silent = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = wait(list(silent), timeout=deadline - time.monotonic())
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(silent.values())} did not answer within {TIMEOUT_SECONDS} s"
            )
        for receiver, rank in silent.items():
            if receiver in ready:
                results[rank] = _send_answer(rank, receiver, processes)
    return [results[rank] for rank in range(len(processes))]


def _send_answer(rank: int, receiver: Connection, processes: list[Any]) -> Any:
    try:
        kind, value = receiver.recv()
    except EOFError:
        kind, value = "error", "it ended without an answer"
    if kind != "error":
        return value
    for other, process in enumerate(processes):
        process.join(timeout=1)  # what a rank raises may come of another's end
        if -(process.exitcode or 0) in (signal.SIGSEGV, signal.SIGABRT):
            raise CrashError(f"rank {other} was killed by {signal.Signals(-process.exitcode).name}")
    raise AssertionError(f"rank {rank} raised:\n{value}")


def _rank_main(
    sender: Connection,
    store: str,
    rank: int,
    world_size: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.clear()  # the server's is that of its first use
    os.environ |= environment
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "1",
    }
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    try:
        sender.send(("result", function(rank, *arguments)))
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    dist.barrier()
