"""Models that compute the same with changed weights: without the multipliers of a parametrization,
and with the other pairing of rotated channels. `llmsys.convert.exported_weights` changes the
weights.
"""

from llmsys.config.attention import MultiHeadAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parametrization import StandardParametrizationConfig
from llmsys.config.parametrization_factors import compute_head_factor, compute_score_factor
from llmsys.config.position import RopeConfig
from llmsys.errors import ConfigError


def remove_multipliers(model: ModelConfig) -> ModelConfig:
    """Return a model in the standard parametrization that takes the weights of `change_weight`.

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


def find_other_pairing(model: ModelConfig) -> ModelConfig | None:
    """Return the model with the other pairing of rotated channels, whose queries and keys have
    their channels in another order; None where no order would do.

    Scores are sums over channels, which any order leaves as they are.

    Args:
        model: a model without multipliers.

    Returns:
        The model that pairs neighbours where this one pairs halves, or the reverse.
    """
    position = model.position
    # Encoder-decoders share a position section, and latent attention splits its heads.
    if (
        not isinstance(position, RopeConfig)
        or type(model.attention) is not MultiHeadAttentionConfig
        or model.family == "encoder_decoder"
    ):
        return None
    other = "halves" if position.pairing == "neighbours" else "neighbours"
    return model.model_copy(update={"position": position.model_copy(update={"pairing": other})})
