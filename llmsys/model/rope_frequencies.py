"""RoPE inverse frequencies for every scaling kind (linear, NTK, YaRN, Llama 3, LongRoPE). Pure Python floats.

Formulas follow the papers named in llmsys/config/position.py. Where a paper leaves a detail open, they follow Hugging
Face, because published weights were trained with it.
"""

import math
from typing import NamedTuple, assert_never

from llmsys.config.position import (
    LinearRopeScalingConfig,
    Llama3RopeScalingConfig,
    LongRopeScalingConfig,
    NoRopeScaling,
    NtkRopeScalingConfig,
    RopeConfig,
    YarnRopeScalingConfig,
)


class RopeFrequencies(NamedTuple):
    """Radians per position of each pair of channels, and the factor on cosines and sines."""

    frequencies: tuple[float, ...]
    attention_factor: float = 1.0


def compute_rope_frequencies(
    position: RopeConfig, width: int, positions: int, length: int, *, own_base: bool = False
) -> RopeFrequencies:
    """Compute the frequencies of `width` rotated channels.

    Args:
        position: The rotary config.
        width: Rotated channels of a head.
        positions: The model's max_position_embeddings.
        length: Length of the current sequence, which NTK and LongRoPE depend on.
        own_base: Whether to use the unscaled base of sliding-window layers.
    """
    if own_base and position.sliding_theta is not None:
        return RopeFrequencies(_compute_base_frequencies(position.sliding_theta, width))
    base = _compute_base_frequencies(position.theta, width)
    match position.scaling:
        case NoRopeScaling():
            return RopeFrequencies(base)
        case LinearRopeScalingConfig() as scaling:
            return RopeFrequencies(tuple(frequency / scaling.factor for frequency in base))
        case NtkRopeScalingConfig() as scaling:
            original = scaling.original_max_position_embeddings
            theta = _compute_ntk_base(position.theta, width, scaling.factor, length, original)
            return RopeFrequencies(_compute_base_frequencies(theta, width))
        case YarnRopeScalingConfig() as scaling:
            return _compute_yarn_frequencies(scaling, position.theta, base)
        case Llama3RopeScalingConfig() as scaling:
            return RopeFrequencies(tuple(_compute_llama3_frequency(scaling, frequency) for frequency in base))
        case LongRopeScalingConfig() as scaling:
            return _compute_longrope_frequencies(scaling, base, positions, length)
        case unreachable:
            assert_never(unreachable)


def _compute_base_frequencies(theta: float, width: int) -> tuple[float, ...]:
    return tuple(theta ** -(2 * i / width) for i in range(width // 2))


def _compute_ntk_base(theta: float, width: int, factor: float, length: int, original: int) -> float:
    stretch = factor * max(length, original) / original - (factor - 1)
    return float(theta * stretch ** (width / (width - 2)))


def compute_yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's factor on cosines and sines (Peng 2023, 3.4), with DeepSeek's weight on the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _compute_yarn_frequencies(scaling: YarnRopeScalingConfig, theta: float, base: tuple[float, ...]) -> RopeFrequencies:
    """Interpolate by a ramp over the channels between `beta_fast` and `beta_slow` rotations (Peng 2023, 3.2, 3.3)."""
    width = 2 * len(base)

    def compute_correction_dim(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = compute_correction_dim(scaling.beta_fast), compute_correction_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    shares = (min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(base)))
    mixed = tuple(w * (1 - share) + w / scaling.factor * share for w, share in zip(base, shares, strict=True))
    return RopeFrequencies(mixed, _compute_yarn_attention_factor(scaling))


def _compute_yarn_attention_factor(scaling: YarnRopeScalingConfig) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return compute_yarn_mscale(scaling.factor, scaling.mscale) / compute_yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return compute_yarn_mscale(scaling.factor)


def _compute_llama3_frequency(scaling: Llama3RopeScalingConfig, frequency: float) -> float:
    rotations = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # over the original context
    if rotations > scaling.high_freq_factor:
        return frequency
    if rotations < scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def _compute_longrope_frequencies(
    scaling: LongRopeScalingConfig, base: tuple[float, ...], positions: int, length: int
) -> RopeFrequencies:
    original = scaling.original_max_position_embeddings
    long = length > original
    divisors = scaling.long_factor if long else scaling.short_factor
    amplitude = scaling.long_mscale if long else scaling.short_mscale
    if amplitude is None:
        factor = positions / original
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeFrequencies(tuple(w / divisor for w, divisor in zip(base, divisors, strict=True)), amplitude)
