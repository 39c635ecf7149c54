"""Parameters without a gradient decay, and their moments fade, as with a gradient of zeros: under every engine."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.config.optimizer import (
    AdafactorConfig,
    AdamWConfig,
    AdEMAMixConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    ScheduleFreeConfig,
)
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.data.batch import IGNORED
from llmsys.engine.engine import Engine
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.optim.parameter_groups import build_parameter_groups
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.cross_entropy import build_training_loss
from tests.helpers.objective_batches import SHAPE, build_batch
from tests.helpers.parity_runs import gather_full_state
from tests.helpers.ranks import run_ranks

RATE, DECAY, STEPS = 1e-2, 0.5, 4
WITHOUT_HEAD = 2
"""The step whose loss does not look at the head."""
NEVER_LEARNT = ("pooler.weight", "next_sentence.weight")
MODEL = SHAPE | {
    "family": "encoder", "head": {"kind": "mlm", "pooler": True, "next_sentence": True},
    "position": {"kind": "learned"}, "tie_word_embeddings": False,
}  # fmt: skip
COPIED = ("ddp", "accelerate")
"""Under DDP every parameter that a loss ever looks at needs a gradient in every step."""
KINDS = ("torch", "bitwise", "zero0", "zero1", "zero2", "zero3", "zero3 offload", *COPIED)


class Loss:
    """Masked cross entropy; in some steps a loss of the hidden states, which gives the head no gradient."""

    step = 0

    def __init__(self, skips: bool) -> None:
        self.skips = skips
        self._masked = build_training_loss(LossConfig())

    def __call__(self, head: nn.Module | None, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        if self.skips and self.step == WITHOUT_HEAD:
            return (hidden_BTD.float().square().sum(-1) * (targets_BT != IGNORED)).sum()
        return self._masked(head, hidden_BTD, targets_BT)


def build(kind: str, loss: Loss, optimizer: OptimizerConfig) -> Engine:
    device, config = torch.device("cpu"), ModelConfig.model_validate(MODEL)
    with torch.device("meta"):
        model = Transformer(config)
    ranks = torch.distributed.get_world_size()
    layout = ParallelLayout(replicate=ranks if kind == "ddp" else 1)
    common: dict[str, Any] = {
        "meshes": build_device_meshes(layout.resolve(ranks, config), device), "optimizer": optimizer, "loss": loss,
        "compute_dtype": torch.float32, "seed": 7, "device": device,
    }  # fmt: skip
    if kind in ("torch", "ddp"):
        from llmsys.engine.torch_engine import TorchEngine

        return TorchEngine(model, **common, data_parallel="ddp" if kind == "ddp" else "fsdp")
    if kind == "bitwise":
        from llmsys.engine.bitwise_engine import BitwiseEngine

        return BitwiseEngine(model, **common)
    if kind == "accelerate":
        from llmsys.engine.accelerate_engine import AccelerateEngine

        return AccelerateEngine(model, **common)
    from llmsys.engine.deepspeed_engine import DeepSpeedEngine

    stage: Any = int(kind[4])
    offload: Any = "optimizer" if "offload" in kind else "none"
    return DeepSpeedEngine(model, zero_stage=stage, offload=offload, **common)


def engine_run(rank: int, kinds: tuple[str, ...], optimizer: OptimizerConfig) -> list[Any]:
    size, found = torch.distributed.get_world_size(), []
    for kind in kinds:
        loss = Loss(skips=kind not in COPIED)
        engine = build(kind, loss, optimizer)
        for step in range(STEPS):
            loss.step = step
            engine.train_step([build_batch("masked", step, 0, list(range(6))[rank::size])], RATE)
        found.append((gather_full_state(engine), engine.get_state().steps))
    return found if rank == 0 else []


def plain_run(skips: bool) -> dict[str, Tensor]:
    """torch's own AdamW in one process, with zeros where there is no gradient."""
    model = Transformer(ModelConfig.model_validate(MODEL))
    initialize_parameters(model, seed=7)
    named, loss = dict(model.named_parameters()), Loss(skips)
    groups = [{"params": [named[name] for name in group.names], "weight_decay": group.weight_decay}
              for group in build_parameter_groups(named.items(), optimizer_of())]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        loss.step, batch = step, build_batch("masked", step, 0, list(range(6)))
        total = model(**batch.to_model_inputs(), finish=lambda head, x, _, b=batch: loss(head, x, b.targets_BT))
        (total / batch.num_valid_targets).backward()
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    state = {f"parameter/{name}": parameter.detach() for name, parameter in named.items()}
    return state | {f"first_moment/{name}": optimizer.state[p]["exp_avg"] for name, p in named.items()}


def optimizer_of() -> AdamWConfig:
    return AdamWConfig(learning_rate=RATE, weight_decay=DECAY, max_grad_norm=0, betas=(0.9, 0.95), eps=1e-8)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_has_no_gradient_decays_alike_under_every_engine(world_size: int) -> None:
    found = run_ranks(engine_run, world_size, KINDS, optimizer_of())[0]
    for kind, (state, steps) in zip(KINDS, found, strict=True):
        expected = plain_run(skips=kind not in COPIED)
        assert steps == STEPS, kind
        for key, value in expected.items():
            allowed = 0.02 * RATE if key.startswith("parameter/") else 1e-4 * float(value.abs().max()) + 1e-9
            assert float((torch.from_numpy(state[key]) - value).abs().max()) <= allowed, f"{kind}: {key}"
        started = Transformer(ModelConfig.model_validate(MODEL))
        initialize_parameters(started, seed=7)
        for name in NEVER_LEARNT:
            shrunk = started.get_parameter(name).detach() * (1 - RATE * DECAY) ** STEPS
            torch.testing.assert_close(torch.from_numpy(state[f"parameter/{name}"]), shrunk, msg=f"{kind}: {name}")


def test_muon_decays_what_has_no_gradient() -> None:
    [(state, steps)] = run_ranks(engine_run, 1, ("torch",), MuonConfig(learning_rate=RATE, weight_decay=DECAY))[0]
    started = Transformer(ModelConfig.model_validate(MODEL))
    initialize_parameters(started, seed=7)
    shrunk = started.get_parameter("pooler.weight").detach() * (1 - RATE * DECAY) ** STEPS
    assert steps == STEPS
    torch.testing.assert_close(torch.from_numpy(state["parameter/pooler.weight"]), shrunk)


# With the engines that have them: DeepSpeed has full matrices in stage 0 only, and no single weights beyond it.
OTHERS: tuple[tuple[OptimizerConfig, tuple[str, ...]], ...] = (
    (LionConfig(learning_rate=RATE, weight_decay=DECAY), KINDS),
    (AdEMAMixConfig(learning_rate=RATE, weight_decay=DECAY, slow_warmup_steps=3, slow_beta=0.99), KINDS),
    (ScheduleFreeConfig(learning_rate=RATE, weight_decay=DECAY), ("torch", "bitwise", *COPIED)),
    (MuonConfig(learning_rate=RATE, weight_decay=DECAY), ("torch", "zero0", *COPIED)),
    (AdafactorConfig(learning_rate=RATE, weight_decay=DECAY), ("torch", "zero0", *COPIED)),
)


def run_others(rank: int) -> list[list[Any]]:
    return [engine_run(rank, kinds, optimizer) for optimizer, kinds in OTHERS]


def test_other_optimizers_take_the_same_steps_under_every_engine_that_has_them() -> None:
    for (optimizer, kinds), runs in zip(OTHERS, run_ranks(run_others, 2)[0], strict=True):
        by_kind = dict(zip(kinds, runs, strict=True))
        for kind, (state, steps) in by_kind.items():
            label = f"{optimizer.kind}, {kind}"
            expected, _ = by_kind["ddp" if kind in COPIED else "torch"]
            assert steps == STEPS, label
            assert state.keys() == expected.keys(), label
            for name, value in expected.items():
                # The sign of an update near zero, hence 2 · RATE, may follow from the order of a sum.
                is_far = np.abs(state[name] - value) > 1e-4 * np.abs(value).max() + 1e-7
                assert is_far.mean() <= 0.01, f"{label}: {name}"
