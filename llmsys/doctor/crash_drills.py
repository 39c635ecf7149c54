"""Crash drills: runs that are killed, stalled, starved of disk and damaged, and must end where a calm run ends.

Every drill ends with a run that is simply started again until it is done, on another number of processes where it can.
In bitwise mode the specified trajectory is a hash, so "the same" has no tolerance.
"""

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.doctor import fault_injection
from llmsys.doctor.fault_injection import FAULT_POINTS, Fault, run_attempt
from llmsys.doctor.toy_dataset import STEPS, build_toy_config, write_toy_dataset
from llmsys.events import read_latest_events
from llmsys.train.checkpoint_record import read_record

STOPPED, HUNG = 75, 4
MAX_ATTEMPTS = 4


@dataclass(frozen=True)
class CrashDrill:
    """A name, what is promised, and what is done to a run in a folder; gives what to say, or raises AssertionError."""

    name: str
    promise: str
    perform: Callable[[RunConfig], str]
    mode: str = "sync"


@dataclass(frozen=True)
class DrillResult:
    """What became of a drill."""

    name: str
    passed: bool
    text: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_drills(drills: Sequence[CrashDrill], on_result: Callable[[DrillResult], None]) -> list[DrillResult]:
    """Each drill in a folder of its own, over one dataset, against one calm run."""
    results = []
    with tempfile.TemporaryDirectory(prefix="llmsys-drill-") as scratch:
        root = Path(scratch)
        write_toy_dataset(root / "data")
        calm = read_final_hash(run_until_finished(_build_drill_config(root, "calm", "sync"), ranks=1))
        for number, drill in enumerate(drills):
            results.append(_run_drill(drill, _build_drill_config(root, f"drill-{number}", drill.mode), calm))
            on_result(results[-1])
    return results


def _build_drill_config(root: Path, name: str, mode: str) -> RunConfig:
    folder = root / name
    folder.mkdir()
    return build_toy_config(
        folder, data={"folder": root / "data"}, checkpoint={"mode": mode}, run={"folder": folder / "run"}
    )


def _run_drill(drill: CrashDrill, config: RunConfig, calm: str) -> DrillResult:
    began = time.monotonic()
    try:
        message = drill.perform(config)
        found = read_final_hash(config)
        if found != calm:
            return DrillResult(
                drill.name, False, f"ended in state {found}, a calm run in {calm}", _measure_elapsed_seconds(began)
            )
        return DrillResult(drill.name, True, message, _measure_elapsed_seconds(began))
    except AssertionError as failed:
        return DrillResult(drill.name, False, f"{failed}. {_read_last_output(config)}", _measure_elapsed_seconds(began))


def _measure_elapsed_seconds(began: float) -> float:
    return round(time.monotonic() - began, 2)


def _read_last_output(config: RunConfig) -> str:
    path = config.run.folder.parent / "output.txt"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return f"Its last words: {lines[-1]}" if lines else ""


def read_final_hash(config: RunConfig) -> str:
    """The hash of the state that the run ended with; AssertionError when it has not ended."""
    target = config.run.folder / "checkpoints" / f"step-{STEPS:08d}"
    assert target.is_dir(), f"the run has no checkpoint of step {STEPS}"
    return str(read_record(target)["state_hash"])


def run_until_finished(config: RunConfig, ranks: int) -> RunConfig:
    """Start the run again until it is done, as a person or a scheduler would."""
    for _ in range(MAX_ATTEMPTS):
        statuses = run_attempt(config, ranks)
        if not any(statuses):
            return config
    raise AssertionError(f"started {MAX_ATTEMPTS} times and never done, last with statuses {statuses}")


# --- What is done ---


def build_fault_drill(fault: Fault, before: int, after: int) -> Callable[[RunConfig], str]:
    """Train on `before` ranks until the accident, then on `after` ranks to the end."""

    def train_through_fault(config: RunConfig) -> str:
        statuses = run_attempt(config, before, fault)
        assert any(statuses), "nothing happened: the moment was never reached"
        steps = sorted(path.name for path in (config.run.folder / "checkpoints").glob("step-*"))
        run_until_finished(config, after)
        return f"went on from {steps[-1] if steps else 'the start'}, {before} → {after} processes"

    return train_through_fault


def build_damage_drill(damage: Callable[[Path], None]) -> Callable[[RunConfig], str]:
    """Stop a run in the middle, damage its newest checkpoint, and train on."""

    def damage_and_resume(config: RunConfig) -> str:
        run_attempt(config, 1, Fault("before the backward pass", STEPS - 2))
        harmed = fault_injection.get_newest_checkpoint_folder(config.run.folder).name
        damage(config.run.folder)
        run_until_finished(config, 2)
        resumed = [
            e["resumed_from"] for e in read_latest_events(config.run.folder / "events.jsonl") if e["event"] == "start"
        ]
        return f"passed over {harmed}, went on from step {resumed[-1]}"

    return damage_and_resume


def drill_full_disk(config: RunConfig) -> str:
    """Every save fails from the second on; the run ends with a message, and goes on when there is room again."""
    statuses = run_attempt(config, 1, Fault("before a save", 2, "full_disk"))
    assert statuses == [2], f"a full disk ended with status {statuses[0]}, and not with a message"
    run_until_finished(config, 2)
    return "ended with a message, and went on when there was room"


def drill_stalled_rank(config: RunConfig) -> str:
    """One rank stops; the others must name it and end."""
    statuses = run_attempt(config, 2, Fault("before the backward pass", 4, "stop", rank=1))
    assert statuses[0] == HUNG, f"rank 0 left with status {statuses[0]}, and not with {HUNG} for a rank that hangs"
    output = (config.run.folder.parent / "output.txt").read_text(errors="replace")
    assert "rank 1" in output, "nobody named the rank that hung"
    stacks = list((config.run.folder / "heartbeats").glob("*.stacks"))
    assert any(path.stat().st_size for path in stacks), "no stacks were written"
    run_until_finished(config, 2)
    return "rank 1 was named, with stacks, and the run went on"


def drill_sigterm(config: RunConfig) -> str:
    """SIGTERM in the middle: a checkpoint, a status that says start me again."""

    def send_sigterm(processes: list[BaseProcess]) -> None:
        _wait_for_step(config, 3)
        for process in processes:
            if process.pid is not None and process.is_alive():
                _send_signal(process, signal.SIGTERM)

    statuses = run_attempt(config, 2, meanwhile=send_sigterm)
    assert set(statuses) == {STOPPED}, f"statuses {statuses}, and not {STOPPED} on both ranks"
    saved = fault_injection.get_newest_checkpoint_folder(config.run.folder).name
    run_until_finished(config, 1)
    return f"saved {saved} on the way out"


def build_random_kill_drill(count: int, seed: int = 0) -> Callable[[RunConfig], str]:
    """Kill whatever runs, at any time, so many times in a row; ranks change from start to start."""

    def kill_repeatedly(config: RunConfig) -> str:
        choose = random.Random(seed)
        longest = _measure_call_seconds(lambda: run_attempt(config, 1, Fault("before a save", 1)))
        kills = done = 0
        while kills < count:
            ranks = choose.choice((1, 2))

            def kill_ranks(processes: list[BaseProcess]) -> None:
                time.sleep(choose.uniform(0, longest * 1.5))
                for process in processes:
                    _send_signal(process, signal.SIGKILL)

            statuses = run_attempt(config, ranks, meanwhile=kill_ranks)
            kills += any(status == -signal.SIGKILL for status in statuses)
            done += not any(statuses)
            assert done < 20 * count, "the run ends faster than it can be killed"
            if done and not any(statuses):
                _reset_to_oldest_checkpoint(config)
        run_until_finished(config, 2)
        return f"{kills} kills in a row"

    return kill_repeatedly


def _reset_to_oldest_checkpoint(config: RunConfig) -> None:
    """A run that got to its end before the next kill is set back to its oldest checkpoint."""
    for path in sorted((config.run.folder / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)


def _measure_call_seconds(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _send_signal(process: BaseProcess, number: int) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _wait_for_step(config: RunConfig, step: int) -> None:
    path, deadline = config.run.folder / "events.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and any(e["event"] == "step" and e["step"] >= step for e in read_latest_events(path)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in 60 s")


def replace_kill_count(drills: Sequence[CrashDrill], count: int) -> list[CrashDrill]:
    """The drills, the one of random kills with so many of them."""
    return [
        replace(one, perform=build_random_kill_drill(count)) if one.name == "random kills" else one for one in drills
    ]


def _build_kill_drills() -> list[CrashDrill]:
    ranks = [(1, 2), (2, 1), (2, 4), (1, 1)]
    found = []
    for number, point in enumerate(FAULT_POINTS):
        before, after = ranks[number % len(ranks)]
        count = {"in an evaluation": 2, "before a save": 2, "removing an older one": 1}.get(point, 3)
        promise = "a rank killed there loses nothing"
        fault = Fault(point, count, rank=before - 1 if FAULT_POINTS[point].module.endswith("engine") else 0)
        found.append(CrashDrill(f"killed {point}", promise, build_fault_drill(fault, before, after)))
        if FAULT_POINTS[point].module in ("llmsys.train.checkpoint_write", "llmsys.train.checkpoint_retention"):
            name = f"killed {point} in the background"
            found.append(
                CrashDrill(name, promise, build_fault_drill(Fault(point, min(count, 2)), after, before), "async")
            )
    return found


DRILLS = (
    *_build_kill_drills(),
    CrashDrill(
        "a truncated shard",
        "the checkpoint before it is taken",
        build_damage_drill(fault_injection.truncate_largest_file),
    ),
    CrashDrill("a flipped bit", "the checkpoint before it is taken", build_damage_drill(fault_injection.flip_bit)),
    CrashDrill(
        "a lost file", "the checkpoint before it is taken", build_damage_drill(fault_injection.delete_largest_file)
    ),
    CrashDrill(
        "a damaged record", "the checkpoint before it is taken", build_damage_drill(fault_injection.truncate_record)
    ),
    CrashDrill(
        "a lost checkpoint",
        "the checkpoint before it is taken",
        build_damage_drill(fault_injection.delete_newest_checkpoint),
    ),
    CrashDrill("a full disk", "a message, and no harm to what was saved", drill_full_disk),
    CrashDrill("a stalled rank", "it is named, with stacks", drill_stalled_rank),
    CrashDrill("asked to stop", "a checkpoint is saved first", drill_sigterm),
    CrashDrill("random kills", "killed again and again at any time", build_random_kill_drill(8)),
)
