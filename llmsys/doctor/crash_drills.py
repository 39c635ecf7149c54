"""Crash drills: train runs that are killed, stalled or damaged, and compare their final state with
an undisturbed run.

Every drill ends with a run that is restarted until it is finished, with another number of processes
where it can be. The runs are in bitwise mode, so the final states are compared by their hash,
without tolerance.
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from llmsys.config.run import RunConfig
from llmsys.doctor import fault_injection
from llmsys.doctor.drill_actions import (
    build_damage_drill,
    build_fault_drill,
    build_random_kill_drill,
    drill_full_disk,
    drill_sigterm,
    drill_stalled_rank,
    run_until_finished,
)
from llmsys.doctor.fault_injection import FAULT_POINTS, Fault
from llmsys.doctor.toy_dataset import STEPS, build_toy_config, write_toy_dataset
from llmsys.train.checkpoint_record import read_record


@dataclass(frozen=True)
class CrashDrill:
    """A drill: its name, the promise it checks, and the function that disturbs a run.

    Attributes:
        perform: disturbs the run of a config; returns a message or raises AssertionError.
        mode: `checkpoint.mode` of the run.
        optimizer: kind of its optimizer; in bitwise mode where that is elementwise.
    """

    name: str
    promise: str
    perform: Callable[[RunConfig], str]
    mode: str = "sync"
    optimizer: str = "adamw"


@dataclass(frozen=True)
class DrillResult:
    """The result of a drill."""

    name: str
    passed: bool
    text: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary, for JSON."""
        return asdict(self)


def run_drills(
    drills: Sequence[CrashDrill], on_result: Callable[[DrillResult], None]
) -> list[DrillResult]:
    """Run each drill in its own folder, over one dataset, and compare it with one undisturbed run.

    Args:
        drills: the drills to run, in order.
        on_result: called with each result.

    Returns:
        A result for each drill.
    """
    results = []
    with tempfile.TemporaryDirectory(prefix="llmsys-drill-") as scratch:
        root = Path(scratch)
        write_toy_dataset(root / "data")
        calm: dict[str, str] = {}
        for number, drill in enumerate(drills):
            kind = drill.optimizer
            if kind not in calm:
                undisturbed = _build_drill_config(root, f"calm-{kind}", "sync", kind)
                calm[kind] = read_final_hash(run_until_finished(undisturbed, ranks=1))
            config = _build_drill_config(root, f"drill-{number}", drill.mode, kind)
            results.append(_run_drill(drill, config, calm[kind]))
            on_result(results[-1])
    return results


def _build_drill_config(root: Path, name: str, mode: str, kind: str) -> RunConfig:
    folder = root / name
    folder.mkdir()
    optimizer, train = {"kind": kind}, {}
    if kind not in ELEMENTWISE:
        train = {"reproducibility": "fast"}
    if kind in MOMENTS:
        optimizer = {"kind": "adamw", "moments": kind.removeprefix("adamw-")}
    return build_toy_config(
        folder,
        data={"folder": root / "data"},
        checkpoint={"mode": mode},
        run={"folder": folder / "run"},
        optimizer=optimizer,
        train=train,
    )


def _run_drill(drill: CrashDrill, config: RunConfig, calm: str) -> DrillResult:
    began = time.monotonic()
    try:
        message = drill.perform(config)
        found = read_final_hash(config)
        if found != calm:
            return DrillResult(
                drill.name,
                False,
                f"ended in state {found}, an undisturbed run in {calm}",
                _measure_elapsed_seconds(began),
            )
        return DrillResult(drill.name, True, message, _measure_elapsed_seconds(began))
    except AssertionError as failed:
        return DrillResult(
            drill.name,
            False,
            f"{failed}. {_read_last_output(config)}",
            _measure_elapsed_seconds(began),
        )


def _measure_elapsed_seconds(began: float) -> float:
    return round(time.monotonic() - began, 2)


def _read_last_output(config: RunConfig) -> str:
    path = config.run.folder.parent / "output.txt"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return f"Its last line: {lines[-1]}" if lines else ""


def read_final_hash(config: RunConfig) -> str:
    """Return the hash of the run's final state; in fast mode, which has none, of the checksums of
    its files.

    Raises:
        AssertionError: the run has not finished.
    """
    target = config.run.folder / "checkpoints" / f"step-{STEPS:08d}"
    assert target.is_dir(), f"the run has no checkpoint of step {STEPS}"
    record = read_record(target)
    return str(
        record.get("state_hash")
        or xxhash.xxh3_128_hexdigest(json.dumps(record["files"], sort_keys=True).encode())
    )


def replace_kill_count(drills: Sequence[CrashDrill], count: int) -> list[CrashDrill]:
    """Set the number of random kills.

    Args:
        drills: the drills to run.
        count: kills in a row.

    Returns:
        The same drills, with `count` kills in the drill of random kills.
    """
    return [
        replace(one, perform=build_random_kill_drill(count)) if one.name == "random kills" else one
        for one in drills
    ]


def _build_kill_drills() -> list[CrashDrill]:
    ranks = [(1, 2), (2, 1), (2, 4), (1, 1)]
    found = []
    for number, point in enumerate(FAULT_POINTS):
        before, after = ranks[number % len(ranks)]
        count = {"in an evaluation": 2, "before a save": 2, "removing an older one": 1}.get(
            point, 3
        )
        promise = "a rank killed at this point loses nothing"
        fault = Fault(
            point, count, rank=before - 1 if FAULT_POINTS[point].module.endswith("engine") else 0
        )
        found.append(
            CrashDrill(f"killed {point}", promise, build_fault_drill(fault, before, after))
        )
        if FAULT_POINTS[point].module in (
            "llmsys.train.checkpoint_write",
            "llmsys.train.checkpoint_retention",
        ):
            name = f"killed {point} in the background"
            found.append(
                CrashDrill(
                    name,
                    promise,
                    build_fault_drill(Fault(point, min(count, 2)), after, before),
                    "async",
                )
            )
    return found


# Optimizers whose operations are elementwise, and so have the same bits on any number of processes.
ELEMENTWISE = ("adamw", "lion", "ademamix", "schedule_free")
MOMENTS = ("adamw-bf16", "adamw-int8")
OPTIMIZERS = (*ELEMENTWISE, *MOMENTS, "adam", "muon", "adafactor", "soap")


def build_optimizer_drills(kinds: Sequence[str]) -> list[CrashDrill]:
    """Build the drills of `doctor crash --optimizer`: a kill between two saves, and one within a
    save.

    Args:
        kinds: some of `OPTIMIZERS`.

    Returns:
        Two drills for each. Elementwise ones continue on two processes, the others on one, as
        before the kill.
    """
    points = ("between backward and step", 8), ("writing the record", 3)
    return [
        CrashDrill(
            f"{kind}, killed {point}",
            "moments of every optimizer come back",
            build_fault_drill(Fault(point, count), 1, 2 if kind in ELEMENTWISE else 1),
            optimizer=kind,
        )
        for kind in kinds
        for point, count in points
    ]


DRILLS = (
    *_build_kill_drills(),
    CrashDrill(
        "a truncated shard",
        "the previous checkpoint is loaded",
        build_damage_drill(fault_injection.truncate_largest_file),
    ),
    CrashDrill(
        "a flipped bit",
        "the previous checkpoint is loaded",
        build_damage_drill(fault_injection.flip_bit),
    ),
    CrashDrill(
        "a lost file",
        "the previous checkpoint is loaded",
        build_damage_drill(fault_injection.delete_largest_file),
    ),
    CrashDrill(
        "a damaged record",
        "the previous checkpoint is loaded",
        build_damage_drill(fault_injection.truncate_record),
    ),
    CrashDrill(
        "a lost checkpoint",
        "the previous checkpoint is loaded",
        build_damage_drill(fault_injection.delete_newest_checkpoint),
    ),
    CrashDrill("a full disk", "an error message; saved checkpoints stay intact", drill_full_disk),
    CrashDrill("a stalled rank", "the rank is named, with stacks", drill_stalled_rank),
    CrashDrill("asked to stop", "a checkpoint is saved first", drill_sigterm),
    CrashDrill("random kills", "killed repeatedly at random times", build_random_kill_drill(8)),
)
