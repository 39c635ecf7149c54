"""Runs of a tiny model under every engine, and the reference run that they are compared with."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import AdamWConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import Batch
from llmsys.engine.engine import Engine
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.optim.parameter_groups import build_parameter_groups
from llmsys.parallel.activation_checkpoint import apply_activation_checkpoint
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.cross_entropy import build_training_loss
from llmsys.train.expert_load import update_expert_balance
from tests.helpers.tiny_training import LENGTH, SEQUENCES, build_sequences, build_tiny_config

STEPS = 3
SEED = 1
"""Its run is well-conditioned: micro-batches in another order move no moment by more than 1e-5
of the largest.
"""
LEARNING_RATE = 1e-2
OPTIMIZER = AdamWConfig(learning_rate=LEARNING_RATE, embedding_lr_multiplier=2.0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Moments = dict[str, Any]
_EXACT = contextlib.nullcontext()


def compute_mean_loss(model: Transformer, batch: Batch) -> torch.Tensor:
    """Return the mean training loss per valid target (checked by
    tests/llmsys/train/test_cross_entropy.py).
    """
    loss = build_training_loss(LossConfig())
    total: torch.Tensor = model(
        batch.tokens_BT, finish=lambda head, x, _: loss(head, x, batch.targets_BT)
    )
    return total / batch.num_valid_targets


def run_reference(
    clip: float,
    steps: int = STEPS,
    seed: int = SEED,
    errors: AbstractContextManager[Any] = _EXACT,
    **changes: object,
) -> tuple[list[float], list[float], Moments]:
    """Run the reference: torch's AdamW and clipping, one process, all sequences of a step in one
    batch.

    Args:
        errors: Entered around each forward and backward pass.

    Returns:
        Losses and gradient norms of the steps, and the final parameters and moments.
    """
    model = Transformer(build_tiny_config(**changes))
    initialize_parameters(model, seed)
    named = dict(model.named_parameters())
    groups = [
        {
            "params": [named[name] for name in group.names],
            "weight_decay": group.weight_decay,
            "lr": LEARNING_RATE * group.lr_multiplier,
        }
        for group in build_parameter_groups(named.items(), OPTIMIZER)
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(steps):
        batch = build_sequences(step, 0, SEQUENCES, ignored=LENGTH)
        with errors:
            loss = compute_mean_loss(model, batch)
            loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        optimizer.step()
        optimizer.zero_grad()
        update_expert_balance(model)
        losses.append(loss.item())
    state = {f"parameter/{name}": parameter.detach() for name, parameter in named.items()}
    for name, parameter in named.items():
        state[f"first_moment/{name}"] = optimizer.state[parameter]["exp_avg"]
        state[f"second_moment/{name}"] = optimizer.state[parameter]["exp_avg_sq"]
    return losses, norms, state


def build_engine(
    kind: str,
    layout: ParallelLayout,
    clip: float,
    micro_batches: int,
    *,
    seed: int = SEED,
    **changes: object,
) -> Engine:
    """Build an engine as the trainer does.

    Args:
        kind: "torch", "accelerate", "zero3" or "bitwise", followed by options: "bf16", "fp16",
            "offload", "ddp", "plain", "whole" (unsharded gradient accumulation), "full" or
            "selective" (activation checkpointing), "int8" moments.
    """
    device = torch.device("cpu")
    config = build_tiny_config(**changes)
    with torch.device("meta"):
        model = Transformer(config)
    words = kind.split()
    for what in {"full", "selective"} & set(words):
        apply_activation_checkpoint(model, what)  # type: ignore[arg-type]
    common: dict[str, Any] = {
        "meshes": build_device_meshes(
            layout.resolve(torch.distributed.get_world_size(), config), device
        ),
        "optimizer": OPTIMIZER.model_copy(
            update={"max_grad_norm": clip, "moments": "int8" if "int8" in words else "fp32"}
        ),
        "loss": build_training_loss(LossConfig()),
        "compute_dtype": next(
            (dtype for word, dtype in DTYPES.items() if word in words), torch.float32
        ),
        "seed": seed,
        "device": device,
    }
    if kind.startswith("torch"):
        from llmsys.engine.torch_engine import TorchEngine

        ways: dict[str, Any] = {"data_parallel": "fsdp"}
        for way in {"ddp", "plain"} & set(words):
            ways["data_parallel"] = way
        ways |= {"gradients": "whole" if "whole" in words else "sharded"}
        return TorchEngine(
            model, **common, **ways, offload="state" if "offload" in words else "none"
        )
    if words[0] == "bitwise":
        from llmsys.engine.bitwise_engine import BitwiseEngine

        return BitwiseEngine(model, **common, data_parallel="plain" if "plain" in words else "fsdp")
    if kind.startswith("accelerate"):
        from llmsys.engine.accelerate_engine import AccelerateEngine

        return AccelerateEngine(model, **common)
    from llmsys.engine.deepspeed_engine import DeepSpeedEngine

    stage: Any
    offload: Any
    stage, offload = int(kind.removeprefix("zero")[0]), "optimizer" if "offload" in kind else "none"
    return DeepSpeedEngine(model, zero_stage=stage, offload=offload, **common)


def select_rank_batches(step: int, rank: int, world_size: int, micro_batches: int) -> list[Batch]:
    """Return the micro-batches of a rank. The first sequence of the step has no targets, so rank
    0 has fewer.
    """
    size = SEQUENCES // world_size // micro_batches
    first = rank * size * micro_batches
    starts = range(first, first + size * micro_batches, size)
    return [
        build_sequences(step, start, size, ignored=LENGTH if start == 0 else 0) for start in starts
    ]


def gather_full_state(engine: Engine) -> Moments:
    """Return the training state with full tensors as numpy arrays; names and shapes do not
    depend on the layout.
    """
    from torch.distributed.tensor import DTensor

    state = engine.get_state()
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).numpy()
        for n, t in state.tensors.items()
    }
