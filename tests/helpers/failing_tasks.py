"""Jobs that lose their process or fail, for tests of executors; imports little, because every
worker imports it.
"""

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.executors.local import LocalExecutor


def die_until(path: Path, lives: int, report: Report) -> dict[str, Any]:
    """Kill this very process until it has been tried `lives` times."""
    with open(path, "a") as file:
        file.write("x")
    if len(path.read_text()) < lives:
        os.kill(os.getpid(), signal.SIGKILL)
    report(1, 0)
    return {"tries": len(path.read_text())}


def count(amount: int, report: Report) -> dict[str, Any]:
    """A job that is well."""
    report(amount, 1)
    return {"counted": amount}


def meet(folder: Path, name: str, others: int, report: Report) -> dict[str, Any]:
    """Wait until as many jobs work at the same time."""
    folder.mkdir(exist_ok=True)
    (folder / name).touch()
    while len(list(folder.iterdir())) < others:
        time.sleep(0.02)
    return {"counted": 1}


def pass_gate(gate: Path, report: Report) -> dict[str, Any]:
    """Wait until a test opens the gate; says which process this is."""
    while not gate.exists():
        time.sleep(0.01)
    report(1, 1)
    return {"pid": os.getpid()}


def raise_failure(report: Report) -> dict[str, Any]:
    """A bug in a task."""
    raise ValueError("a bug")


def sleep_for_ever(path: Path, report: Report) -> dict[str, Any]:
    """Say which process this is, and stay in the middle of a task."""
    path.write_text(f"{os.getpid()}\n")
    time.sleep(3600)
    return {}


# python -m tests.helpers.failing_tasks PATH: a parent whose worker never finishes
if __name__ == "__main__":
    list(LocalExecutor(workers=1).run_jobs([partial(sleep_for_ever, Path(sys.argv[1]))]))
