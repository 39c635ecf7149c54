"""The running EMA of the weights: its formula, what is evaluated and saved with it, and that no
layout changes it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.convert.checkpoint_stream import CheckpointReader
from llmsys.convert.conversion_plan import TensorPart
from llmsys.engine.ema_engine import EmaEngine
from llmsys.model.local_tensor import get_local_tensor
from llmsys.train import checkpoint_load
from llmsys.train.expert_load import update_expert_balance
from llmsys.train.trained_model import _load_model
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    STEPS,
    build_engine,
    gather_full_state,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import LENGTH, SEQUENCES, build_tiny_config

HALF_LIFE = 200


def averaged(layout: ParallelLayout) -> EmaEngine:
    return EmaEngine(build_engine("torch", layout, 0.0, 1), HALF_LIFE)


def snapshot(engine: EmaEngine) -> dict[str, Any]:
    """The whole state as it is now: on one rank the arrays would be the living ones."""
    return {name: value.copy() for name, value in gather_full_state(engine).items()}


def trained(rank: int, folder: str) -> dict[str, Any]:
    world_size = torch.distributed.get_world_size()
    engine = averaged(ParallelLayout(expert=2) if world_size > 1 else ParallelLayout())
    weights, targets = [snapshot(engine)], []
    probe = select_rank_batches(0, rank, world_size, 1)[0]
    for step in range(STEPS):
        targets.append(
            engine.train_step(select_rank_batches(step, rank, world_size, 1), LEARNING_RATE).targets
        )
        update_expert_balance(engine.module)
        # puts the mean into the model, and the next step must take it out again
        engine.compute_logits(probe)
        weights.append(snapshot(engine))
    # A step that is repeated to look for damage has the weights of the step, whatever was evaluated
    # before it.
    engine.compute_logits(probe)
    engine.repeat_gradients(select_rank_batches(9, rank, world_size, 1), rank)
    held = {
        name: get_local_tensor(parameter).detach().clone()
        for name, parameter in engine.module.named_parameters()
    }
    tensors = engine.get_state().tensors
    assert all(
        torch.equal(value, get_local_tensor(tensors[f"parameter/{name}"]))
        for name, value in held.items()
    )
    refused = engine.train_step(
        select_rank_batches(9, rank, world_size, 1), LEARNING_RATE, lambda loss, norm: False
    )
    assert not refused.is_applied
    after = snapshot(engine)
    assert all(np.array_equal(after[name], value) for name, value in weights[-1].items()), (
        "a refused step moves nothing"
    )
    logits = engine.compute_logits(probe).detach().numpy()
    found = save_checkpoint(engine, Path(folder), {}, 1)
    again = averaged(ParallelLayout())
    checkpoint_load.load_checkpoint(again, found)
    loaded = snapshot(again)
    assert all(
        np.array_equal(loaded[name], value)
        for name, value in after.items()
        if name.startswith("average/")
    )
    np.testing.assert_allclose(again.compute_logits(probe).detach().numpy(), logits, atol=1e-5)
    return {"weights": weights, "targets": targets, "checkpoint": str(found)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return {
        ranks: run_ranks(trained, ranks, str(tmp_path_factory.mktemp(f"on-{ranks}")))[0]
        for ranks in (1, 2)
    }


@pytest.mark.distributed
def test_the_mean_forgets_half_after_its_half_life(runs: dict[int, dict[str, Any]]) -> None:
    weights, targets = runs[1]["weights"], runs[1]["targets"]
    assert targets[0] == SEQUENCES * LENGTH - LENGTH
    for name in (name for name in weights[0] if name.startswith("parameter/")):
        mean = weights[0][name].astype(np.float64)
        for step, count in enumerate(targets, 1):
            kept = 0.5 ** (count / HALF_LIFE)
            mean = kept * mean + (1 - kept) * weights[step][name]
        found = weights[-1][name.replace("parameter/", "average/")]
        np.testing.assert_allclose(found, mean, atol=1e-6)
        assert not np.allclose(found, weights[-1][name], atol=1e-6), f"{name} is its own mean"


@pytest.mark.distributed
def test_two_ranks_keep_the_same_mean_as_one(runs: dict[int, dict[str, Any]]) -> None:
    one, two = runs[1]["weights"][-1], runs[2]["weights"][-1]
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, atol=2e-4)


@pytest.mark.distributed
def test_what_is_used_of_a_checkpoint_is_the_mean(runs: dict[int, dict[str, Any]]) -> None:
    """Evaluation and generation read it, and so does the conversion to other formats."""
    found, weights = Path(runs[2]["checkpoint"]), runs[2]["weights"][-1]
    config = RunConfig.model_validate(
        {
            "model": build_tiny_config(),
            "train": {"precision": "fp32"},
            "batch": {"sequence_length": LENGTH},
        }
    )
    for name, parameter in _load_model(config, found).named_parameters():
        assert np.array_equal(parameter.detach().numpy(), weights[f"average/{name}"]), name
    name = "blocks.0.attention.q_proj.weight"
    part = TensorPart(f"parameter/{name}", weights[f"parameter/{name}"].shape)
    assert np.array_equal(CheckpointReader(found).read(part).numpy(), weights[f"average/{name}"])
