"""Lion, AdEMAMix and schedule-free AdamW take the steps of their papers, and bitwise mode the
same bit for bit.
"""

from typing import Any

import pytest
import torch
from torch import nn

from llmsys.config.loading.load import load_run_config
from llmsys.config.optimizer import AdEMAMixConfig, LionConfig, ScheduleFreeConfig
from llmsys.errors import ConfigError
from llmsys.optim.bitwise_optimizer import BitwiseOptimizer
from llmsys.optim.build_optimizer import build_optimizer
from llmsys.optim.elementwise import AverageWeights
from llmsys.optim.lr_schedule import LearningRate, set_rates
from tests.reference.optimizers import step_ademamix, step_lion, step_schedule_free

RATE, DECAY, STEPS = 1e-2, 0.1, 7
RATES = [RATE / 3, 2 * RATE / 3, RATE, RATE, RATE, RATE / 2, RATE / 4]
"""A warm-up, a plateau and a decay."""
LION = LionConfig(learning_rate=RATE, weight_decay=DECAY)
ADEMAMIX = AdEMAMixConfig(
    learning_rate=RATE,
    weight_decay=DECAY,
    slow_beta=0.999,
    slow_weight=4.0,
    slow_warmup_steps=5,
    eps=1e-4,
)
FREE = ScheduleFreeConfig(learning_rate=RATE, weight_decay=DECAY, averaging_power=1.5, eps=1e-4)
ALIKE = FREE.model_copy(update={"averaging_power": 0.0})
Config = LionConfig | AdEMAMixConfig | ScheduleFreeConfig
SHAPES = {"blocks.0.up_proj.weight": (3, 2), "blocks.0.norm.weight": (2,)}


def build_gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def compute_free_twin(
    config: ScheduleFreeConfig, start: float, gradients: list[float], decay: float
) -> list[Any]:
    """Return the trained weight y after all steps, the second moment, and z - y."""
    average, fast, second, beta = start, start, 0.0, config.betas[0]
    common: dict[str, Any] = {"decay": decay, "betas": config.betas, "eps": config.eps}
    for step, gradient in enumerate(gradients, start=1):
        average, fast, second = step_schedule_free(
            average, fast, gradient, second, RATES[:step], power=config.averaging_power, **common
        )
    trained = (1 - beta) * fast + beta * average
    return [trained, second, fast - trained]


def compute_twin(config: Config, start: float, gradients: list[float], decay: float) -> list[Any]:
    """Return one weight after all steps, and its moments."""
    if isinstance(config, ScheduleFreeConfig):
        return compute_free_twin(config, start, gradients, decay)
    weight, momentum, moments = start, 0.0, (0.0, 0.0, 0.0)
    for step, gradient in enumerate(gradients, start=1):
        common: dict[str, Any] = {"rate": RATES[step - 1], "decay": decay}
        if isinstance(config, LionConfig):
            weight, momentum = step_lion(weight, gradient, momentum, betas=config.betas, **common)
        else:
            common |= {
                "alpha": config.slow_weight,
                "warmup": config.slow_warmup_steps,
                "eps": config.eps,
            }
            betas = (*config.betas, config.slow_beta)
            weight, moments = step_ademamix(weight, gradient, moments, step, betas=betas, **common)
    return [weight, momentum] if isinstance(config, LionConfig) else [weight, *moments]


@pytest.mark.parametrize(
    "config",
    [LION, ADEMAMIX, FREE, ALIKE],
    ids=["lion", "ademamix", "schedule_free", "schedule_free, power 0"],
)
def test_steps_are_those_of_the_paper_and_bitwise_mode_takes_the_same(config: Config) -> None:
    starts = build_gradients(99)
    fast, exact = (
        {name: nn.Parameter(start.clone()) for name, start in starts.items()} for _ in range(2)
    )
    optimizer = build_optimizer(fast, config, compute_dtype=torch.float32)
    bitwise = BitwiseOptimizer(exact, config)
    for step in range(STEPS):
        for name, gradient in build_gradients(step).items():
            fast[name].grad = gradient
        set_rates(optimizer.param_groups, LearningRate(RATES[step]))
        optimizer.step()
        bitwise.step([*build_gradients(step).values()], RATES[step], 1.0)
    for name, parameter in fast.items():
        assert torch.equal(parameter, exact[name])
        state = optimizer.state[parameter]
        found = [parameter, *(value for key, value in state.items() if key != "step")]
        for index in range(parameter.numel()):
            gradients = [
                float(build_gradients(step)[name].view(-1)[index]) for step in range(STEPS)
            ]
            decay = DECAY if parameter.ndim > 1 else 0.0
            expected = compute_twin(config, float(starts[name].view(-1)[index]), gradients, decay)
            values = [float(tensor.detach().view(-1)[index]) for tensor in found]
            assert values == pytest.approx(expected, rel=2e-5, abs=1e-7), (name, index)


def test_a_step_without_a_rate_leaves_the_average_where_it_is() -> None:
    average = AverageWeights(0.0)
    assert [average.add_step(step, rate) for step, rate in ((1, 0.0), (2, 0.5), (3, 1.0))] == [
        0.0,
        1.0,
        0.8,
    ]


def test_lion_refuses_an_eps_that_it_would_ignore() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.eps: 1e-06 has no place in lion"):
        load_run_config("train/demo", ["optimizer.kind=lion", "optimizer.eps=1e-6"])
