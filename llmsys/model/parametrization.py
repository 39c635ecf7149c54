"""Multipliers, initial values and learning rates that a parametrization derives from the size of a
model.

`m` is hidden_size / base_hidden_size, `l` num_hidden_layers / base_num_hidden_layers; other widths
have their own m.

| tensor | µP: std, rate | CompleteP: further factors | unit-scaled: std, rate |
|---|---|---|---|
| embedding tables | 1, 1 | | 1, 1 / sqrt(outputs) |
| hidden matrices | 1 / sqrt(m), 1 / m | rate l^(α - 1) | 1 / sqrt(in), 1 / (in · sqrt(layers)) |
| to a fixed width: router, latents | 1 / m, 1 / m | rate l^(α - 1) | 1 / inputs, 1 / inputs |
| head, its input multiplied by 1 / m or 1 / inputs | 1, 1 | | 1, 1 |
| vectors | as they are, 1 | rate l^(α - 1) in blocks | as they are, 1 / sqrt(channels) |
| output of a branch | | multiplied by l^-α | multiplied by 1 / sqrt(layers) |

`n` is the number of inputs. µP's columns are factors on the standard ones. Published multipliers of
hidden weights are folded into std and rate: (multiplier, std, rate) trains as (1, multiplier · std,
multiplier · rate) does under Adam (Yang 2023, arXiv:2310.02244), and kernels, fp8 layers and
exports see plain weights.
"""

import math
from typing import Literal, NamedTuple, assert_never

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.norm import PreNormConfig
from llmsys.config.parametrization import (
    CompletePConfig,
    MupConfig,
    StandardParametrizationConfig,
    UnitScaledConfig,
)
from llmsys.config.parametrization_factors import compute_head_factor, compute_score_factor

Width = Literal["hidden", "intermediate", "expert", "latent"]

TABLES = ("embed", "source_embed", "positions", "relative_bias")
# Rows do not grow with the model: the width of a latent, the number of experts.
OUTPUTS = ("router", "shared_gate", "q_a_proj", "kv_a_proj")


class MatrixInputs(NamedTuple):
    """Inputs of a matrix: the width that they belong to, their number, and if the number of
    outputs is fixed.
    """

    width: Width
    size: int
    has_fixed_outputs: bool


def find_matrix_inputs(config: ModelConfig, name: str) -> MatrixInputs | None:
    """Find the inputs of a parameter; None for tables, the head, norms, biases and other vectors.

    Args:
        config: The model.
        name: As in `Transformer.named_parameters`.

    Returns:
        The inputs.
    """
    owner = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("bias") or owner.endswith("norm") or owner in (*TABLES, "head", "sinks"):
        return None
    attention = config.attention
    moe = config.moe
    if owner in ("q_b_proj", "kv_b_proj") and attention.kind == "latent":
        rank = attention.kv_lora_rank if owner == "kv_b_proj" else attention.q_lora_rank
        return MatrixInputs("latent", rank or 1, False)
    if owner == "o_proj":
        value = attention.v_head_dim if attention.kind == "latent" else config.head_dim
        return MatrixInputs("hidden", config.num_attention_heads * value, False)
    if owner == "down_proj":
        if moe is None or (".experts." not in name and ".shared." not in name):
            stack = config.encoder_model if name.startswith("encoder.") else config
            return MatrixInputs("intermediate", stack.intermediate_size, False)
        is_routed = ".experts." in name
        return MatrixInputs(
            "expert", moe.moe_intermediate_size if is_routed else moe.shared_expert_size, False
        )
    return MatrixInputs("hidden", config.hidden_size, owner in OUTPUTS)


def _compute_width_ratio(config: ModelConfig, mup: MupConfig, width: Width) -> float:
    """Return m of a width: its size over that of the base model."""
    match width:
        case "intermediate" if mup.base_intermediate_size is not None:
            return config.intermediate_size / mup.base_intermediate_size
        case "expert" if mup.base_moe_intermediate_size is not None and config.moe is not None:
            return config.moe.moe_intermediate_size / mup.base_moe_intermediate_size
        case "latent":
            return 1.0
        case "hidden" | "intermediate" | "expert":
            return config.hidden_size / mup.base_hidden_size
        case unreachable:
            assert_never(unreachable)


def compute_std(config: ModelConfig, name: str, standard: float) -> float:
    """Compute the standard deviation of the initial values of a matrix or table.

    Args:
        config: The full model.
        name: Parameter name.
        standard: That of the standard parametrization.

    Returns:
        That of the configured one.
    """
    match config.parametrization:
        case StandardParametrizationConfig():
            return standard
        case MupConfig() as mup:  # CompleteP too
            inputs = find_matrix_inputs(config, name)
            if inputs is None:
                return standard
            ratio = _compute_width_ratio(config, mup, inputs.width)
            return standard / (ratio if inputs.has_fixed_outputs else math.sqrt(ratio))
        case UnitScaledConfig():
            inputs = find_matrix_inputs(config, name)
            if inputs is None:
                return 1.0
            return 1 / inputs.size if inputs.has_fixed_outputs else inputs.size**-0.5
        case unreachable:
            assert_never(unreachable)


def compute_rate_factor(config: ModelConfig, name: str, width_exponent: float = 1.0) -> float:
    """Compute the factor on the learning rate of a parameter.

    Args:
        config: The full model.
        name: Parameter name.
        width_exponent: Power of 1 / m in µP: 1 for updates whose elements have one size (Adam,
            Lion). Orthogonal updates of that size have a spectral norm that grows by sqrt(m) only:
            0.5.

    Returns:
        The factor; its inverse applies to weight decay, so that rate · decay is that of the base
        model.
    """
    match config.parametrization:
        case StandardParametrizationConfig():
            return 1.0
        case MupConfig() as mup:
            inputs = find_matrix_inputs(config, name)
            factor = 1.0
            if inputs is not None:
                # Of a fixed number of outputs each follows the whole update, whose norm grows by
                # sqrt(m) even so.
                exponent = 1.0 if inputs.has_fixed_outputs else width_exponent
                factor = float(_compute_width_ratio(config, mup, inputs.width) ** -exponent)
            if isinstance(mup, CompletePConfig) and "blocks." in name:
                factor *= float(
                    (config.num_hidden_layers / mup.base_num_hidden_layers)
                    ** (mup.depth_exponent - 1)
                )
            return factor
        case UnitScaledConfig():
            return _compute_unit_rate(config, name)
        case unreachable:
            assert_never(unreachable)


def _compute_unit_rate(config: ModelConfig, name: str) -> float:
    inputs = find_matrix_inputs(config, name)
    layers = config.num_hidden_layers
    depth = layers**-0.5 if "blocks." in name else 1.0
    if inputs is not None:
        return depth / inputs.size
    # u-µP trains no gains. A rate of 1 would replace them in a step, so they learn as an embedding
    # does.
    return 1.0 if name == "head.weight" else depth * config.hidden_size**-0.5


def count_init_branches(config: ModelConfig) -> int:
    """Return the branches of the residual stream whose number divides the initial values of their
    outputs (GPT-2): those of the base model.
    """
    mup = config.parametrization
    return (
        2 * mup.base_num_hidden_layers if isinstance(mup, CompletePConfig) else config.num_branches
    )


def compute_branch_factor(config: ModelConfig) -> float:
    """Return the factor on the output of a branch before it is added to the stream: that of the
    model times that of its parametrization.
    """
    own = config.residual.multiplier if isinstance(config.residual, PreNormConfig) else 1.0
    return own * _compute_parametrized_factor(config)


def _compute_parametrized_factor(config: ModelConfig) -> float:
    """Return the part of `compute_branch_factor` that exported weights hold."""
    match config.parametrization:
        case CompletePConfig() as mup:
            return float(
                (mup.base_num_hidden_layers / config.num_hidden_layers) ** mup.depth_exponent
            )
        case StandardParametrizationConfig() | MupConfig():
            return 1.0
        case UnitScaledConfig() as unit:
            return float(unit.residual_multiplier * config.num_hidden_layers**-0.5)
        case unreachable:
            assert_never(unreachable)


def compute_exported_factor(config: ModelConfig, name: str) -> float:
    """Return the factor on a parameter with which a model without multipliers computes the same.

    A tied head cannot have one: the final norm has it.

    Args:
        config: The model.
        name: Parameter name.

    Returns:
        The factor.
    """
    owner = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    attention = config.attention
    width = config.head_dim
    if not isinstance(attention, LatentAttentionConfig | MultiHeadAttentionConfig):
        return 1.0  # kinds that no parametrization but the standard one takes
    queries: tuple[str, ...] = ("q_proj",)
    if isinstance(attention, LatentAttentionConfig):
        width = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        queries = ("q_proj", "q_b_proj")
    elif attention.qk_norm != "none":
        queries = ("q_norm",)
    if name in (("norm.weight", "norm.bias") if config.tie_word_embeddings else ("head.weight",)):
        return compute_head_factor(config)
    if owner in ("o_proj", "down_proj", "down_bias"):
        return _compute_parametrized_factor(config)
    if owner in queries:
        return compute_score_factor(config, width, has_own_scale=attention.scale is not None)
    return 1.0
