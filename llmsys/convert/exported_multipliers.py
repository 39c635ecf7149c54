"""Fold the multipliers of a parametrization into exported weights, which then compute the same
without them.
"""

from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.parametrization import StandardParametrizationConfig
from llmsys.errors import ConfigError
from llmsys.model.parametrization import (
    compute_exported_factor,
    compute_head_factor,
    compute_score_factor,
)


def remove_multipliers(model: ModelConfig) -> ModelConfig:
    """Return a model in the standard parametrization that takes the weights of `scale_weight`.

    Args:
        model: Any model.

    Returns:
        The model; itself where it has the standard parametrization.

    Raises:
        ConfigError: A multiplier fits into no weight.
    """
    if model.parametrization.kind == "standard":
        return model
    if (
        model.tie_word_embeddings
        and compute_head_factor(model) != 1
        and getattr(model.norm, "unit_offset", False)
    ):
        raise ConfigError(
            f"model.parametrization.kind={model.parametrization.kind} multiplies the input of the "
            "tied head, which norm.unit_offset=true keeps out of the final norm. Use "
            "norm.unit_offset=false."
        )
    has_norms = getattr(model.attention, "qk_norm", "none") != "none"
    if has_norms and getattr(model.norm, "unit_offset", False):
        own = getattr(model.attention, "scale", None) is not None
        if compute_score_factor(model, model.head_dim, has_own_scale=own) != 1:
            raise ConfigError(
                f"model.parametrization.kind={model.parametrization.kind} multiplies attention "
                "scores, which norm.unit_offset=true keeps out of the norms of queries. Use "
                "norm.unit_offset=false."
            )
    if getattr(model.attention, "clip", None) is not None:
        raise ConfigError(
            f"model.attention.clip={model.attention.clip:g} clamps queries, so the score "  # type: ignore[union-attr]
            "multiplier of "
            f"parametrization.kind={model.parametrization.kind} fits into no weight. Use clip=null."
        )
    return model.model_copy(update={"parametrization": StandardParametrizationConfig()})


def scale_weight(model: ModelConfig, name: str, weight: Tensor) -> Tensor:
    """Return a weight times the multiplier that it has in an export.

    Args:
        model: The model with its parametrization.
        name: Name in a checkpoint, `parameter/…` or `buffer/…`.
        weight: The value.

    Returns:
        The value to export; `weight` itself where there is no multiplier.
    """
    factor = compute_exported_factor(model, name.removeprefix("parameter/"))
    return weight if factor == 1.0 else weight * factor
