"""Adafactor and SOAP take one process's steps in every layout, and continue with the same bits
from their state.
"""

from typing import Any

import numpy as np
import pytest
import torch

from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdafactorConfig, OptimizerConfig, SoapConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.engine.torch_engine import TorchEngine
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.parity_runs import gather_full_state, select_rank_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_tiny_config

RATE, STEPS = 1e-2, 3
LAYOUTS = {
    "shard=4": ParallelLayout(),
    "expert=2": ParallelLayout(expert=2),
    "tensor=2": ParallelLayout(tensor=2),
}
# A large eps: the basis of a gradient's null space is arbitrary, and a rounding error there is no
# direction.
OPTIMIZERS: tuple[OptimizerConfig, ...] = (
    AdafactorConfig(learning_rate=RATE, max_grad_norm=0),
    SoapConfig(learning_rate=RATE, max_grad_norm=0, eps=0.1, precondition_every_steps=1),
)


def build(layout: ParallelLayout, optimizer: OptimizerConfig) -> TorchEngine:
    with torch.device("meta"):
        model = Transformer(build_tiny_config())
    return TorchEngine(
        model, meshes=build_device_meshes(layout, torch.device("cpu")), optimizer=optimizer,
        loss=build_training_loss(LossConfig()), compute_dtype=torch.float32, seed=7,
        device=torch.device("cpu"),
    )  # fmt: skip


def train(engine: TorchEngine, layout: ParallelLayout, rank: int, steps: range) -> None:
    for step in steps:
        batches = select_rank_batches(
            step, layout.get_data_rank(rank), layout.data_parallel_size, 1
        )
        engine.train_step(batches, RATE)
        update_expert_balance(engine.module)


def run(rank: int, labels: tuple[str, ...]) -> list[dict[str, dict[str, Any]]]:
    found = []
    for optimizer in OPTIMIZERS:
        states = {}
        for label in labels:
            layout = LAYOUTS[label].resolve(torch.distributed.get_world_size(), build_tiny_config())
            engine = build(layout, optimizer)
            train(engine, layout, rank, range(STEPS - 1))
            resumed = build(layout, optimizer)
            resumed.load_state(engine.get_state())
            for one in (engine, resumed):
                train(one, layout, rank, range(STEPS - 1, STEPS))
            states[label], again = gather_full_state(engine), gather_full_state(resumed)
            assert all(
                np.array_equal(again[name], value) for name, value in states[label].items()
            ), label
        found.append(states)
    return found


@pytest.mark.distributed
def test_layouts_agree_with_one_process_and_a_loaded_state_continues_with_the_same_bits() -> None:
    alone, split = (
        run_ranks(run, 1, ("shard=4",))[0],
        run_ranks(run, 4, ("expert=2", "tensor=2"))[0],
    )
    for optimizer, expected, found in zip(OPTIMIZERS, alone, split, strict=True):
        oracle = expected["shard=4"]
        compared = (
            ("parameter/",)
            if optimizer.kind == "soap"
            else ("parameter/", "row_moment/", "column_moment/")
        )
        for label, state in found.items():
            assert state.keys() == oracle.keys(), label
            for name in filter(lambda one: one.startswith(compared), oracle):
                apart = np.abs(state[name] - oracle[name]).max()
                assert apart < 2e-3 * max(RATE, np.abs(oracle[name]).max()), (
                    f"{optimizer.kind}, {label}: {name}"
                )
    assert any(
        name.startswith("left_basis_moment/") and "experts" in name for name in alone[1]["shard=4"]
    )
