"""Runs of the bitwise engine on tiny models: the fixed micro-batches of a step, dealt to any
number of ranks.
"""

import hashlib
from typing import Any, NamedTuple

import torch

from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdamWConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import Batch
from llmsys.engine.bitwise_engine import BitwiseEngine
from llmsys.engine.engine import Engine
from llmsys.engine.state_hash import hash_state
from llmsys.engine.torch_engine import TorchEngine
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import apply_activation_checkpoint
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import all_gather_object, get_rank, get_world_size
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.tiny_training import LENGTH, build_sequences, build_tiny_config

MICRO_BATCHES = 8
OPTIMIZER = AdamWConfig(learning_rate=1e-2, embedding_lr_multiplier=2.0, max_grad_norm=0.5)


class Case(NamedTuple):
    """A model, and how each number of processes shares it: (layout, recompute)."""

    dtype: torch.dtype
    model: dict[str, Any]
    layouts: dict[int, tuple[ParallelLayout, Any]]


DROPOUT = {"residual": 0.1, "attention": 0.1, "embedding": 0.1}
ODD_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 10,
    "shared_intermediate_size": 12,
    "routing": {"kind": "capacity", "factor": 0.9}, "balance": {"kind": "auxiliary_loss",
        "weight": 0.5},
    "router_bias": True, "expert": {"kind": "clamped_swiglu", "bias": True},
}  # fmt: skip
"""Of 32 tokens in a micro-batch some experts get none; widths that no vector divides; biases and
drops.
"""

CASES = {
    "dense, tied, dropout, fp32": Case(
        torch.float32,
        {"moe": None, "tie_word_embeddings": True, "vocab_size": 67, "dropout": DROPOUT},
        {
            1: (ParallelLayout(), "none"),
            2: (ParallelLayout(), "full"),
            4: (ParallelLayout(replicate=2), "none"),
            8: (ParallelLayout(), "none"),
        },
    ),
    "experts, dropout, bf16": Case(
        torch.bfloat16,
        {"dropout": DROPOUT},
        {
            1: (ParallelLayout(), "none"),
            2: (ParallelLayout(expert=2), "selective"),
            4: (ParallelLayout(expert=4), "none"),
            8: (ParallelLayout(replicate=2, expert=2), "none"),
        },
    ),
    "few tokens on experts of odd widths, fp32": Case(
        torch.float32,
        {"moe": ODD_EXPERTS},
        {
            1: (ParallelLayout(), "none"),
            2: (ParallelLayout(expert=2), "none"),
            4: (ParallelLayout(replicate=2, expert=2), "none"),
            8: (ParallelLayout(expert=4), "none"),
        },
    ),
}


def build(case: Case, kind: type[BitwiseEngine] | type[TorchEngine] = BitwiseEngine) -> Engine:
    """An engine as the trainer would build it, on the ranks that have joined."""
    device = torch.device("cpu")
    config = build_tiny_config(**case.model)
    layout, recompute = case.layouts[get_world_size()]
    with torch.device("meta"):
        model = Transformer(config)
    apply_activation_checkpoint(model, recompute)
    return kind(
        model, meshes=build_device_meshes(layout.resolve(get_world_size(), config), device),
        optimizer=OPTIMIZER,
        loss=build_training_loss(LossConfig(z_loss=1e-3)), compute_dtype=case.dtype, seed=9,
        device=device,
    )  # fmt: skip


def select_rank_batches(step: int) -> list[Batch]:
    """This rank's micro-batches of a step, two sequences each. In the first one, a sequence has
    nothing to learn.
    """
    mine = range(get_rank(), MICRO_BATCHES, get_world_size())
    return [
        build_sequences(step, 2 * number, 2, ignored=LENGTH if number == 0 else 0)
        for number in mine
    ]


def take_steps(engine: Engine, first: int, last: int) -> list[Any]:
    """What steps `first` to `last` told: loss, norm, experts and state; then the hash of some
    logits.
    """
    told = []
    for step in range(first, last + 1):
        result = engine.train_step(select_rank_batches(step), 1e-2)
        told.append(
            {
                "loss": result.loss,
                "norm": result.gradient_norm,
                **update_expert_balance(engine.module).to_dict(),
            }
            | {"state": hash_state(engine.get_state())}
        )
    return [*told, hash_of_logits(engine)]


def hash_of_logits(engine: Engine) -> str:
    """Of eight batches that are the same for every number of ranks."""
    mine = [
        engine.compute_logits(batch).float().numpy().tobytes() for batch in select_rank_batches(99)
    ]
    in_order = [one for turn in zip(*all_gather_object(mine), strict=True) for one in turn]
    return hashlib.blake2b(b"".join(in_order), digest_size=8).hexdigest()
