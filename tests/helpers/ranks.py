"""Runs a function on several real processes joined by gloo, and brings back what each returned or
raised.

A rank that native code kills leaves its threads and its core. The first such crash in a test
process is a warning and the ranks run again, since gloo has a rare one of its own
(docs/measurements/native-crashes.md); the next fails its test, so that a defect that comes back is
seen. About a tenth of the functions run with glibc's checks of the heap.
"""

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.helpers.native_crash import SIGNALS, build_heap_checks, keep_crash, prepare_crash_report

TIMEOUT_SECONDS = 240

# After its answer a rank leaves the group; one that does not end by itself is killed.
ENDING_SECONDS = 10

# Processes are forked from a server that has imported these and done nothing with them: importing
# torch and the engines once for each process of each group would cost more than what most tests do.
# A test process has one server, so whoever starts it has the same list.
PRELOADED = ["torch.distributed.checkpoint", "llmsys.doctor.pairs.preload", "pytest", "s3fs"]

# One function in ten.
CHECKED_SHARE = 10

# Crashes after which ranks may run again, for a test process.
FORGIVEN_CRASHES = 1

_crashes: list[str] = []


class CrashError(AssertionError):
    """Native code ended a rank."""


class CrashWarning(UserWarning):
    """Native code ended a rank, and the ranks ran again."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, checks_heap: bool | None = None
) -> list[Any]:
    """Run `function(rank, *arguments)` on `world_size` fresh processes.

    An exception on any rank fails the test with that rank's number and traceback; a rank that hangs
    or dies is named.

    Args:
        function: Found by its name in each process.
        world_size: Number of processes.
        arguments: Of the function, after the rank.
        checks_heap: None decides by the function's name, so that a tenth of them is always checked.

    Returns:
        The results, by rank.

    Raises:
        CrashError: Native code ended a rank, before its answer or after it, and not for the first
            time in this process. The message has its threads.
    """
    if checks_heap is None:
        checks_heap = is_heap_checked(function, world_size)
    try:
        return _run_once(function, world_size, arguments, checks_heap)
    except CrashError as error:
        _crashes.append(str(error))
        if len(_crashes) > FORGIVEN_CRASHES:
            raise
        warnings.warn(f"the ranks ran again: {error}", CrashWarning, stacklevel=2)
        return _run_once(function, world_size, arguments, checks_heap)


def _run_once(
    function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], checks_heap: bool
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        with _choose_context(checks_heap) as context:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                given = (sender, folder, rank, world_size, dict(os.environ), function, arguments)
                process = context.Process(target=_rank_main, args=given, daemon=True)
                process.start()
                sender.close()  # so that the pipe ends with the process
                pipes.append(receiver)
                processes.append(process)
        try:
            answers = _collect_answers(pipes, processes, Path(folder), TIMEOUT_SECONDS)
            for process in processes:
                process.join(ENDING_SECONDS)
            _check_crashes(processes, Path(folder))
            return answers
        finally:
            for process in processes:
                process.kill()
                process.join()


def is_heap_checked(function: Callable[..., Any], world_size: int) -> bool:
    """Return whether the ranks of a function run with checks of the heap."""
    name = f"{function.__module__}.{function.__qualname__}/{world_size}"
    return zlib.crc32(name.encode()) % CHECKED_SHARE == 0


@contextmanager
def _choose_context(checks_heap: bool) -> Iterator[Any]:
    """Yield what starts processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    if not checks_heap:
        yield context
        return
    # A context has one server for the whole process, and takes it from this module.
    connect = _start_checked_server().connect_to_new_process
    with patch.object(forkserver, "connect_to_new_process", connect):
        yield context


@cache
def _start_checked_server() -> forkserver.ForkServer:
    """Start the server whose processes check the heap: the loader reads the variables of the checks
    when a program starts, so that a fork of another server would not have them.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, build_heap_checks()):
        server.ensure_running()
    return server


def _collect_answers(
    receivers: list[Connection], processes: list[Any], folder: Path, timeout_seconds: float
) -> list[Any]:
    """The results by rank, taken as they come: what one rank raised is told at once, though
    others then wait for it.
    """
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(results) < len(processes):
        silent = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = wait(list(silent), timeout=deadline - time.monotonic())
        if not ready:
            raise TimeoutError(
                f"ranks {sorted(silent.values())} did not answer within {timeout_seconds} s"
            )
        for receiver, rank in silent.items():
            if receiver in ready:
                results[rank] = _receive_answer(rank, receiver, processes, folder)
    return [results[rank] for rank in range(len(processes))]


def _receive_answer(rank: int, receiver: Connection, processes: list[Any], folder: Path) -> Any:
    try:
        kind, value = receiver.recv()
    except EOFError:
        kind, value = "error", "it ended without an answer"
    if kind != "error":
        return value
    for process in processes:
        process.join(timeout=1)  # what a rank raises may come of another's end
    _check_crashes(processes, folder)
    raise AssertionError(f"rank {rank} raised:\n{value}")


def _check_crashes(processes: list[Any], folder: Path) -> None:
    told = [
        keep_crash(f"rank {rank}", process.exitcode, process.pid, _name_log(folder, rank))
        for rank, process in enumerate(processes)
        if -(process.exitcode or 0) in SIGNALS
    ]
    if told:
        raise CrashError("\n".join(told))


def _name_log(folder: str | Path, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.stderr"


def _rank_main(
    sender: Connection,
    folder: str,
    rank: int,
    world_size: int,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    prepare_crash_report(_name_log(folder, rank))
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
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        sender.send(("result", function(rank, *arguments)))
    except BaseException:
        sender.send(("error", traceback.format_exc()))
    dist.barrier()
    # An interpreter that ends while gloo still works may crash
    # (docs/measurements/native-crashes.md).
    dist.destroy_process_group()
