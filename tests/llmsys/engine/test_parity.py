"""Every engine and layout against one process, eager, fp32: loss, gradient norm, and each parameter's moments.

After one step without clipping Adam's first moment is 0.1 times the gradient, so moments compare gradients parameter by
parameter; weights alone would hide a gradient that is twice too large.
"""

from collections.abc import Sequence
from typing import Any

import pytest
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
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_training import LENGTH, SEQUENCES, sequences, tiny_config

STEPS = 3
LEARNING_RATE = 1e-2
OPTIMIZER = AdamWConfig(learning_rate=LEARNING_RATE, embedding_lr_multiplier=2.0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Moments = dict[str, Any]


def mean_loss(model: Transformer, batch: Batch) -> torch.Tensor:
    """The loss as engines take it; that it is right is tests/llmsys/train/test_cross_entropy.py's business."""
    loss = build_training_loss(LossConfig())
    total: torch.Tensor = model(batch.tokens_BT, finish=lambda head, x, _: loss(head, x, batch.targets_BT))
    return total / batch.num_valid_targets


def plain_run(clip: float, steps: int = STEPS, **changes: object) -> tuple[list[float], list[float], Moments]:
    """The oracle: torch's own AdamW and clip, one process, all sequences of a step in one batch."""
    model = Transformer(tiny_config(**changes))
    initialize_parameters(model, seed=7)
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
        batch = sequences(step, 0, SEQUENCES, ignored=LENGTH)
        loss = mean_loss(model, batch)
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


def build(kind: str, layout: ParallelLayout, clip: float, micro_batches: int, **changes: object) -> Engine:
    """An engine as the trainer would build it: "torch", "accelerate", "zero3" or "bitwise", and what more words say.

    "bf16", "fp16", "offload", "ddp" and "whole" gradients (of torch), "full" and "selective" (recomputation).
    """
    device = torch.device("cpu")
    config = tiny_config(**changes)
    with torch.device("meta"):
        model = Transformer(config)
    words = kind.split()
    for what in {"full", "selective"} & set(words):
        apply_activation_checkpoint(model, what)  # type: ignore[arg-type]
    common: dict[str, Any] = {
        "meshes": build_device_meshes(layout.resolve(torch.distributed.get_world_size(), config), device),
        "optimizer": OPTIMIZER.model_copy(update={"max_grad_norm": clip}),
        "loss": build_training_loss(LossConfig()),
        "compute_dtype": next((dtype for word, dtype in DTYPES.items() if word in words), torch.float32),
        "seed": 7,
        "device": device,
    }
    if kind.startswith("torch"):
        from llmsys.engine.torch_engine import TorchEngine

        ways: dict[str, Any] = {"data_parallel": "ddp" if "ddp" in words else "fsdp"}
        ways |= {"gradients": "whole" if "whole" in words else "sharded"}
        return TorchEngine(model, **common, **ways, offload="state" if "offload" in words else "none")
    if words[0] == "bitwise":
        from llmsys.engine.bitwise_engine import BitwiseEngine

        return BitwiseEngine(model, **common)
    if kind.startswith("accelerate"):
        from llmsys.engine.accelerate_engine import AccelerateEngine

        return AccelerateEngine(model, **common)
    from llmsys.engine.deepspeed_engine import DeepSpeedEngine

    stage: Any
    offload: Any
    stage, offload = int(kind.removeprefix("zero")[0]), "optimizer" if "offload" in kind else "none"
    return DeepSpeedEngine(model, zero_stage=stage, offload=offload, **common)


def share_of(step: int, rank: int, world_size: int, micro_batches: int) -> list[Batch]:
    """This rank's micro-batches. The first sequence of the step has no target at all: rank 0 has less to learn from."""
    size = SEQUENCES // world_size // micro_batches
    first = rank * size * micro_batches
    starts = range(first, first + size * micro_batches, size)
    return [sequences(step, start, size, ignored=LENGTH if start == 0 else 0) for start in starts]


def whole_state(engine: Engine) -> Moments:
    """The logical state with every tensor whole, which only works because names and shapes do not depend on layouts."""
    from torch.distributed.tensor import DTensor

    state = engine.get_state()
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).numpy() for n, t in state.tensors.items()}


def engine_run(rank: int, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All cases of one world size in one set of processes: starting processes costs more than the steps."""
    world_size = torch.distributed.get_world_size()
    results = []
    for kind, layout, clip, micro_batches, changes in cases:
        engine = build(kind, layout, clip, micro_batches, **changes)
        steps = []
        for step in range(STEPS):
            steps.append(engine.train_step(share_of(step, rank, world_size, micro_batches), LEARNING_RATE))
            update_expert_balance(engine.module)
        state = whole_state(engine)
        results.append(([s.loss for s in steps], [s.gradient_norm for s in steps], state) if rank == 0 else None)
    return results


# The auxiliary loss is not a sum over tokens, so its value depends on how they are dealt; balancing by bias does not.
MOE: dict[str, Any] = {}
DENSE_TIED: dict[str, Any] = {"moe": None, "tie_word_embeddings": True}
CASES = {
    2: {
        "fsdp": ("torch", ParallelLayout(), 0.0, 1, MOE),
        "fsdp two micro-batches, clipped": ("torch", ParallelLayout(), 0.5, 2, MOE),
        "fsdp expert=2": ("torch", ParallelLayout(expert=2), 0.0, 1, MOE),
        "fsdp expert=2 clipped": ("torch", ParallelLayout(expert=2), 0.5, 2, MOE),
        "bitwise": ("bitwise", ParallelLayout(), 0.0, 1, MOE),
        "bitwise expert=2 clipped": ("bitwise", ParallelLayout(expert=2), 0.5, 2, MOE),
        "fsdp dense tied": ("torch", ParallelLayout(), 0.5, 1, DENSE_TIED),
        "fsdp expert=2, offload, blocks recomputed": ("torch offload block", ParallelLayout(expert=2), 0.5, 2, MOE),
        "fsdp expert=2, selective": ("torch selective", ParallelLayout(expert=2), 0.5, 2, MOE),
        "bitwise expert=2, selective": ("bitwise selective", ParallelLayout(expert=2), 0.5, 2, MOE),
        "fsdp expert=2, whole gradients": ("torch whole", ParallelLayout(expert=2), 0.5, 2, MOE),
        "hsdp two micro-batches": ("torch", ParallelLayout(replicate=2), 0.5, 2, MOE),
        "ddp two micro-batches, clipped": ("torch ddp", ParallelLayout(replicate=2), 0.5, 2, MOE),
        "ddp dense tied, blocks recomputed": ("torch ddp block", ParallelLayout(replicate=2), 0.5, 1, DENSE_TIED),
        "zero2 expert=2, blocks recomputed": ("zero2 block", ParallelLayout(expert=2), 0.5, 2, MOE),
        "zero3, blocks recomputed": ("zero3 block", ParallelLayout(), 0.5, 2, MOE),
        "zero3, selective": ("zero3 selective", ParallelLayout(), 0.5, 2, MOE),
        "accelerate two micro-batches, clipped": ("accelerate", ParallelLayout(), 0.5, 2, MOE),
        "zero0": ("zero0", ParallelLayout(), 0.0, 2, MOE),
        "zero0 expert=2 clipped": ("zero0", ParallelLayout(expert=2), 0.5, 2, MOE),
        "zero1": ("zero1", ParallelLayout(), 0.0, 1, MOE),
        "zero1 expert=2": ("zero1", ParallelLayout(expert=2), 0.5, 2, MOE),
        "zero2": ("zero2", ParallelLayout(), 0.5, 2, MOE),
        "zero2 expert=2": ("zero2", ParallelLayout(expert=2), 0.0, 1, MOE),
        "zero2 expert=2 clipped": ("zero2", ParallelLayout(expert=2), 0.5, 2, MOE),
        "zero2 dense tied": ("zero2", ParallelLayout(), 0.5, 1, DENSE_TIED),
        "zero3": ("zero3", ParallelLayout(), 0.0, 1, MOE),
        "zero3 two micro-batches, clipped": ("zero3", ParallelLayout(), 0.5, 2, MOE),
        "zero3 dense tied": ("zero3", ParallelLayout(), 0.5, 1, DENSE_TIED),
        "zero1 offload": ("zero1 offload", ParallelLayout(), 0.5, 2, MOE),
        "zero2 offload expert=2": ("zero2 offload", ParallelLayout(expert=2), 0.5, 2, MOE),
        "zero3 offload": ("zero3 offload", ParallelLayout(), 0.5, 2, MOE),
    },
    4: {
        "hsdp 2x2": ("torch", ParallelLayout(replicate=2), 0.5, 2, MOE),
        "fsdp expert=2 of 4": ("torch", ParallelLayout(expert=2), 0.5, 1, MOE),
        "hsdp 2x2 expert=2, offload, selective": (
            "torch offload selective",
            ParallelLayout(replicate=2, expert=2),
            0.5,
            2,
            MOE,
        ),
        "bitwise 2x2 expert=2": ("bitwise", ParallelLayout(replicate=2, expert=2), 0.5, 1, MOE),
        "fsdp expert=4": ("torch", ParallelLayout(expert=4), 0.0, 1, MOE),
        "hsdp 2x2 expert=2, whole gradients": ("torch whole", ParallelLayout(replicate=2, expert=2), 0.5, 2, MOE),
        "zero2 expert=2 of 4": ("zero2", ParallelLayout(expert=2), 0.5, 1, MOE),
        "zero0 expert=2 of 4": ("zero0", ParallelLayout(expert=2), 0.5, 1, MOE),
        "zero3 of 4": ("zero3", ParallelLayout(), 0.5, 1, MOE),
    },
}


@pytest.fixture(scope="module", params=sorted(CASES))
def finished(request: pytest.FixtureRequest) -> tuple[int, list[Any]]:
    """All runs of one world size."""
    world_size = request.param
    return world_size, run_ranks(engine_run, world_size, list(CASES[world_size].values()))[0]


def test_every_engine_and_layout_follows_the_plain_run(finished: tuple[int, list[Any]]) -> None:
    world_size, results = finished
    for (name, (_, _, clip, _, changes)), (losses, norms, state) in zip(
        CASES[world_size].items(), results, strict=True
    ):
        expected_losses, expected_norms, expected = plain_run(clip, **changes)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(norms, expected_norms, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        for key, value in expected.items():
            # A moment is compared at its tensor's scale. A weight moves by LEARNING_RATE in a step however small its
            # gradient is, so near-zero gradients may differ in it by a share of that.
            allowed = 0.02 * LEARNING_RATE if key.startswith("parameter/") else 1e-4 * float(value.abs().max())
            difference = float((torch.from_numpy(state[key]) - value).abs().max())
            assert difference <= allowed, f"{name}: {key} differs by {difference:.2e}, allowed {allowed:.2e}"
