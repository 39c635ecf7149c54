"""Initial parameter values: a pure function of (config, parameter name, shape, seed).

Invariants:
- No generator is shared between parameters. The values do not depend on the order of creation, the
  number of processes or the sharding: every element is a function of its index, and a rank computes
  its slice only.
"""

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import assert_never

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.norm import (
    DeepNormConfig,
    LayerNormConfig,
    NormConfig,
    OutputNormConfig,
    ParallelBlockConfig,
    PostNormConfig,
    PreNormConfig,
    ReversibleConfig,
    RmsNormConfig,
    SandwichNormConfig,
)
from llmsys.config.python_blocks import PythonAttentionConfig, PythonFeedForwardConfig
from llmsys.errors import ConfigError
from llmsys.model.deepnorm import compute_deepnorm_constants
from llmsys.model.indexed_normal import draw_normal
from llmsys.model.parametrization import compute_std, count_init_branches
from llmsys.model.python_block import build_block_shape
from llmsys.model.python_block_check import get_python_block
from llmsys.model.transformer import Transformer

# Version of the initial values of a config and seed; 1 drew whole tensors with torch's generator.
VERSION = 2

# (First index, size) of a slice in each dim.
Region = Sequence[tuple[int, int]]

# Returns a slice of the initial value of a parameter by name and full shape; None: all of it.
Initializer = Callable[[str, torch.Size, Region | None], Tensor]

# The last maps of the residual branches; every block adds them to the stream.
RESIDUAL_OUTPUTS = ("attention.o_proj", "down_proj", "fc2_latent_proj")
# What DeepNorm makes smaller: feed-forward, values and outputs; queries and keys stay (Wang 2022,
# figure 2).
DEEPNORM_SCALED = ("v_proj", "o_proj", "kv_b_proj", "gate_proj", "up_proj", "down_proj")
# The least rate of decay of linear attention, over the largest: its logarithm is finite.
MIN_DECAY_SHARE = 1 / 1600
# The least and the largest initial step of Mamba-2, as in the authors' code.
INITIAL_STEPS = (0.001, 0.1)
TABLES = ("embed", "positions", "token_types", "relative_bias", "value_embedding", "head")


def build_initializer(config: ModelConfig, seed: int, *, draws: bool = True) -> Initializer:
    """Build the function that computes initial values.

    Args:
        config: The full model.
        seed: The run's seed.
        draws: Compute nothing where False: a checkpoint will replace the values, which are NaN
            until then.

    Returns:
        A function of (name, shape, region).
    """

    def compute_value(name: str, shape: torch.Size, region: Region | None) -> Tensor:
        if draws:
            return compute_initial_value(config, name, shape, seed, region)
        return torch.full(list(shape) if region is None else [size for _, size in region], math.nan)

    return compute_value


def compute_initial_value(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...] | torch.Size,
    seed: int,
    region: Region | None = None,
) -> Tensor:
    """Compute the initial value of one parameter, or a slice of it.

    A class of `kind: python` may give its own values, and decays of linear attention have theirs.
    Norm weights are 1 (0 with unit_offset) and scales of value embeddings and skips 1, biases and
    the table of bigrams 0. Everything else is normal with the standard deviation of
    `compute_init_std`.

    Args:
        config: The full model.
        name: Parameter name, as in `Transformer.named_parameters`.
        shape: Shape of the full parameter.
        seed: The run's seed; each parameter derives its own key from it.
        region: The slice; None: all of it.

    Returns:
        The slice, float32 on the CPU. It has the bits of the full tensor.
    """
    layer, _, kind = name.rpartition(".")
    region = [(0, length) for length in shape] if region is None else region
    sizes = [size for _, size in region]
    own = _compute_linear_attention_value(config, name, shape, seed)
    if own is None:
        own = _compute_own_value(config, name, tuple(shape))
    if own is not None:
        for dim, (start, size) in enumerate(region):
            own = own.narrow(dim, start, size)
        return own.clone()
    if kind.endswith("bias") or layer == "bigram_embed":
        return torch.zeros(sizes)
    if kind in ("value_scale", "skip_scales"):
        return torch.ones(sizes)
    if layer.endswith("norm"):
        return torch.zeros(sizes) if _has_unit_offset(config.norm, layer) else torch.ones(sizes)
    return draw_normal(_compute_parameter_key(name, seed), shape, region).mul_(
        compute_init_std(config, name, shape)
    )


def _compute_linear_attention_value(
    config: ModelConfig, name: str, shape: tuple[int, ...] | torch.Size, seed: int
) -> Tensor | None:
    """Return the whole initial value of a vector of linear attention; None for other parameters.

    Rates of decay are uniform from 0, of kimi_delta from 1. Steps are softplus(1), as in
    Qwen3-Next; of other kinds their logarithms are uniform from 0.001 to 0.1.
    """
    linear = config.linear_attention
    if linear is None:
        return None
    match name.rpartition("attention.")[2]:
        case "A_log":
            low = 1.0 if linear.kind == "kimi_delta" else 0.0
            share = _draw_uniform(name, shape, seed).clamp(min=MIN_DECAY_SHARE)
            return (low + (linear.max_initial_decay - low) * share).log().float()
        case "dt_bias" if linear.kind != "gated_delta":
            low, high = (math.log(step) for step in INITIAL_STEPS)
            steps = (low + (high - low) * _draw_uniform(name, shape, seed)).exp()
            # The inverse of softplus.
            return (steps + torch.log(-torch.expm1(-steps))).float()
        case "dt_bias" | "D" | "o_norm.weight":
            return torch.ones(shape)
        case _:
            return None


def _draw_uniform(name: str, shape: tuple[int, ...] | torch.Size, seed: int) -> Tensor:
    """Return numbers from 0 to 1, float64."""
    whole = [(0, length) for length in shape]
    drawn = draw_normal(_compute_parameter_key(name, seed), shape, whole)
    return 0.5 * (1 + torch.erf(drawn.double() / math.sqrt(2)))


def _compute_own_value(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """Return the whole value that a class of the user's own gives a parameter; None: the default.

    Raises:
        ConfigError: The value is no float32 tensor of the parameter's shape.
    """
    parts = name.split(".", 3)
    if parts[0] != "blocks" or len(parts) < 4:
        return None
    _, layer, branch, own = parts
    if branch not in ("attention", "feed_forward"):
        return None
    section = config.attention if branch == "attention" else config.feed_forward
    if not isinstance(section, PythonAttentionConfig | PythonFeedForwardConfig):
        return None
    if branch == "feed_forward" and config.is_moe_layer(int(layer)):
        return None
    block = get_python_block(section)
    value = block.compute_initial_value(build_block_shape(block, config, int(layer)), own, shape)
    if value is None:
        return None
    if isinstance(value, int | float):
        return torch.full(shape, float(value))
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype != torch.float32:
        found = (
            f"{tuple(value.shape)} in {value.dtype}"
            if isinstance(value, Tensor)
            else type(value).__name__
        )
        raise ConfigError(
            f"{block.key}: {type(block).__name__}.compute_initial_value returned {found} for "
            f"{own}, which is {shape}. Return a float32 tensor of that shape, a number or None."
        )
    return value


def compute_init_std(config: ModelConfig, name: str, shape: tuple[int, ...] | torch.Size) -> float:
    """Return the standard deviation of the initial values of a matrix or table.

    Args:
        config: The full model; `model.parametrization` decides how the value follows from widths
            and depth.
        name: Name of the parameter in the model.
        shape: Its full shape, whatever a rank holds of it.

    Returns:
        The standard deviation.
    """
    return compute_std(config, name, _compute_standard_std(config, name, shape))


def _compute_standard_std(
    config: ModelConfig, name: str, shape: tuple[int, ...] | torch.Size
) -> float:
    """Return the standard deviation under the standard parametrization.

    normal: `initializer_range`, divided by the root of the number of branches, two a layer, for
    projections into the residual stream of a pre-norm block (Radford 2019, GPT-2, section 2.3).
    xavier: sqrt(2 / (fan in + fan out)) for matrices (Glorot 2010). DeepNorm multiplies by its
    beta.
    """
    layer, _, kind = name.rpartition(".")
    owner = layer if kind == "weight" else name
    if owner.split(".")[-1] in TABLES or owner.endswith("source_embed"):
        own = (
            config.embedding.initializer_range
            if owner.endswith("embed") or owner == "head"
            else None
        )
        return own or config.initializer_range
    std = config.initializer_range
    if config.initializer == "xavier" and len(shape) >= 2:
        std = math.sqrt(2 / (shape[-1] + shape[-2]))
    if owner.endswith("conv_weight"):
        return config.initializer_range  # a row is one channel's, and no matrix
    if owner.endswith("length_proj"):
        # a random projection to k positions keeps lengths (Wang 2020, theorem 2)
        return 1 / math.sqrt(shape[-2])
    match config.residual:
        case DeepNormConfig():
            scaled = owner.endswith(DEEPNORM_SCALED)
            return std * (
                compute_deepnorm_constants(config, encoder=name.startswith("encoder.")).beta
                if scaled
                else 1
            )
        case PostNormConfig():
            return std
        case (
            PreNormConfig()
            | SandwichNormConfig()
            | OutputNormConfig()
            | ParallelBlockConfig()
            | ReversibleConfig()
        ):
            # So that the variance of the residual stream does not grow with depth (GPT-2).
            depth_scaled = config.initializer == "normal" and owner.endswith(RESIDUAL_OUTPUTS)
            # Experts in latents add to the stream by fc2_latent_proj.
            if config.moe is not None and config.moe.latent_size is not None:
                depth_scaled = depth_scaled and ".experts." not in owner
            return std / math.sqrt(count_init_branches(config)) if depth_scaled else std
        case unreachable:
            assert_never(unreachable)


def _has_unit_offset(norm: NormConfig, layer: str) -> bool:
    match norm:
        case RmsNormConfig(unit_offset=unit_offset):
            # Norms of latents (q_a_norm, kv_a_norm) are plain RMSNorm in every model.
            return unit_offset and not layer.endswith("_a_norm")
        case LayerNormConfig():
            return False
        case unreachable:
            assert_never(unreachable)


@torch.no_grad()
def initialize_parameters(model: Transformer, seed: int) -> None:
    """Fill every parameter and buffer of an unsharded model.

    Args:
        model: A model with storage.
        seed: As for `compute_initial_value`.
    """
    for name, parameter in model.named_parameters():
        parameter.copy_(compute_initial_value(model.config, name, parameter.shape, seed))
    model.reset_buffers()


def _compute_parameter_key(name: str, seed: int) -> int:
    # Python's hash() differs from process to process; blake2b does not.
    return int.from_bytes(blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")
