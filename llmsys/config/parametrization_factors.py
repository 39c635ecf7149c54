"""Multipliers of a parametrization that an export must fold into weights, or be refused:
of the head's input and of attention scores. llmsys/model/parametrization.py has the others.
"""

import math
from typing import assert_never

from llmsys.config.model import ModelConfig
from llmsys.config.parametrization import (
    MupConfig,
    StandardParametrizationConfig,
    UnitScaledConfig,
)


def compute_head_factor(config: ModelConfig) -> float:
    """Return the factor on the input of the head.

    Args:
        config: The model.

    Returns:
        The factor.
    """
    match config.parametrization:
        case StandardParametrizationConfig():
            return 1.0
        case MupConfig() as mup:
            return mup.base_hidden_size / config.hidden_size
        case UnitScaledConfig():
            return 1 / config.hidden_size
        case unreachable:
            assert_never(unreachable)


def compute_score_factor(
    config: ModelConfig, head_dim: int, *, has_own_scale: bool = False
) -> float:
    """Return the factor on the scale of attention scores, which becomes proportional to 1 /
    head_dim.

    Args:
        config: The model.
        head_dim: Channels of a query.
        has_own_scale: The scale is a number of the config, not 1 / sqrt(head_dim).

    Returns:
        The factor.
    """
    match config.parametrization:
        case StandardParametrizationConfig():
            return 1.0
        case MupConfig() as mup:
            ratio = (mup.base_head_dim or head_dim) / head_dim
            return ratio if has_own_scale else math.sqrt(ratio)
        case UnitScaledConfig() as unit:
            return float(unit.attention_multiplier * head_dim**-0.5)
        case unreachable:
            assert_never(unreachable)
