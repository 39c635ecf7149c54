"""Constants of DeepNorm: the residual weight alpha and the init scale beta (Wang 2022, table 2)."""

from typing import NamedTuple

from llmsys.config.model import ModelConfig
from llmsys.config.norm import DeepNormConfig


class DeepNormConstants(NamedTuple):
    """alpha and beta of norm(alpha · x + f(x)): beta scales the initial weights of f."""

    alpha: float
    beta: float


def compute_deepnorm_constants(config: ModelConfig, *, encoder: bool = False) -> DeepNormConstants:
    """Return DeepNorm's alpha and beta of a stack (Wang 2022, arXiv:2203.00555, table 1).

    Args:
        config: The full model: the encoder's constants depend on the depth of both stacks.
        encoder: Return those of the encoder of an encoder-decoder. Default: of the decoder or
            only stack.

    Returns:
        The weight of the stream in residual additions, and the factor on initial values.
    """
    if config.family != "encoder_decoder":
        # Encoder-only and decoder-only have the same constants in the paper.
        depth = config.num_hidden_layers
        return DeepNormConstants((2 * depth) ** 0.25, (8 * depth) ** -0.25)
    below, above = config.encoder_model.num_hidden_layers, config.num_hidden_layers
    if encoder:
        return DeepNormConstants(
            0.81 * (below**4 * above) ** (1 / 16), 0.87 * (below**4 * above) ** (-1 / 16)
        )
    return DeepNormConstants((3 * above) ** 0.25, (12 * above) ** -0.25)


def compute_deepnorm_alpha(config: ModelConfig, *, encoder: bool = False) -> float:
    """Return the weight of the stream in residual additions.

    Args:
        config: The full model.
        encoder: Of the encoder of an encoder-decoder.

    Returns:
        Alpha; 1 without DeepNorm.
    """
    has_deepnorm = isinstance(config.residual, DeepNormConfig)
    return compute_deepnorm_constants(config, encoder=encoder).alpha if has_deepnorm else 1.0
