"""Checkpoints by the clock: rank 0 decides, all ranks follow, and no bit of a run changes."""

import json
import shutil
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import is_initialized

from llmsys.doctor.toy_dataset import build_toy_config, write_toy_dataset
from llmsys.errors import ConfigError
from llmsys.parallel.process_group import get_rank
from llmsys.train.build_trainer import train_run
from llmsys.train.checkpoint_record import list_checkpoints
from llmsys.train.save_timer import SaveTimer
from tests.helpers.ranks import run_ranks

# (seconds between two readings of the clock, by rank)
TICKS = (10.0, 1000.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_minutes_begin_anew_with_each_checkpoint() -> None:
    clock = Clock()
    timer = SaveTimer(2.0, clock)
    clock.now += 119
    assert timer.to_flag() == 0.0
    clock.now += 1
    assert timer.to_flag() == 1.0
    timer.is_due = True
    timer.restart()
    assert timer.to_flag() == 0.0
    assert not timer.is_due
    clock.now += 120
    assert timer.to_flag() == 1.0


def test_without_minutes_no_checkpoint_is_due() -> None:
    clock = Clock()
    timer = SaveTimer(0.0, clock)
    clock.now += 1e9
    assert timer.to_flag() == 0.0


def train_timed(rank: int, folder: Path, changes: dict[str, Any]) -> list[int]:
    """Train with a clock that each rank has for itself; return the steps of all checkpoints."""
    readings = count()
    patch = pytest.MonkeyPatch()
    patch.setattr(
        "llmsys.train.build_trainer.SaveTimer",
        lambda minutes: SaveTimer(minutes, lambda: TICKS[get_rank()] * next(readings)),
    )
    if is_initialized():  # of several ranks, whose group `run_ranks` has made
        patch.setattr("llmsys.train.build_trainer.init_process_group", lambda *_: nullcontext())
    config = build_toy_config(folder, **changes)
    train_run(config, lambda *_: [])
    patch.undo()
    return sorted(list_checkpoints(config.run.folder / "checkpoints"))


@pytest.mark.distributed
def test_ranks_save_at_the_minutes_of_rank_0_and_resume_bit_for_bit(tmp_path: Path) -> None:
    write_toy_dataset(tmp_path / "data")
    calm = {"run": {"folder": tmp_path / "calm"}}
    train_timed(0, tmp_path, calm)
    timed = {
        "run": {"folder": tmp_path / "timed"},
        # Six readings of rank 0, one of them by the save before; step 5 has a save of its own.
        "checkpoint": {"every_minutes": 0.5, "every_steps": 5, "keep_last": 20},
    }
    folder = tmp_path / "timed" / "checkpoints"
    saved = run_ranks(train_timed, 2, tmp_path, timed)
    assert saved[0] == saved[1] == [3, 5, 8, 10, 12]
    for step in (8, 10, 12):
        shutil.rmtree(folder / f"step-{step:08d}")
    train_timed(0, tmp_path, timed)
    records = [
        json.loads((tmp_path / run / "checkpoints" / "step-00000012" / "state.json").read_text())
        for run in ("calm", "timed")
    ]
    assert records[0]["state_hash"] == records[1]["state_hash"]


def test_averages_of_checkpoints_at_any_distance_are_refused(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ValueError), match=r"1\.5 saves at steps of any distance"):
        build_toy_config(tmp_path, checkpoint={"every_minutes": 1.5, "average_last": 2})
