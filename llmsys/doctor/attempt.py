"""One attempt at a run in fresh processes, with an accident in it or none; light to start, since they are forked.

A server process imports the trainer once and forks every rank from there: two hundred attempts then cost minutes.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from llmsys.config.run import RunConfig
from llmsys.doctor.accident import Fault, inject_fault
from llmsys.port import find_free_port

PATIENCE_SECONDS = 180.0
"""How long an attempt may take: many times what it does."""

GRACE_SECONDS = 3.0
"""What the other ranks get to notice that one has ended; a launcher ends them, too."""


def run_attempt(
    config: RunConfig,
    ranks: int,
    accident: Fault | None = None,
    meanwhile: Callable[[list[BaseProcess]], None] | None = None,
) -> list[int]:
    """Start the run and wait for its end; exit statuses by rank (below zero: the signal that ended it).

    `meanwhile` may do something to the processes while they train, such as killing them.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["llmsys.train.build", "llmsys.engine.bitwise_engine", "llmsys.train.trainer"])
    port = find_free_port()
    log = config.run.folder.parent / "output.txt"
    processes: list[BaseProcess] = [
        context.Process(target=_run_rank, args=(config, rank, ranks, port, accident, log)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        if meanwhile is not None:
            meanwhile(processes)
        _wait_for_processes(processes)
    finally:
        for process in processes:
            _kill_process(process)
    return [process.exitcode or 0 for process in processes]


def _wait_for_processes(processes: list[BaseProcess]) -> None:
    """Until all have ended, or one has and the others have had their grace."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)


def _kill_process(process: BaseProcess) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.join()


def _run_rank(config: RunConfig, rank: int, ranks: int, port: int, accident: Fault | None, log: Path) -> None:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in local.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("a") as opened:
        os.dup2(opened.fileno(), sys.stdout.fileno())
        os.dup2(opened.fileno(), sys.stderr.fileno())
    if accident is not None and accident.rank == rank:
        inject_fault(accident)
    from llmsys.errors import LlmsysError, StopRequested, to_data_error
    from llmsys.log import configure_logging
    from llmsys.train.build import train_run

    configure_logging()
    status = 0
    try:
        train_run(config, lambda *_: [])
    except StopRequested as stopped:
        print(f"stopped: {stopped}", flush=True)
        status = 75
    except LlmsysError as error:
        print(f"error: {error}", flush=True)
        status = 2
    except OSError as error:
        if (problem := to_data_error(error)) is None:
            raise
        print(f"error: {problem}", flush=True)
        status = 2
    sys.stdout.flush()
    os._exit(status)
