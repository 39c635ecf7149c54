"""Runs of the bitwise engine on tiny models, for tests: the fixed micro-batches of a step, dealt to any number of ranks."""

from typing import Any

import torch

from llmsys.config.layout import Layout
from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdamW
from llmsys.data.batch import Batch
from llmsys.engine.bitwise_engine import BitwiseEngine
from llmsys.engine.state_hash import state_hash
from llmsys.model.transformer import Transformer
from llmsys.parallel.mesh import make_meshes
from llmsys.train.balance import settle_experts
from llmsys.train.head_loss import training_loss
from tests.helpers.tiny import LENGTH, sequences, tiny_config

MICRO_BATCHES = 8
OPTIMIZER = AdamW(learning_rate=1e-2, embedding_rate_scale=2.0, gradient_clip=0.5)


def build_bitwise(layout: Layout, dtype: torch.dtype, **changes: Any) -> BitwiseEngine:
    """An engine as the trainer would build it."""
    device = torch.device("cpu")
    config = tiny_config(**changes)
    with torch.device("meta"):
        model = Transformer(config)
    meshes = make_meshes(layout.fit(torch.distributed.get_world_size(), config), device)
    return BitwiseEngine(
        model, meshes=meshes, optimizer=OPTIMIZER, loss=training_loss(LossConfig(z_loss=1e-3)),
        compute_dtype=dtype, seed=7, device=device,
    )  # fmt: skip


def turns(step: int, rank: int, world_size: int, micro_batches: int = MICRO_BATCHES) -> list[Batch]:
    """This rank's micro-batches of a step, two sequences each. In the first one, a sequence has nothing to learn."""
    return [sequences(step, 2 * m, 2, ignored=LENGTH if m == 0 else 0) for m in range(rank, micro_batches, world_size)]


def take_steps(engine: BitwiseEngine, steps: range, micro_batches: int = MICRO_BATCHES) -> list[Any]:
    """What each step told: loss, norm, what the experts did, and the hash of the state behind it."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    told = []
    for step in steps:
        result = engine.train_step(turns(step, rank, world_size, micro_batches), 1e-2)
        experts = settle_experts(engine.module).fields()
        told.append((result.loss, result.gradient_norm, experts, state_hash(engine.state())))
    return told
