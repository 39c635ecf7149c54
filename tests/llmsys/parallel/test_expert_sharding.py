"""Few experts on many ranks: even shards, the steps of one process, and checkpoints that any
layout continues.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmsys.config.expert_sharding import select_shard_dim
from llmsys.config.loading.load import load_model_config
from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdamWConfig, MuonConfig, OptimizerConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.engine.ema_engine import EmaEngine
from llmsys.engine.torch_engine import TorchEngine
from llmsys.estimate.model_tensors import list_model_tensors
from llmsys.estimate.rank_parameters import count_local_elements
from llmsys.model.transformer import Transformer
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.parallelize import apply_expert_parallel, apply_fsdp
from llmsys.train import checkpoint_load
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.expert_load import update_expert_balance
from tests.helpers import bitwise_runs
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.parity_runs import LEARNING_RATE, gather_full_state, select_rank_batches
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_tiny_config

TWO: dict[str, Any] = {
    "moe": {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "score": "sigmoid",
        "expert": {"kind": "clamped_swiglu", "bias": True},
    }
}
JOURNEY = [
    ParallelLayout(),
    ParallelLayout(expert=2),
    ParallelLayout(replicate=2),
    ParallelLayout(tensor=2),
]
"""With four ranks 4, 2, 2 and 4 shards; of 2, 1, 2 and 2 experts."""
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(learning_rate=LEARNING_RATE, max_grad_norm=0.1),
    "muon": MuonConfig(learning_rate=LEARNING_RATE, max_grad_norm=0.1),
}
PUBLISHED = {
    "mixtral-8x7b": (64, ParallelLayout(), 2),
    "deepseek-v3": (2048, ParallelLayout(expert=64), 4),
}


def count_elements(name: str, rank: int) -> tuple[int, float, int]:
    """Elements that a rank holds of a published model cut to a few layers, their mean, and those
    of the estimate.
    """
    world_size, layout, layers = PUBLISHED[name]
    config = load_model_config(f"model/{name}").model_copy(update={"num_hidden_layers": layers})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        fitted = layout.resolve(world_size, config)
        meshes = build_device_meshes(fitted, torch.device("cpu"))
        with torch.device("meta"):
            model = Transformer(config)
        total = sum(parameter.numel() for parameter in model.parameters())
        apply_expert_parallel(model, meshes)
        apply_fsdp(model, meshes, torch.bfloat16)
        held = sum(
            parameter.to_local().numel()
            for parameter in model.parameters()
            if isinstance(parameter, DTensor)
        )
    finally:
        dist.destroy_process_group()
    rows = list_model_tensors(config)
    return (
        held,
        total / world_size,
        sum(count_local_elements(row, fitted, config) * row.num_copies for row in rows),
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_largest_rank_holds_at_most_a_twentieth_more_than_the_mean(name: str) -> None:
    for rank in (0, 9, PUBLISHED[name][0] - 1):
        held, mean, estimated = count_elements(name, rank)
        assert held <= 1.05 * mean
        assert rank or held == estimated


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((8, 4096, 14336), 8, 0),
        ((8, 4096, 14336), 64, 1),
        ((12, 4096, 14336), 8, 1),  # two experts on four ranks, one on the others
        ((60, 2048, 1408), 64, 1),
        ((255, 2048, 1408), 8, 0),  # 32 · 8 / 255 is close enough
        ((8, 100, 192), 64, 2),
        ((8, 14336), 64, 1),
        ((8, 100, 100), 64, 0),
    ],
)
def test_whole_experts_are_preferred_then_the_first_dim_that_the_shards_divide(
    shape: tuple[int, ...], shards: int, dim: int
) -> None:
    assert select_shard_dim(shape, shards) == dim


def build(layout: ParallelLayout, optimizer: OptimizerConfig) -> EmaEngine:
    config, device = build_tiny_config(**TWO), torch.device("cpu")
    with torch.device("meta"):
        model = Transformer(config)
    engine = TorchEngine(
        model, meshes=build_device_meshes(layout.resolve(dist.get_world_size(), config), device),
        optimizer=optimizer,
        loss=build_training_loss(LossConfig()), compute_dtype=torch.float32, seed=7, device=device,
    )  # fmt: skip
    return EmaEngine(engine, half_life_tokens=64)


def take_journey(
    rank: int, folder: Path, layouts: list[ParallelLayout]
) -> dict[str, tuple[Any, ...]]:
    """Two steps under each layout, each continued from the checkpoint of the one before; with
    every optimizer.
    """
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        numbers, placements = [], set()
        for leg, layout in enumerate(layouts):
            engine = build(layout, optimizer)
            placements |= {
                str(p.placements)  # type: ignore[attr-defined]
                for key, p in engine.module.named_parameters()
                if "experts.up_p" in key
            }
            if leg:
                newest = checkpoint_load.find_newest_checkpoint(folder / name)
                assert newest is not None
                checkpoint_load.load_checkpoint(engine, newest)
            fitted = layout.resolve(dist.get_world_size(), engine.module.config)
            for step in (2 * leg, 2 * leg + 1):
                batches = select_rank_batches(
                    step, fitted.get_data_rank(rank), fitted.data_parallel_size, 1
                )
                result = engine.train_step(batches, LEARNING_RATE)
                numbers.append((result.loss, result.gradient_norm))
                update_expert_balance(engine.module)
            save_checkpoint(engine, folder / name, {"leg": leg}, keep_last=1)
        found[name] = numbers, gather_full_state(engine), placements
    return found


@pytest.mark.distributed
def test_two_experts_on_four_ranks_take_the_steps_of_one_process_through_every_layout(
    tmp_path: Path,
) -> None:
    found = run_ranks(take_journey, 4, tmp_path / "four", JOURNEY)[0]
    expected = run_ranks(take_journey, 1, tmp_path / "one", [ParallelLayout()] * len(JOURNEY))[0]
    for name, (numbers, state, placements) in found.items():
        assert placements == {
            "(Shard(dim=1),)",
            "(Shard(dim=1), Shard(dim=0))",
            "(Replicate(), Shard(dim=0))",
        }
        true_numbers, true_state, _ = expected[name]
        torch.testing.assert_close(numbers, true_numbers, rtol=2e-5, atol=2e-6)
        assert state.keys() == true_state.keys()
        for key, value in true_state.items():
            moved = key.startswith(("parameter/", "average/"))
            allowed = 0.02 * LEARNING_RATE if moved else 1e-3 * abs(value).max() + 1e-12
            assert abs(state[key] - value).max() <= allowed, (name, key)


def take_bitwise_steps(rank: int) -> list[Any]:
    layouts: dict[int, tuple[ParallelLayout, Any]] = {n: (ParallelLayout(), "none") for n in (1, 4)}
    layouts[2] = ParallelLayout(expert=2), "none"
    engine = bitwise_runs.build(bitwise_runs.Case(torch.float32, TWO, layouts))
    return bitwise_runs.take_steps(engine, 1, 2)


@pytest.mark.distributed
# Up to a minute: seven processes import torch on two cores, and bitwise steps run one micro-batch
# at a time.
def test_bitwise_steps_have_the_same_hash_when_experts_are_split_inside() -> None:
    one, two, four = (run_ranks(take_bitwise_steps, ranks)[0] for ranks in (1, 2, 4))
    assert one == two == four
