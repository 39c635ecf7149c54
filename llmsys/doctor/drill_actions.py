"""Actions of crash drills: train a run, disturb it with a kill, a stop, a signal or damage, and
train on.

Every action takes the config of a run and returns a message. It raises AssertionError when the run
breaks its promise.
"""

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.doctor.fault_injection import Fault, get_newest_checkpoint_folder, run_attempt
from llmsys.doctor.toy_dataset import STEPS
from llmsys.events import read_latest_events

STOPPED, HUNG = 75, 4  # exit statuses of a run that saved and stopped, and of one that hung
MAX_ATTEMPTS = 4


def run_until_finished(config: RunConfig, ranks: int) -> RunConfig:
    """Start the run again until it is finished, as a person or a scheduler would.

    Raises:
        AssertionError: it did not finish in `MAX_ATTEMPTS`.
    """
    for _ in range(MAX_ATTEMPTS):
        statuses = run_attempt(config, ranks)
        if not any(statuses):
            return config
    raise AssertionError(
        f"started {MAX_ATTEMPTS} times without finishing, last with statuses {statuses}"
    )


def build_fault_drill(fault: Fault, before: int, after: int) -> Callable[[RunConfig], str]:
    """Return a drill that trains on `before` ranks until the fault, then on `after` ranks to the
    end.
    """

    def train_through_fault(config: RunConfig) -> str:
        statuses = run_attempt(config, before, fault)
        assert any(statuses), "no fault was injected: the fault point was not reached"
        steps = sorted(path.name for path in (config.run.folder / "checkpoints").glob("step-*"))
        run_until_finished(config, after)
        return f"resumed from {steps[-1] if steps else 'the start'}, {before} → {after} processes"

    return train_through_fault


def build_damage_drill(damage: Callable[[Path], None]) -> Callable[[RunConfig], str]:
    """Return a drill that stops a run in the middle, damages its newest checkpoint, and trains
    on.
    """

    def damage_and_resume(config: RunConfig) -> str:
        # a save comes every second step, so older ones are there to fall back on
        run_attempt(config, 1, Fault("before the backward pass", STEPS - 2))
        harmed = get_newest_checkpoint_folder(config.run.folder).name
        damage(config.run.folder)
        run_until_finished(config, 2)
        resumed = [
            e["resumed_from"]
            for e in read_latest_events(config.run.folder / "events.jsonl")
            if e["event"] == "start"
        ]
        return f"skipped {harmed}, resumed from step {resumed[-1]}"

    return damage_and_resume


def drill_full_disk(config: RunConfig) -> str:
    """Make every save fail from the second on: the run must end with a message, and continue
    once there is space.
    """
    statuses = run_attempt(config, 1, Fault("before a save", 2, "full_disk"))
    assert statuses == [2], f"a full disk ended with status {statuses[0]} and without a message"
    run_until_finished(config, 2)
    return "ended with a message, and resumed once space was free"


def drill_stalled_rank(config: RunConfig) -> str:
    """Stop one rank: the others must name it and exit."""
    statuses = run_attempt(config, 2, Fault("before the backward pass", 4, "stop", rank=1))
    assert statuses[0] == HUNG, (
        f"rank 0 exited with status {statuses[0]} instead of {HUNG} for a hang"
    )
    output = (config.run.folder.parent / "output.txt").read_text(errors="replace")
    assert "rank 1" in output, "the hanging rank was not named"
    stacks = list((config.run.folder / "heartbeats").glob("*.stacks"))
    assert any(path.stat().st_size for path in stacks), "no stacks were written"
    run_until_finished(config, 2)
    return "rank 1 was named, with stacks, and the run resumed"


def drill_sigterm(config: RunConfig) -> str:
    """Send SIGTERM during training: the run must save a checkpoint and exit with the status that
    asks for a restart.
    """

    def send_sigterm(processes: list[BaseProcess]) -> None:
        _wait_for_step(config, 3)
        for process in processes:
            _send_signal(process, signal.SIGTERM)

    statuses = run_attempt(config, 2, meanwhile=send_sigterm)
    assert set(statuses) == {STOPPED}, f"statuses {statuses} instead of {STOPPED} on both ranks"
    saved = get_newest_checkpoint_folder(config.run.folder).name
    run_until_finished(config, 1)
    return f"saved {saved} before exiting"


def build_random_kill_drill(count: int, seed: int = 0) -> Callable[[RunConfig], str]:
    """Return a drill that kills all ranks at random times, `count` times in a row; the number of
    ranks changes.
    """

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
            # The run finished before the kill: start from an older state to be killed again.
            if done and not any(statuses):
                _reset_to_oldest_checkpoint(config)
        run_until_finished(config, 2)
        return f"{kills} kills in a row"

    return kill_repeatedly


def _reset_to_oldest_checkpoint(config: RunConfig) -> None:
    """Reset a run that finished before the next kill to its oldest checkpoint."""
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
        if path.exists() and any(
            e["event"] == "step" and e["step"] >= step for e in read_latest_events(path)
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in 60 s")
