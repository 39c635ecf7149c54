"""A cautious decay moves the elements that an update moves towards zero, and no other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmsys.config.optimizer import (
    AdafactorConfig,
    AdamWConfig,
    AdEMAMixConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    SoapConfig,
)
from llmsys.config.run import RunConfig
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.elementwise import apply_weight_decay

RATE, DECAY = 0.01, 0.5
KINDS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(),
    "adamw bf16": AdamWConfig(moments="bf16"),
    "adamw int8": AdamWConfig(moments="int8"),
    "lion": LionConfig(),
    "ademamix": AdEMAMixConfig(),
    "muon": MuonConfig(),
    "muon neurons": MuonConfig(neuron_beta=0.9),
    "adafactor": AdafactorConfig(),
    "soap": SoapConfig(),
}
NAMES = ("up_proj.weight", "embed.weight")


def take_steps(config: OptimizerConfig, start: Tensor, **changes: Any) -> dict[str, Tensor]:
    """Return the weights after two steps, of which the first one has no rate."""
    torch.manual_seed(1)
    named = {name: nn.Parameter(start.clone()) for name in NAMES}
    optimizer = build_optimizer(
        named, config.model_copy(update=changes), compute_dtype=torch.float32
    )
    for rate in (0.0, RATE):
        for parameter in named.values():
            parameter.grad = torch.randn(start.shape)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.parametrize("label", KINDS)
def test_only_what_moves_towards_zero_decays(label: str) -> None:
    torch.manual_seed(0)
    start = torch.randn(8, 16)
    plain = take_steps(KINDS[label], start, weight_decay=0.0)
    cautious = take_steps(KINDS[label], start, weight_decay=DECAY, cautious_weight_decay=True)
    for name in NAMES:
        towards_zero = (start - plain[name]) * start >= 0
        assert 0.3 < towards_zero.double().mean() < 0.7
        expected = plain[name] - RATE * DECAY * start.where(towards_zero, 0)
        torch.testing.assert_close(cautious[name], expected, rtol=1e-6, atol=1e-8)


def test_signs_decide_where_a_product_is_zero_in_float32() -> None:
    weight = torch.tensor([1e-20, -1e-20])
    apply_weight_decay(weight, torch.full((2,), 1e-30), 0.5, is_cautious=True)
    assert weight.equal(torch.tensor([0.5e-20, -1e-20]))


@pytest.mark.parametrize("kind", ["adam", "schedule_free"])
def test_a_decay_inside_of_an_update_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} has no decay apart from its update"):
        RunConfig.model_validate({"optimizer": {"kind": kind, "cautious_weight_decay": True}})
