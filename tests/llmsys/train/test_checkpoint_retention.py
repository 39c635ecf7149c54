"""Which checkpoints stay: the last, every so many steps, the best; and what a killed removal
leaves is put right.
"""

from pathlib import Path

import pytest

from llmsys.config.checkpoint import CheckpointConfig
from llmsys.config.loading.load import load_run_config
from llmsys.errors import ConfigError
from llmsys.train.checkpoint_record import read_record
from llmsys.train.checkpoint_retention import remove_old_checkpoints, select_kept_steps
from llmsys.train.checkpoint_write import remove_partial_checkpoints
from tests.helpers.interrupted_saves import publish_empty_checkpoint

STEPS = range(100, 1100, 100)
SCORES = {step: abs(step - 450) / 100 for step in STEPS}  # 400 and 500 are best, and equal


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"keep_last": 2}, {900, 1000}),
        ({"keep_last": 1, "keep_every_steps": 300}, {300, 600, 900, 1000}),
        ({"keep_last": 1, "keep_best": 1}, {500, 1000}),
        ({"keep_last": 1, "keep_best": 3}, {400, 500, 600, 1000}),
        ({"keep_last": 1, "keep_best": 1, "best_metric": "accuracy"}, {1000}),
        ({"keep_last": 2, "keep_best": 1, "keep_every_steps": 800}, {500, 800, 900, 1000}),
    ],
)
def test_what_any_rule_keeps_is_kept(rule: dict[str, object], expected: set[int]) -> None:
    assert select_kept_steps(STEPS, SCORES, CheckpointConfig.model_validate(rule)) == expected


def test_removing_as_one_saves_keeps_what_removing_at_the_end_would(tmp_path: Path) -> None:
    rule = CheckpointConfig(keep_last=2, keep_best=2, keep_every_steps=500)
    for step in STEPS:
        publish_empty_checkpoint(tmp_path, step, SCORES[step])
        remove_old_checkpoints(tmp_path, rule)
    left = {int(path.name.removeprefix("step-")) for path in tmp_path.iterdir()}
    assert left == select_kept_steps(STEPS, SCORES, rule) == {400, 500, 900, 1000}


def test_a_checkpoint_without_an_evaluation_is_never_the_best(tmp_path: Path) -> None:
    for step, score in ((100, 2.0), (200, None), (300, None)):
        publish_empty_checkpoint(tmp_path, step, score)
    remove_old_checkpoints(tmp_path, CheckpointConfig(keep_last=1, keep_best=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000100", "step-00000300"]


def test_a_save_killed_between_its_two_renames_gives_the_old_one_back(tmp_path: Path) -> None:
    old = publish_empty_checkpoint(tmp_path, 100, 1.0)
    old.rename(tmp_path / ".step-00000100.replaced")
    (tmp_path / ".step-00000100.partial").mkdir()
    (tmp_path / ".step-00000050.removed").mkdir()
    remove_partial_checkpoints(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000100"]
    assert read_record(old)["evaluation"] == {"loss": 1.0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["checkpoint.keep_every_steps=70"],
            "70 is not a multiple of checkpoint.every_steps=50.*keep_every_steps=50",
        ),
        (
            ["checkpoint.keep_best=2", "evaluation.every_steps=0"],
            "2 best checkpoints need an evaluation of each checkpoint",
        ),
        (
            ["checkpoint.keep_best=2", "evaluation.every_steps=40"],
            "evaluation.every_steps=40 does not divide",
        ),
        (
            ["train.spike_detection.max_grad_norm_ratio=0.5"],
            r"0\.5 times the median would skip ordinary steps\. Use more than 1",
        ),
    ],
)
def test_rules_that_cannot_hold_are_refused_by_name(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_run_config("train/demo", words)
