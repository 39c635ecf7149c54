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
from llmsys.doctor import accident as accidents
from llmsys.doctor.accident import MOMENTS, Accident
from llmsys.doctor.attempt import attempt
from llmsys.doctor.toy_data import STEPS, make_toy_data, toy_config
from llmsys.events import latest_events
from llmsys.train.checkpoint_record import read_record

STOPPED, HUNG = 75, 4
MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class Drill:
    """A name, what is promised, and what is done to a run in a folder; gives what to say, or raises AssertionError."""

    name: str
    promise: str
    perform: Callable[[RunConfig], str]
    mode: str = "sync"


@dataclass(frozen=True)
class Drilled:
    """What became of a drill."""

    name: str
    passed: bool
    text: str
    seconds: float

    def as_data(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def run_drills(drills: Sequence[Drill], told: Callable[[Drilled], None]) -> list[Drilled]:
    """Each drill in a folder of its own, over one dataset, against one calm run."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="llmsys-drill-") as scratch:
        root = Path(scratch)
        make_toy_data(root / "data")
        calm = final_hash(finished(_config(root, "calm", "sync"), ranks=1))
        for number, drill in enumerate(drills):
            outcomes.append(_one(drill, _config(root, f"drill-{number}", drill.mode), calm))
            told(outcomes[-1])
    return outcomes


def _config(root: Path, name: str, mode: str) -> RunConfig:
    folder = root / name
    folder.mkdir()
    return toy_config(folder, data={"folder": root / "data"}, checkpoint={"mode": mode}, run={"folder": folder / "run"})


def _one(drill: Drill, config: RunConfig, calm: str) -> Drilled:
    began = time.monotonic()
    try:
        said = drill.perform(config)
        found = final_hash(config)
        if found != calm:
            return Drilled(drill.name, False, f"ended in state {found}, a calm run in {calm}", _since(began))
        return Drilled(drill.name, True, said, _since(began))
    except AssertionError as failed:
        return Drilled(drill.name, False, f"{failed}. {_last_words(config)}", _since(began))


def _since(began: float) -> float:
    return round(time.monotonic() - began, 2)


def _last_words(config: RunConfig) -> str:
    path = config.run.folder.parent / "output.txt"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return f"Its last words: {lines[-1]}" if lines else ""


def final_hash(config: RunConfig) -> str:
    """The hash of the state that the run ended with; AssertionError when it has not ended."""
    target = config.run.folder / "checkpoints" / f"step-{STEPS:08d}"
    assert target.is_dir(), f"the run has no checkpoint of step {STEPS}"
    return str(read_record(target)["state_hash"])


def finished(config: RunConfig, ranks: int) -> RunConfig:
    """Start the run again until it is done, as a person or a scheduler would."""
    for _ in range(MOST_ATTEMPTS):
        statuses = attempt(config, ranks)
        if not any(statuses):
            return config
    raise AssertionError(f"started {MOST_ATTEMPTS} times and never done, last with statuses {statuses}")


# --- What is done ---


def struck(accident: Accident, before: int, after: int) -> Callable[[RunConfig], str]:
    """Train on `before` ranks until the accident, then on `after` ranks to the end."""

    def perform(config: RunConfig) -> str:
        statuses = attempt(config, before, accident)
        assert any(statuses), "nothing happened: the moment was never reached"
        steps = sorted(path.name for path in (config.run.folder / "checkpoints").glob("step-*"))
        finished(config, after)
        return f"went on from {steps[-1] if steps else 'the start'}, {before} → {after} processes"

    return perform


def damaged(damage: Callable[[Path], None]) -> Callable[[RunConfig], str]:
    """Stop a run in the middle, damage its newest checkpoint, and train on."""

    def perform(config: RunConfig) -> str:
        attempt(config, 1, Accident("before the backward pass", STEPS - 2))
        harmed = accidents.newest(config.run.folder).name
        damage(config.run.folder)
        finished(config, 2)
        resumed = [
            e["resumed_from"] for e in latest_events(config.run.folder / "events.jsonl") if e["event"] == "start"
        ]
        return f"passed over {harmed}, went on from step {resumed[-1]}"

    return perform


def full_disk(config: RunConfig) -> str:
    """Every save fails from the second on; the run ends with a message, and goes on when there is room again."""
    statuses = attempt(config, 1, Accident("before a save", 2, "full_disk"))
    assert statuses == [2], f"a full disk ended with status {statuses[0]}, and not with a message"
    finished(config, 2)
    return "ended with a message, and went on when there was room"


def stalled(config: RunConfig) -> str:
    """One rank stops; the others must name it and end."""
    statuses = attempt(config, 2, Accident("before the backward pass", 4, "stop", rank=1))
    assert statuses[0] == HUNG, f"rank 0 left with status {statuses[0]}, and not with {HUNG} for a rank that hangs"
    output = (config.run.folder.parent / "output.txt").read_text(errors="replace")
    assert "rank 1" in output, "nobody named the rank that hung"
    stacks = list((config.run.folder / "heartbeats").glob("*.stacks"))
    assert any(path.stat().st_size for path in stacks), "no stacks were written"
    finished(config, 2)
    return "rank 1 was named, with stacks, and the run went on"


def asked_to_stop(config: RunConfig) -> str:
    """SIGTERM in the middle: a checkpoint, a status that says start me again."""

    def ask(processes: list[BaseProcess]) -> None:
        _wait_for_step(config, 3)
        for process in processes:
            if process.pid is not None and process.is_alive():
                _send(process, signal.SIGTERM)

    statuses = attempt(config, 2, meanwhile=ask)
    assert set(statuses) == {STOPPED}, f"statuses {statuses}, and not {STOPPED} on both ranks"
    saved = accidents.newest(config.run.folder).name
    finished(config, 1)
    return f"saved {saved} on the way out"


def random_kills(count: int, seed: int = 0) -> Callable[[RunConfig], str]:
    """Kill whatever runs, at any time, so many times in a row; ranks change from start to start."""

    def perform(config: RunConfig) -> str:
        choose = random.Random(seed)
        longest = _time_of(lambda: attempt(config, 1, Accident("before a save", 1)))
        kills = done = 0
        while kills < count:
            ranks = choose.choice((1, 2))

            def kill(processes: list[BaseProcess]) -> None:
                time.sleep(choose.uniform(0, longest * 1.5))
                for process in processes:
                    _send(process, signal.SIGKILL)

            statuses = attempt(config, ranks, meanwhile=kill)
            kills += any(status == -signal.SIGKILL for status in statuses)
            done += not any(statuses)
            assert done < 20 * count, "the run ends faster than it can be killed"
            if done and not any(statuses):
                _begin_again(config)
        finished(config, 2)
        return f"{kills} kills in a row"

    return perform


def _begin_again(config: RunConfig) -> None:
    """A run that got to its end before the next kill is set back to its oldest checkpoint."""
    for path in sorted((config.run.folder / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)


def _time_of(work: Callable[[], Any]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _send(process: BaseProcess, number: int) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _wait_for_step(config: RunConfig, step: int) -> None:
    path, deadline = config.run.folder / "events.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and any(e["event"] == "step" and e["step"] >= step for e in latest_events(path)):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in 60 s")


def with_kills(drills: Sequence[Drill], count: int) -> list[Drill]:
    """The drills, the one of random kills with so many of them."""
    return [replace(one, perform=random_kills(count)) if one.name == "random kills" else one for one in drills]


def _kills() -> list[Drill]:
    ranks = [(1, 2), (2, 1), (2, 4), (1, 1)]
    found = []
    for number, moment in enumerate(MOMENTS):
        before, after = ranks[number % len(ranks)]
        count = {"in an evaluation": 2, "before a save": 2, "removing an older one": 1}.get(moment, 3)
        promise = "a rank killed there loses nothing"
        accident = Accident(moment, count, rank=before - 1 if MOMENTS[moment].module.endswith("engine") else 0)
        found.append(Drill(f"killed {moment}", promise, struck(accident, before, after)))
        if MOMENTS[moment].module in ("llmsys.train.checkpoint_write", "llmsys.train.retention"):
            name = f"killed {moment} in the background"
            found.append(Drill(name, promise, struck(Accident(moment, min(count, 2)), after, before), "async"))
    return found


DRILLS = (
    *_kills(),
    Drill("a truncated shard", "the checkpoint before it is taken", damaged(accidents.truncate)),
    Drill("a flipped bit", "the checkpoint before it is taken", damaged(accidents.flip_byte)),
    Drill("a lost file", "the checkpoint before it is taken", damaged(accidents.lose_file)),
    Drill("a damaged record", "the checkpoint before it is taken", damaged(accidents.damage_record)),
    Drill("a lost checkpoint", "the checkpoint before it is taken", damaged(accidents.lose_checkpoint)),
    Drill("a full disk", "a message, and no harm to what was saved", full_disk),
    Drill("a stalled rank", "it is named, with stacks", stalled),
    Drill("asked to stop", "a checkpoint is saved first", asked_to_stop),
    Drill("random kills", "killed again and again at any time", random_kills(8)),
)
