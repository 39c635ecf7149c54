"""What happens to a rank in a crash drill: it is killed, stopped, or meets a full disk at a chosen moment.

The moments are calls inside the trainer and the saver, wrapped in the process that the drill starts and nowhere else:
the code that users run knows nothing of drills.
"""

import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DISK_BYTES = 4096
"""The largest file that a rank on a full disk can write: less than any shard."""


@dataclass(frozen=True)
class FaultPoint:
    """A call at which an accident can happen: where it is looked up, its name, and whether to strike before it."""

    module: str
    owner: str
    call: str
    before: bool = True
    when: str = ""


MOMENTS = {
    "before the backward pass": FaultPoint("llmsys.engine.bitwise_engine", "BitwiseEngine", "train_step"),
    "between backward and step": FaultPoint("llmsys.train.faults", "StepJudge", "accept", before=False),
    "after the step": FaultPoint("llmsys.train.trainer", "", "settle_experts", before=False),
    "in an evaluation": FaultPoint("llmsys.train.trainer", "Trainer", "_evaluate"),
    "before a save": FaultPoint("llmsys.train.saver", "Saver", "save"),
    "making the folder": FaultPoint("llmsys.train.checkpoint_write", "", "_empty", before=False),
    "writing tensors": FaultPoint("llmsys.train.checkpoint_write", "", "_write_tensors", before=False),
    "digesting": FaultPoint("llmsys.train.checkpoint_write", "", "digests_of", before=False),
    "writing the record": FaultPoint("llmsys.train.checkpoint_write", "", "write_record", before=False),
    "renamed and not flushed": FaultPoint("llmsys.train.checkpoint_write", "", "sync_folder"),
    "removing an older one": FaultPoint("llmsys.train.retention", "", "set_aside", before=False),
}


@dataclass(frozen=True)
class Fault:
    """What happens at the `count`-th time of a moment, on one rank: `kill`, `stop` (SIGSTOP) or `drill_full_disk`."""

    moment: str
    count: int
    action: str = "kill"
    rank: int = 0


def inject_fault(accident: Fault) -> None:
    """Wrap the moment in this process, so that the accident happens there."""
    if accident.action == "full_disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails with an error, as on a full disk
    moment = MOMENTS[accident.moment]
    import importlib

    module = importlib.import_module(moment.module)
    owner = getattr(module, moment.owner) if moment.owner else module
    setattr(owner, moment.call, _wrap_call(getattr(owner, moment.call), moment.before, accident))


def _wrap_call(real: Callable[..., Any], before: bool, accident: Fault) -> Callable[..., Any]:
    calls = 0

    def call_with_fault(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == accident.count:
            _trigger_fault(accident.action)
        result = real(*arguments, **named)
        if not before and calls == accident.count:
            _trigger_fault(accident.action)
        return result

    return call_with_fault


def _trigger_fault(action: str) -> None:
    if action == "full_disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (DISK_BYTES, resource.RLIM_INFINITY))
        return
    os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)


# --- Accidents to what was saved ---


def get_newest_checkpoint_folder(run_folder: Path) -> Path:
    """The newest published checkpoint."""
    return sorted((run_folder / "checkpoints").glob("step-*"))[-1]


def truncate_largest_file(run_folder: Path) -> None:
    """Cut the largest file of the newest checkpoint in half."""
    path = _get_largest_file(get_newest_checkpoint_folder(run_folder))
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(run_folder: Path) -> None:
    """Change one bit in the middle of the largest file of the newest checkpoint."""
    path = _get_largest_file(get_newest_checkpoint_folder(run_folder))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete_largest_file(run_folder: Path) -> None:
    """Remove the largest file of the newest checkpoint."""
    _get_largest_file(get_newest_checkpoint_folder(run_folder)).unlink()


def truncate_record(run_folder: Path) -> None:
    """Cut the record of the newest checkpoint in half."""
    path = get_newest_checkpoint_folder(run_folder) / "state.json"
    os.truncate(path, path.stat().st_size // 2)


def delete_newest_checkpoint(run_folder: Path) -> None:
    """Remove the newest checkpoint altogether."""
    shutil.rmtree(get_newest_checkpoint_folder(run_folder))


def _get_largest_file(checkpoint: Path) -> Path:
    files = [path for path in checkpoint.iterdir() if path.name != "state.json"]
    return max(files, key=lambda path: (path.stat().st_size, path.name))
