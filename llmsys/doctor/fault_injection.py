"""Inject faults into a run: kill or stop a rank, fill its disk, or damage its newest checkpoint.

A fault point is a call inside the trainer or the saver. It is wrapped in the process that the drill
starts and nowhere else, so the code that users run does not know drills. A forkserver imports the
trainer once and forks every rank from there: two hundred attempts then cost minutes.
"""

import contextlib
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.parallel.port import find_free_port

# The largest file that a rank on a full disk can write: smaller than any shard.
DISK_BYTES = 4096


@dataclass(frozen=True)
class FaultPoint:
    """A call at which a fault can be injected.

    Attributes:
        module: where the call is looked up.
        owner: class of the call; empty for a function.
        call: name of the function or method.
        before: inject before the call, else after it.
    """

    module: str
    owner: str
    call: str
    before: bool = True


FAULT_POINTS = {
    "before the backward pass": FaultPoint(
        "llmsys.engine.bitwise_engine", "BitwiseEngine", "train_step"
    ),
    "between backward and step": FaultPoint(
        "llmsys.train.step_guard", "StepGuard", "accept_step", before=False
    ),
    "after the step": FaultPoint("llmsys.train.trainer", "", "update_expert_balance", before=False),
    "in an evaluation": FaultPoint("llmsys.train.trainer", "Trainer", "_evaluate"),
    "before a save": FaultPoint("llmsys.train.checkpoint_saver", "CheckpointSaver", "save_state"),
    "making the folder": FaultPoint(
        "llmsys.train.checkpoint_write", "", "_recreate_folder", before=False
    ),
    "writing tensors": FaultPoint(
        "llmsys.train.checkpoint_write", "", "_write_tensors", before=False
    ),
    "digesting": FaultPoint("llmsys.train.checkpoint_write", "", "compute_digests", before=False),
    "writing the record": FaultPoint(
        "llmsys.train.checkpoint_write", "", "write_record", before=False
    ),
    "renamed and not flushed": FaultPoint("llmsys.train.checkpoint_write", "", "sync_folder"),
    "removing an older one": FaultPoint(
        "llmsys.train.checkpoint_retention", "", "remove_checkpoint", before=False
    ),
}


@dataclass(frozen=True)
class Fault:
    """A fault at the `count`-th call of a fault point on one rank: `kill`, `stop` (SIGSTOP) or
    `full_disk`.
    """

    point: str
    count: int
    action: str = "kill"
    rank: int = 0


def inject_fault(fault: Fault) -> None:
    """Wrap the fault point's call in this process."""
    if fault.action == "full_disk":
        # a write then fails with an error, as on a full disk
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    point = FAULT_POINTS[fault.point]
    import importlib

    module = importlib.import_module(point.module)
    owner = getattr(module, point.owner) if point.owner else module
    setattr(owner, point.call, _wrap_call(getattr(owner, point.call), point.before, fault))


def _wrap_call(real: Callable[..., Any], before: bool, fault: Fault) -> Callable[..., Any]:
    calls = 0

    def call_with_fault(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == fault.count:
            _trigger_fault(fault.action)
        result = real(*arguments, **named)
        if not before and calls == fault.count:
            _trigger_fault(fault.action)
        return result

    return call_with_fault


def _trigger_fault(action: str) -> None:
    if action == "full_disk":
        # a limit on file sizes needs no separate disk and no root
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, resource.RLIM_INFINITY))
        return
    os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)


# Damage to saved checkpoints


def get_newest_checkpoint_folder(run_folder: Path) -> Path:
    """Return the newest published checkpoint."""
    return sorted((run_folder / "checkpoints").glob("step-*"))[-1]


def truncate_largest_file(run_folder: Path) -> None:
    """Truncate the largest file of the newest checkpoint to half its size."""
    path = _get_largest_file(get_newest_checkpoint_folder(run_folder))
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(run_folder: Path) -> None:
    """Change one bit in the middle of the largest file of the newest checkpoint."""
    path = _get_largest_file(get_newest_checkpoint_folder(run_folder))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete_largest_file(run_folder: Path) -> None:
    """Delete the largest file of the newest checkpoint."""
    _get_largest_file(get_newest_checkpoint_folder(run_folder)).unlink()


def truncate_record(run_folder: Path) -> None:
    """Truncate the record of the newest checkpoint to half its size."""
    path = get_newest_checkpoint_folder(run_folder) / "state.json"
    os.truncate(path, path.stat().st_size // 2)


def delete_newest_checkpoint(run_folder: Path) -> None:
    """Delete the newest checkpoint."""
    shutil.rmtree(get_newest_checkpoint_folder(run_folder))


def _get_largest_file(checkpoint: Path) -> Path:
    files = [path for path in checkpoint.iterdir() if path.name != "state.json"]
    return max(files, key=lambda path: (path.stat().st_size, path.name))


# Maximum seconds of an attempt, many times the usual.
PATIENCE_SECONDS = 180.0

# Seconds that the other ranks get to notice that one has ended, as under a launcher.
GRACE_SECONDS = 3.0


def run_attempt(
    config: RunConfig,
    ranks: int,
    fault: Fault | None = None,
    meanwhile: Callable[[list[BaseProcess]], None] | None = None,
) -> list[int]:
    """Start the run in fresh processes and wait for its end.

    Args:
        config: the config of the run.
        ranks: number of processes.
        fault: the fault to inject, if any.
        meanwhile: called with the processes while they train.

    Returns:
        Exit statuses by rank; below zero: the signal that ended it.
    """
    # Spawned ranks would import torch every time, a second or more each.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["llmsys.train.build_trainer", "llmsys.engine.bitwise_engine", "llmsys.train.trainer"]
    )
    port = find_free_port()
    log = config.run.folder.parent / "output.txt"
    processes: list[BaseProcess] = [
        context.Process(target=_run_rank, args=(config, rank, ranks, port, fault, log))
        for rank in range(ranks)
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
    """Wait until all have ended, or one has failed and the others have had their grace period."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and any(process.is_alive() for process in processes):
        if any(process.exitcode not in (None, 0) for process in processes):
            # A rank that lost its peer may wait for the timeout of a collective.
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.02)


def _kill_process(process: BaseProcess) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.join()


def _run_rank(
    config: RunConfig, rank: int, ranks: int, port: int, fault: Fault | None, log: Path
) -> None:
    local = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in local.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("a") as opened:
        # torch's C++ writes to the descriptors, not to sys.stderr
        os.dup2(opened.fileno(), sys.stdout.fileno())
        os.dup2(opened.fileno(), sys.stderr.fileno())
    if fault is not None and fault.rank == rank:
        inject_fault(fault)
    from llmsys.errors import LlmsysError, StopRequested, to_data_error
    from llmsys.log import configure_logging
    from llmsys.train.build_trainer import train_run

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
    # torch's clean-up would wait for peers that are gone
    os._exit(status)
