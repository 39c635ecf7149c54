"""The mean of checkpoints is the plain mean of their tensors, made once, and refused where it
cannot be.
"""

from pathlib import Path

import pytest
import torch

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.config.run import RunConfig
from llmsys.errors import CheckpointError, ConfigError
from llmsys.train.checkpoint_average import average_checkpoints, require_enough_saves
from llmsys.train.checkpoint_load import load_tensors
from llmsys.train.checkpoint_write import publish_weights, save_tensors

NAMES = ("parameter/embed.weight", "parameter/blocks.0.attention.q_proj.weight", "buffer/counter")


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    made = {name: torch.randn(5, 3, generator=generator) for name in NAMES[:2]}
    moments = {name.replace("parameter", "first_moment"): torch.ones(5, 3) for name in NAMES[:2]}
    return made | moments | {NAMES[2]: torch.tensor(step)}


def run_folder(folder: Path, steps: range) -> Path:
    for step in steps:
        publish_weights(
            folder / "checkpoints",
            lambda at, s=step: save_tensors(tensors(s), at),
            step,
            {"seed": 1},
        )
    return folder


def test_the_average_is_the_plain_mean_of_the_last(tmp_path: Path) -> None:
    found = average_checkpoints(run_folder(tmp_path, range(10, 80, 10)), 5)
    assert found == tmp_path / "averaged" / "step-00000070"
    mean = {name: torch.empty(5, 3) for name in NAMES[:2]} | {NAMES[2]: torch.tensor(0)}
    load_tensors(mean, found)
    for name in NAMES[:2]:
        plain = torch.stack([tensors(step)[name].double() for step in range(30, 80, 10)]).mean(0)
        assert torch.equal(mean[name], plain.float())
    assert mean[NAMES[2]] == 70
    with pytest.raises(CheckpointError, match=r"moment/embed\.weight is missing"):
        load_tensors({"first_moment/embed.weight": torch.empty(5, 3)}, found)


def test_an_average_is_made_once_and_again_when_a_checkpoint_changed(tmp_path: Path) -> None:
    run_folder(tmp_path, range(10, 40, 10))
    record = average_checkpoints(tmp_path, 3) / "state.json"
    before = record.stat().st_mtime_ns
    assert average_checkpoints(tmp_path, 3) == record.parent
    assert record.stat().st_mtime_ns == before
    run_folder(tmp_path, range(30, 40, 10))
    publish_weights(tmp_path / "checkpoints", lambda at: save_tensors(tensors(99), at), 30)
    average_checkpoints(tmp_path, 3)
    assert record.stat().st_mtime_ns != before


def test_a_budget_with_too_few_saves_is_refused_before_training() -> None:
    settings = {
        "train": {"tokens": 500 * 32 * 512},
        "checkpoint": {"every_steps": 125, "keep_last": 5, "average_last": 5},
    }
    config = RunConfig.model_validate(
        {"batch": {"sequences": 32, "sequence_length": 512}, **settings}
    )
    steps = (
        r"average_last=5 needs as many checkpoints, and 500 steps with checkpoint.every_steps=125 "
        r"save 4. "
    )
    with pytest.raises(ConfigError, match=f"{steps}Use checkpoint.every_steps=100 or less"):
        require_enough_saves(config)
    require_enough_saves(
        config.model_copy(
            update={"checkpoint": CheckpointConfig(every_steps=124, keep_last=5, average_last=5)}
        )
    )


def test_too_few_and_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    run_folder(tmp_path, range(10, 40, 10))
    with pytest.raises(
        CheckpointError,
        match=r"has 3 checkpoints, and checkpoint.average_last=5 of them are needed",
    ):
        average_checkpoints(tmp_path, 5)
    damaged = tmp_path / "checkpoints" / "step-00000020" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"X")
    with pytest.raises(
        CheckpointError, match=r"step-00000020 cannot be averaged: __0_0\.distcp is damaged"
    ):
        average_checkpoints(tmp_path, 3)
