"""A sequence-length curriculum: the same tokens and targets in shorter rows, by tokens trained;
steps stay exact.
"""

from pathlib import Path

import pytest
import torch

from llmsys.config.batch import BatchConfig
from llmsys.config.loading.load import load_run_config
from llmsys.errors import ConfigError
from llmsys.estimate.cluster_costs import ClusterCosts
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.run_cost import PricingRequest, count_full_steps
from llmsys.estimate.step_time import estimate_step_time
from llmsys.train.build_objective import build_step_batches
from tests.helpers.dataset import VOCABULARY, make_dataset

STAGES = (
    "batch.length_stages=[{until_tokens: 200, sequence_length: 8}, {until_tokens: 500, "
    "sequence_length: 16}]"
)
BATCH = ["batch.sequence_length=32", "batch.sequences=4", "train.precision=fp32", "layout.expert=1"]


def test_the_length_is_a_function_of_the_tokens_before_a_step() -> None:
    stages = [
        {"until_tokens": 200, "sequence_length": 8},
        {"until_tokens": 500, "sequence_length": 16},
    ]
    batch = BatchConfig.model_validate(
        {"sequence_length": 32, "sequences": 4, "length_stages": stages}
    )
    # Steps of 128 tokens: 0 and 128 are before 200; 256 and 384 before 500.
    assert [batch.get_step_length(step) for step in range(6)] == [8, 8, 16, 16, 32, 32]
    assert BatchConfig(sequence_length=32).get_step_length(0) == 32


def test_rows_of_a_stage_hold_the_tokens_of_the_whole_windows(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "data")
    settings = [
        *BATCH,
        f"data.folder={folder}",
        f"model.vocab_size={VOCABULARY}",
        "tokenizer.vocab_size=300",
    ]
    plain = build_step_batches(load_run_config("train/demo", settings), 1, 0)
    config = load_run_config("train/demo", [*settings, STAGES])
    for step, length in enumerate([8, 8, 16, 16, 32]):
        [whole], parts = plain.get_micro_batches(step), []
        for rank in range(2):  # and on two ranks
            parts += build_step_batches(config, 2, rank).get_micro_batches(step)
        for name in ("tokens_BT", "targets_BT", "documents_BT"):
            found = torch.cat([getattr(one, name) for one in parts])
            assert found.shape == (128 // length, length)
            assert torch.equal(found.flatten(), getattr(whole, name).flatten())
        assert sum(one.num_valid_targets for one in parts) == whole.num_valid_targets
        assert build_step_batches(config, 1, 0).get_step_metrics(step)["sequence_length"] == length
    assert config.num_steps == load_run_config("train/demo", settings).num_steps
    assert len(config.trajectory_settings["batch"]["length_stages"]) == 2


def test_hours_count_short_steps_by_their_own_time() -> None:
    long = [
        "batch.sequence_length=8192",
        "batch.sequences=64",  # their kernels outlast the host's work for tiny blocks
        "model.max_position_embeddings=8192",
        "train.tokens=100_000_000",
        "layout.expert=2",
    ]
    plain = load_run_config("train/demo", long)
    staged = load_run_config(
        "train/demo",
        [*long, "batch.length_stages=[{until_tokens: 50_000_000, sequence_length: 512}]"],
    )
    asked = PricingRequest(load_device_profile("h100-sxm"), ClusterCosts(), 2)
    step = estimate_step_time(plain, asked.resolve_layout(plain), asked.device)
    total = plain.num_steps
    assert count_full_steps(plain, step, asked.device, asked.resolve_layout, (), 1.0) == total
    counted = count_full_steps(staged, step, asked.device, asked.resolve_layout, (), 1.0)
    assert total / 2 < counted < total
    # of the shorter steps
    assert count_full_steps(staged, step, asked.device, asked.resolve_layout, (), 3.0) > counted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch.length_stages=[{until_tokens: 9, sequence_length: 12}]"],
            "12 is no part of sequence_length=32. Use"),
        (["batch.length_stages=[{until_tokens: 9, sequence_length: 32}]"],
            "32 is no part of sequence_length=32"),
        (["batch.length_stages=[{until_tokens: 9, sequence_length: 16}, {until_tokens: 20, "
        "sequence_length: 8}]"],
         "8 until 20 is not longer and later than the stage before"),
        ([STAGES, "batch.packing=best_fit"], "packing=best_fit keeps documents whole in windows"),
        ([STAGES, "layout.pipeline=2"], "pipeline=2 expects rows of one length"),
    ],
)  # fmt: skip
def test_stages_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config("train/demo", [*BATCH, *words])
