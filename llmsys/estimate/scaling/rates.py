"""What laws say about batch size and learning rate, given compute, size and tokens."""

import math
from dataclasses import dataclass

from llmsys.estimate.scaling.law import Axis, FittedRange
from llmsys.estimate.scaling.power_laws import FLOPS_PER_PF_DAY


@dataclass(frozen=True)
class BatchAndLearningRate:
    """Tokens in a batch and the peak learning rate; None where the law has no answer. `outside` says how far it is."""

    law: str
    batch_tokens: float | None
    learning_rate: float | None
    outside: tuple[float, Axis] | None


def predict_deepseek_rates(flops: float) -> BatchAndLearningRate:
    """DeepSeek LLM 2024 (arXiv:2401.02954), 3.1: both are power laws of the compute, fitted from 1e17 to 2e19."""
    span = FittedRange("FLOPs", 1e17, 2e19)
    return BatchAndLearningRate("deepseek_2024", 0.2920 * flops**0.3271, 0.3118 * flops**-0.1250, _find_rate_extrapolation([(span, flops)]))


def predict_steplaw_rates(parameters: float, tokens: float) -> BatchAndLearningRate:
    """Step Law 2025 (arXiv:2503.04715): N without vocabulary; its rate rises with D, where DeepSeek's falls with C."""
    spans = [(FittedRange("parameters", 6e7, 1.1e9), parameters), (FittedRange("tokens", 2e9, 1e11), tokens)]
    rate = 1.79 * parameters**-0.713 * tokens**0.307
    return BatchAndLearningRate("steplaw_2025", 0.58 * tokens**0.571, rate, _find_rate_extrapolation(spans))


def predict_kaplan_rates(flops: float, parameters: float) -> BatchAndLearningRate:
    """Kaplan 2020: B = 2.0e6 C^0.24 (table 6), rate 0.003239 - 0.0001395 ln N (D.6), which ends at N = 1e10."""
    rate = 0.003239 - 0.0001395 * math.log(parameters)
    batch = 2.0e6 * (flops / FLOPS_PER_PF_DAY) ** 0.24
    span = FittedRange("parameters", 768, 1.5e9)
    return BatchAndLearningRate("kaplan_2020", batch, rate if rate > 0 else None, _find_rate_extrapolation([(span, parameters)]))


def _find_rate_extrapolation(values: list[tuple[FittedRange, float]]) -> tuple[float, Axis] | None:
    worst = max((span.compute_extrapolation(value), span.axis) for span, value in values)
    return worst if worst[0] > 1 else None
