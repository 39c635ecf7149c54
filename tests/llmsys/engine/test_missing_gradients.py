"""Parameters without a gradient decay, and their moments fade, as with a gradient of zeros:
under every engine.
"""

import pytest
import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import AdamWConfig, MuonConfig
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from llmsys.optim.parameter_groups import build_parameter_groups
from tests.helpers.objective_batches import build_batch
from tests.helpers.optimizer_runs import COPIED, DECAY, MODEL, RATE, STEPS, Loss, run_engines
from tests.helpers.ranks import run_ranks

NEVER_LEARNT = ("pooler.weight", "next_sentence.weight")
KINDS = (
    "torch",
    "bitwise",
    "zero0",
    "zero1",
    "zero1 offload",
    "zero2",
    "zero2 offload",
    "zero3",
    "zero3 offload",
    *COPIED,
)


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
        total = model(
            **batch.to_model_inputs(),
            finish=lambda head, x, _, b=batch: loss(head, x, b.targets_BT),
        )
        (total / batch.num_valid_targets).backward()
        for parameter in named.values():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )
        optimizer.step()
        optimizer.zero_grad()
    state = {f"parameter/{name}": parameter.detach() for name, parameter in named.items()}
    return state | {
        f"first_moment/{name}": optimizer.state[p]["exp_avg"] for name, p in named.items()
    }


def optimizer_of() -> AdamWConfig:
    return AdamWConfig(
        learning_rate=RATE, weight_decay=DECAY, max_grad_norm=0, betas=(0.9, 0.95), eps=1e-8
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_has_no_gradient_decays_alike_under_every_engine(world_size: int) -> None:
    found = run_ranks(run_engines, world_size, KINDS, optimizer_of())[0]
    for kind, (state, steps) in zip(KINDS, found, strict=True):
        expected = plain_run(skips=kind not in COPIED)
        assert steps == STEPS, kind
        for key, value in expected.items():
            allowed = (
                0.02 * RATE
                if key.startswith("parameter/")
                else 1e-4 * float(value.abs().max()) + 1e-9
            )
            assert float((torch.from_numpy(state[key]) - value).abs().max()) <= allowed, (
                f"{kind}: {key}"
            )
        started = Transformer(ModelConfig.model_validate(MODEL))
        initialize_parameters(started, seed=7)
        for name in NEVER_LEARNT:
            shrunk = started.get_parameter(name).detach() * (1 - RATE * DECAY) ** STEPS
            torch.testing.assert_close(
                torch.from_numpy(state[f"parameter/{name}"]), shrunk, msg=f"{kind}: {name}"
            )


def test_muon_decays_what_has_no_gradient() -> None:
    [(state, steps)] = run_ranks(
        run_engines, 1, ("torch",), MuonConfig(learning_rate=RATE, weight_decay=DECAY)
    )[0]
    started = Transformer(ModelConfig.model_validate(MODEL))
    initialize_parameters(started, seed=7)
    shrunk = started.get_parameter("pooler.weight").detach() * (1 - RATE * DECAY) ** STEPS
    assert steps == STEPS
    torch.testing.assert_close(torch.from_numpy(state["parameter/pooler.weight"]), shrunk)
