"""DDP: copies train as shards do, take over from them and hand over to them, and wait for nobody
who has no loss.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import Batch
from llmsys.engine.torch_engine import TorchEngine
from llmsys.model.transformer import Transformer
from llmsys.parallel.block_compilation import compile_blocks
from llmsys.parallel.ddp import list_unused_parameters
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train import checkpoint_load
from llmsys.train.cross_entropy import build_training_loss
from tests.helpers.checkpoints import save_checkpoint
from tests.helpers.parity_runs import (
    LEARNING_RATE,
    OPTIMIZER,
    gather_full_state,
    select_rank_batches,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import build_tiny_config

BERT = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    family="encoder",
    head={"kind": "mlm", "pooler": True, "next_sentence": True},
)
# Without tied weights or prediction modules: bf16 gradients of two uses of a weight add up in bf16
# in a shard, and in fp32 in a copy.
DENSE = build_tiny_config(moe=None)
State = dict[str, Any]


def engine_of(config: ModelConfig, way: str, *, compiled: bool = False) -> TorchEngine:
    device, ranks = torch.device("cpu"), torch.distributed.get_world_size()
    with torch.device("meta"):
        model = Transformer(config)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, backend="aot_eager")
    layout = ParallelLayout(replicate=ranks if way == "ddp" else 1).resolve(ranks, config)
    ways: dict[str, Any] = {"data_parallel": way, "compute_dtype": torch.bfloat16, "seed": 7}
    meshes, loss = build_device_meshes(layout, device), build_training_loss(LossConfig())
    return TorchEngine(model, meshes=meshes, optimizer=OPTIMIZER, loss=loss, device=device, **ways)


def train(engine: TorchEngine, rank: int, steps: range) -> State:
    for step in steps:
        engine.train_step(batches_of(engine, step, rank), LEARNING_RATE)
    return {name: value.copy() for name, value in gather_full_state(engine).items()}


def batches_of(engine: TorchEngine, step: int, rank: int) -> list[Batch]:
    return select_rank_batches(step, rank, torch.distributed.get_world_size(), 1)


def both_ways(rank: int, folder: Path) -> dict[str, tuple[State, State]]:
    pairs = {}
    for name, config in (("dense", DENSE), ("experts", build_tiny_config()), ("bert", BERT)):
        pairs[name] = (
            train(engine_of(config, "ddp"), rank, range(3)),
            train(engine_of(config, "fsdp"), rank, range(3)),
        )
    engine = engine_of(DENSE, "ddp", compiled=True)
    pairs["compiled"] = train(engine, rank, range(3)), pairs["dense"][0]
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["ok"] == frames["total"] == 1, frames
    first = engine_of(DENSE, "ddp")
    train(first, rank, range(2))
    later = engine_of(DENSE, "fsdp")
    checkpoint_load.load_checkpoint(later, save_checkpoint(first, folder / "copies", {}, 1))
    pairs["copies to shards"] = train(later, rank, range(2, 3)), pairs["dense"][0]
    back = engine_of(DENSE, "ddp")
    checkpoint_load.load_checkpoint(back, save_checkpoint(later, folder / "shards", {}, 1))
    pairs["shards to copies"] = train(back, rank, range(0)), pairs["dense"][0]
    return pairs


@pytest.mark.distributed
def test_copies_and_shards_have_the_same_bits_after_every_step(tmp_path: Path) -> None:
    for pairs in run_ranks(both_ways, 2, tmp_path):
        for name, (state, expected) in pairs.items():
            assert state.keys() == expected.keys()
            differing = [key for key, value in expected.items() if not (state[key] == value).all()]
            assert not differing, (name, differing)


def test_a_pooler_that_no_loss_sees_is_not_waited_for() -> None:
    with torch.device("meta"):
        model = Transformer(BERT)
    parts = ("pooler", "next_sentence")
    assert sorted(list_unused_parameters(model)) == sorted(
        f"{part}.{name}" for part in parts for name in ("bias", "weight")
    )
