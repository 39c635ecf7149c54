"""`llmsys doctor device`: what the first person with a device runs, and one file that can be sent
back.

Starts one process for each rank, as the other checks do (rank_pool.py). Writes `device-check.json`.

Invariants:
- Every check is a row: ok, FAIL, or not run with the reason. A task that hangs or ends its rank is
  a row too, and the checks after it run.
- The file holds no path and no name of a host or a user.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, assert_never

import torch

from llmsys import __version__
from llmsys.config.attention_device import AttentionDtype
from llmsys.doctor.attention_parity import CASES, DTYPES, check_attention
from llmsys.doctor.check_row import CheckRow, build_row, merge_ranks
from llmsys.doctor.collective_check import check_collectives
from llmsys.doctor.rank_pool import TaskFailure, run_tasks
from llmsys.doctor.step_check import MODELS, StepMeasurement, check_determinism, measure_steps
from llmsys.doctor.step_comparison import build_memory_row, build_speed_row
from llmsys.estimate.device_profile import DeviceProfile, list_device_names, load_device_profile
from llmsys.model.attention_device import describe_device
from llmsys.parallel.process_group import all_gather_object, get_local_device, get_world_size
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.train.source_code import read_source

FILE_NAME, VERSION = "device-check.json", 1
# Limit of one task: compiling a kernel takes up to a minute on a busy host.
TIMEOUT_SECONDS = 300.0
Result = list[CheckRow] | StepMeasurement | dict[str, Any]


REPRODUCIBILITY = ("fast", "bitwise")


@dataclass(frozen=True)
class DeviceCheckTask:
    """One task of all ranks: its kind, and which of them."""

    kind: Literal["machine", "attention", "collectives", "determinism", "steps"]
    number: int = 0

    @property
    def name(self) -> str:
        """Name in the progress and in the row of a task that did not end."""
        match self.kind:
            case "attention":
                return CASES[self.number].name
            case "determinism":
                return REPRODUCIBILITY[self.number]
            case "steps":
                return MODELS[self.number].name
            case "machine" | "collectives":
                return "all"
            case unreachable:
                assert_never(unreachable)


@dataclass
class DeviceReport:
    """The outcome: facts of the machine, and all rows."""

    ranks: int
    machine: dict[str, Any] = field(default_factory=dict)
    rows: list[CheckRow] = field(default_factory=list)
    steps: list[StepMeasurement] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed_rows(self) -> list[CheckRow]:
        """Rows that failed."""
        return [row for row in self.rows if row.state == "FAIL"]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values with stable keys, for JSON."""
        return {
            "version": VERSION,
            "llmsys": __version__,
            "commit": read_source()["commit"],
            "ranks": self.ranks,
            "machine": self.machine,
            "passed": not self.failed_rows,
            "rows": [row.to_dict() for row in self.rows],
            "steps": [asdict(one) for one in self.steps],
            "seconds": self.seconds,
        }


def list_tasks(num_cases: int = len(CASES), num_models: int = len(MODELS)) -> list[DeviceCheckTask]:
    """List the tasks in order: what is wrong with a kernel is known before a model is trained with
    it.

    Args:
        num_cases: number of attention cases to check.
        num_models: number of models to train.

    Returns:
        The tasks.
    """
    return [
        DeviceCheckTask("machine"),
        *(DeviceCheckTask("attention", number) for number in range(num_cases)),
        DeviceCheckTask("collectives"),
        *(DeviceCheckTask("determinism", number) for number in range(len(REPRODUCIBILITY))),
        *(DeviceCheckTask("steps", number) for number in range(num_models)),
    ]


def check_device(
    tasks: Sequence[DeviceCheckTask],
    ranks: int,
    *,
    dtypes: tuple[AttentionDtype, ...] = tuple(DTYPES),
    profile: str | None = None,
    on_task: Callable[[DeviceCheckTask], None] = lambda task: None,
) -> DeviceReport:
    """Run tasks on every rank, and compare steps with the dry run and the estimate.

    Args:
        tasks: from `list_tasks`.
        ranks: number of processes, one for each accelerator.
        dtypes: dtypes of attention.
        profile: name or file of a device profile; None: that of this accelerator.
        on_task: called after each task.

    Returns:
        The report.

    Raises:
        ConfigError: the profile is unknown.
    """
    began = time.monotonic()
    report = DeviceReport(ranks)
    name = profile if profile is not None else find_profile_name()
    known = None if name is None else load_device_profile(name)
    task = partial(_run_task, list(tasks), dtypes)
    for number, result in run_tasks(task, range(len(tasks)), ranks, TIMEOUT_SECONDS):
        report.rows += _build_rows(tasks[number], result, report, name, known)
        on_task(tasks[number])
    report.seconds = time.monotonic() - began
    return report


def find_profile_name() -> str | None:
    """Find the shipped profile of the first accelerator.

    Returns:
        Its name; None on a CPU and for an unknown device.
    """
    if not torch.cuda.is_available():
        return None
    driver_name = torch.cuda.get_device_name(0)
    return next(
        (
            name
            for name in list_device_names()
            if driver_name in load_device_profile(name).driver_names
        ),
        None,
    )


def _run_task(
    tasks: list[DeviceCheckTask], dtypes: tuple[AttentionDtype, ...], number: int
) -> Result:
    """Run one task on this rank and return what all ranks found. Collective."""
    task, device = tasks[number], get_local_device()
    match task.kind:
        case "machine":
            return _describe_machine(device)
        case "attention":
            return merge_ranks(all_gather_object(check_attention(task.number, dtypes, device)))
        case "collectives":
            return merge_ranks(all_gather_object(check_collectives(device)))
        case "determinism":
            return merge_ranks(
                all_gather_object(check_determinism(REPRODUCIBILITY[task.number], device))
            )
        case "steps":
            return measure_steps(task.number, device)
        case unreachable:
            assert_never(unreachable)


def _describe_machine(device: torch.device) -> dict[str, Any]:
    """Return facts without names of the host. Collective."""
    is_cuda = device.type == "cuda"
    name = (
        torch.cuda.get_device_name(device)
        if is_cuda
        else platform.processor() or platform.machine()
    )
    memory = torch.cuda.get_device_properties(device).total_memory if is_cuda else None
    mine = {"device": name, "kind": str(describe_device(device)), "memory_bytes": memory}
    return {
        "ranks": all_gather_object(mine),
        "cores": os.cpu_count(),
        "platform": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": list(torch.cuda.nccl.version()) if is_cuda else None,
        "world_size": get_world_size(),
    }


def _build_rows(
    task: DeviceCheckTask,
    result: Any,
    report: DeviceReport,
    name: str | None,
    profile: DeviceProfile | None,
) -> Iterator[CheckRow]:
    if isinstance(result, TaskFailure):
        yield build_row(task.kind, task.name, False, str(result))
    elif isinstance(result, StepMeasurement):
        report.steps.append(result)
        yield build_speed_row(result, report.ranks, profile)
        yield build_memory_row(result, report.ranks, name)
    elif task.kind == "machine":
        report.machine = result
    else:
        yield from result


def write_report(report: DeviceReport, folder: Path) -> Path:
    """Write `device-check.json`.

    Args:
        report: from `check_device`.
        folder: made where it is missing.

    Returns:
        Path of the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    write_bytes_atomically(path, json.dumps(report.to_dict(), indent=1).encode())
    return path
