"""The published laws, their constants as printed and the runs behind them.

Two laws appear twice, with the digits their paper rounds to and with those of its figure or source: rounding an
exponent moves the optimum by a quarter to a half, so neither is quietly preferred.

Laws for mixtures of experts give the dense parameters that experts are worth, and how fine they should be.
"""

import math
from dataclasses import dataclass

from llmsys.estimate.scaling.chinchilla import DataConstrainedLaw, ParametricLaw, minimize_golden_section
from llmsys.estimate.scaling.law import (
    FLOPS_PER_PARAMETER_AND_TOKEN,
    BudgetRequest,
    ComputeLaw,
    FittedRange,
    KaplanLaw,
    LawSource,
    Optimum,
    ScalingLaw,
    list_ignored_inputs,
)


@dataclass(frozen=True)
class ClarkLaw:
    """Clark 2022 (arXiv:2202.01169), equation 2: log10 L = a log N + b log Ê + c log N log Ê + d, all to base 10.

    N is the dense model that gets `experts` experts; Ê saturates: 1/Ê = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max.
    Its losses were measured at 130B tokens, so it says what experts are worth and not how a budget is split.
    """

    name: str
    origin: LawSource
    a: float
    b: float
    c: float
    d: float
    start: float
    most: float

    def saturate_experts(self, experts: int) -> float:
        """Ê: what the number of experts counts for."""
        return 1 / (1 / (experts - 1 + 1 / (1 / self.start - 1 / self.most)) + 1 / self.most)

    def predict_loss(self, parameters: float, experts: int) -> float:
        """Nats per token."""
        size, many = math.log10(parameters), math.log10(self.saturate_experts(experts))
        return float(10 ** (self.a * size + self.b * many + self.c * size * many + self.d))

    def compute_dense_equivalent(self, parameters: float, experts: int) -> float:
        """The dense size with the loss of a model of size N with experts (its effective parameter count)."""
        one = math.log10(self.saturate_experts(1))
        target = math.log10(self.predict_loss(parameters, experts))
        # Equation 2 with one expert, solved for log N.
        return float(10 ** ((target - self.b * one - self.d) / (self.a + self.c * one)))


@dataclass(frozen=True)
class KrajewskiLaw:
    """Krajewski 2024 (arXiv:2402.07871): L = c + (g / G^gamma + a) / N^alpha + b / D^beta, at 64 experts.

    N counts active parameters, G is the granularity: d_ff over the width of one expert.
    """

    name: str
    origin: LawSource
    c: float
    g: float
    gamma: float
    a: float
    alpha: float
    b: float
    beta: float

    def predict_loss(self, parameters: float, tokens: float, granularity: float) -> float:
        """Nats per token."""
        of_size = (self.g / granularity**self.gamma + self.a) / parameters**self.alpha
        return float(self.c + of_size + self.b / tokens**self.beta)

    def find_optimum(self, request: BudgetRequest) -> Optimum:
        """See Law."""
        pairs = request.flops / FLOPS_PER_PARAMETER_AND_TOKEN

        def predict_loss_on_budget(tokens: float) -> float:
            return self.predict_loss(pairs / tokens, tokens, request.granularity)

        tokens = minimize_golden_section(predict_loss_on_budget, 1e3, pairs)
        return Optimum(pairs / tokens, tokens, predict_loss_on_budget(tokens), list_ignored_inputs(request))


_CHINCHILLA_RUNS = (FittedRange("FLOPs", 6e18, 3e21), FittedRange("parameters", 4.4e7, 1.6e10))
_HOFFMANN = "Hoffmann 2022, arXiv:2203.15556, approach 3"

KAPLAN = KaplanLaw(
    "kaplan_2020",
    LawSource("Kaplan 2020, arXiv:2001.08361", "without embeddings", (FittedRange("parameters", 768, 1.5e9),)),
)
HOFFMANN_ROUNDED = ParametricLaw(
    "hoffmann_2022_rounded",
    LawSource(f"{_HOFFMANN}, as printed", "all parameters", _CHINCHILLA_RUNS, "exponents rounded to two digits"),
    1.69,
    406.4,
    410.7,
    0.34,
    0.28,
)
HOFFMANN = ParametricLaw(
    "hoffmann_2022",
    LawSource(f"{_HOFFMANN}, as in its source", "all parameters", _CHINCHILLA_RUNS),
    1.6934,
    406.4,
    410.7,
    0.3392,
    0.2849,
)
BESIROGLU = ParametricLaw(
    "besiroglu_2024",
    LawSource("Besiroglu 2024, arXiv:2404.10102", "all parameters", _CHINCHILLA_RUNS, "Hoffmann's runs, fitted again"),
    1.8172,
    482.01,
    2085.43,
    0.3478,
    0.3658,
)
MUENNIGHOFF = DataConstrainedLaw(
    "muennighoff_2023",
    ParametricLaw(
        "muennighoff_2023",
        LawSource(
            "Muennighoff 2023, arXiv:2305.16264",
            "all parameters",
            (FittedRange("parameters", 7e6, 8.7e9), FittedRange("tokens", 1e8, 9e11)),
            "C4; all runs with dropout 0.1",
        ),
        1.87,
        521.0,
        1488.0,
        0.3526596,
        0.3526596,
    ),
    token_decay=15.387756,
    parameter_decay=5.309743,
)
DEEPSEEK = ComputeLaw(
    "deepseek_2024",
    LawSource(
        "DeepSeek LLM 2024, arXiv:2401.02954, table 4",
        "compute per token / 6, attention included",
        (FittedRange("FLOPs", 1e17, 3e20),),
    ),
    5.8316,
    0.4757,
)
LLAMA3_ROUNDED = ComputeLaw(
    "llama3_2024_rounded",
    LawSource(
        "Llama 3 2024, arXiv:2407.21783, its text",
        "compute / 6 tokens",
        (FittedRange("FLOPs", 6e18, 1e22),),
        "exponents rounded to two digits; contradicts its own figure",
    ),
    0.29,
    0.53,
)
LLAMA3 = ComputeLaw(
    "llama3_2024",
    LawSource("Llama 3 2024, arXiv:2407.21783, its figure", "compute / 6 tokens", (FittedRange("FLOPs", 6e18, 1e22),)),
    0.299,
    0.537,
)
KRAJEWSKI = KrajewskiLaw(
    "krajewski_2024",
    LawSource(
        "Krajewski 2024, arXiv:2402.07871",
        "active parameters, 64 experts",
        (FittedRange("tokens", 1.6e10, 1.3e11), FittedRange("parameters", 1e7, 4e9)),
        "constants not confirmed",
    ),
    c=0.47,
    g=2.1,
    gamma=0.58,
    a=18.1,
    alpha=0.115,
    b=30.8,
    beta=0.147,
)

# Scaling laws of dense models: division of a budget between parameters and tokens.
DENSE: tuple[ScalingLaw, ...] = (
    KAPLAN,
    HOFFMANN_ROUNDED,
    HOFFMANN,
    BESIROGLU,
    MUENNIGHOFF,
    DEEPSEEK,
    LLAMA3_ROUNDED,
    LLAMA3,
)

_CLARK = LawSource(
    "Clark 2022, arXiv:2202.01169, table 3",
    "the dense model that gets experts",
    (FittedRange("parameters", 1.5e7, 1.3e9),),
)
# Scaling laws of mixtures of experts, for three kinds of routing.
CLARK: tuple[ClarkLaw, ...] = (
    ClarkLaw("clark_2022_s_base", _CLARK, -0.082, -0.108, 0.009, 1.104, 1.847, 314.478),
    ClarkLaw("clark_2022_rl_r", _CLARK, -0.083, -0.126, 0.012, 1.111, 1.880, 469.982),
    ClarkLaw("clark_2022_hash", _CLARK, -0.087, -0.136, 0.012, 1.157, 4.175, 477.741),
)
