"""The published laws of dense models, their constants as printed and the runs behind them.

Two laws appear twice, with the digits their paper rounds to and with those of its figure or source:
rounding an exponent moves the optimum by a quarter to a half, so neither is quietly preferred.
"""

from llmsys.estimate.scaling.chinchilla import DataConstrainedLaw, ParametricLaw
from llmsys.estimate.scaling.law import ComputeLaw, FittedRange, KaplanLaw, LawSource, ScalingLaw

_CHINCHILLA_RUNS = (FittedRange("FLOPs", 6e18, 3e21), FittedRange("parameters", 4.4e7, 1.6e10))
_HOFFMANN = "Hoffmann 2022, arXiv:2203.15556, approach"

KAPLAN = KaplanLaw(
    "kaplan_2020",
    LawSource(
        "Kaplan 2020, arXiv:2001.08361",
        "without embeddings",
        (FittedRange("parameters", 768, 1.5e9),),
    ),
)
# The paper prints exponents of 0.50 and 0.51. These are least squares through the nine rows of
# tables 3 and A3.
HOFFMANN_FRONTIER = ComputeLaw(
    "hoffmann_2022_approach_1",
    LawSource(
        f"{_HOFFMANN} 1, table 3",
        "all parameters",
        _CHINCHILLA_RUNS,
        "the lowest loss of training curves",
    ),
    1.681,
    0.5019,
)
HOFFMANN_ISOFLOP = ComputeLaw(
    "hoffmann_2022_approach_2",
    LawSource(
        f"{_HOFFMANN} 2, table A3", "all parameters", _CHINCHILLA_RUNS, "profiles of equal compute"
    ),
    1.148,
    0.5101,
)
HOFFMANN_ROUNDED = ParametricLaw(
    "hoffmann_2022_rounded",
    LawSource(
        f"{_HOFFMANN} 3, as printed",
        "all parameters",
        _CHINCHILLA_RUNS,
        "exponents rounded to two digits",
    ),
    1.69,
    406.4,
    410.7,
    0.34,
    0.28,
)
HOFFMANN = ParametricLaw(
    "hoffmann_2022",
    LawSource(f"{_HOFFMANN} 3, as in its source", "all parameters", _CHINCHILLA_RUNS),
    1.6934,
    406.4,
    410.7,
    0.3392,
    0.2849,
)
BESIROGLU = ParametricLaw(
    "besiroglu_2024",
    LawSource(
        "Besiroglu 2024, arXiv:2404.10102",
        "all parameters",
        _CHINCHILLA_RUNS,
        "Hoffmann's runs, fitted again",
    ),
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
    LawSource(
        "Llama 3 2024, arXiv:2407.21783, its figure",
        "compute / 6 tokens",
        (FittedRange("FLOPs", 6e18, 1e22),),
    ),
    0.299,
    0.537,
)
# Scaling laws of dense models: division of a budget between parameters and tokens.
DENSE: tuple[ScalingLaw, ...] = (
    KAPLAN,
    HOFFMANN_FRONTIER,
    HOFFMANN_ISOFLOP,
    HOFFMANN_ROUNDED,
    HOFFMANN,
    BESIROGLU,
    MUENNIGHOFF,
    DEEPSEEK,
    LLAMA3_ROUNDED,
    LLAMA3,
)
