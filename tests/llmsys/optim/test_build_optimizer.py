"""Adam with its decay in the gradient, against the formula (Kingma 2014, algorithm 1, on
gradient + decay · weight).
"""

import pytest
import torch
from torch import nn

from llmsys.config.optimizer import AdafactorConfig, AdamConfig, MuonConfig, SoapConfig
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.elementwise import require_elementwise

RATE, DECAY, BETAS, EPS = 0.1, 0.3, (0.9, 0.95), 1e-8


def test_adam_decays_through_its_moments_and_spares_vectors() -> None:
    torch.manual_seed(0)
    named = {
        "blocks.0.up_proj.weight": nn.Parameter(torch.randn(3, 4)),
        "norm.weight": nn.Parameter(torch.randn(4)),
    }
    expected = {name: parameter.detach().double() for name, parameter in named.items()}
    moments = {
        name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in expected.items()
    }
    config = AdamConfig(learning_rate=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    optimizer = build_optimizer(named, config, compute_dtype=torch.float32)
    for step in range(1, 5):
        for name, parameter in named.items():
            parameter.grad = torch.randn(parameter.shape)
            g = parameter.grad.double() + (DECAY * expected[name] if parameter.dim() > 1 else 0)
            m, v = moments[name]
            moments[name] = m, v = (
                BETAS[0] * m + (1 - BETAS[0]) * g,
                BETAS[1] * v + (1 - BETAS[1]) * g * g,
            )
            m_hat, v_hat = m / (1 - BETAS[0] ** step), v / (1 - BETAS[1] ** step)
            expected[name] = expected[name] - RATE * m_hat / (v_hat.sqrt() + EPS)
        optimizer.step()
    for name, parameter in named.items():
        torch.testing.assert_close(
            parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("config", [AdamConfig(), MuonConfig(), AdafactorConfig(), SoapConfig()])
def test_an_engine_with_adamw_alone_rejects_others(
    config: AdamConfig | MuonConfig | AdafactorConfig | SoapConfig,
) -> None:
    with pytest.raises(
        ConfigError, match=f"optimizer.kind={config.kind} is not built by this engine"
    ):
        require_elementwise(config)
    if isinstance(config, MuonConfig):  # which has its own form there
        return
    with pytest.raises(ValueError, match=f"{config.kind} is not built by engine.kind=deepspeed"):
        RunConfig.model_validate(
            {"engine": {"kind": "deepspeed"}, "optimizer": {"kind": config.kind}}
        )
