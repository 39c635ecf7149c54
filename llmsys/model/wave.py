"""The waves of a rotation: how fast each pair of channels turns, under every way of stretching the context.

Pure arithmetic on Python floats; the tables of cosines are made in rotary.py. Formulas follow the papers named at each
kind in llmsys/config/position.py; where Hugging Face's implementation fixes a detail the papers leave open, it is the
one that published weights were trained with, so it is followed.
"""

import math
from typing import NamedTuple

from llmsys.config.position import Llama3Scaling, LongropeScaling, Rope, YarnScaling


class Waves(NamedTuple):
    """Radians per position for each pair of channels, and the factor on cosines and sines."""

    frequencies: tuple[float, ...]
    amplitude: float = 1.0


def waves_of(position: Rope, width: int, positions: int, length: int, *, own_base: bool = False) -> Waves:
    """The waves over `width` rotated channels for a sequence of `length` in a model made for `positions`.

    `own_base` asks for the unscaled base of sliding-window layers.
    """
    if own_base and position.sliding_theta is not None:
        return Waves(_plain(position.sliding_theta, width))
    scaling = position.scaling
    if scaling.kind == "ntk":
        original = scaling.original_max_position_embeddings
        return Waves(_plain(_ntk_base(position.theta, width, scaling.factor, length, original), width))
    plain = _plain(position.theta, width)
    if scaling.kind == "linear":
        return Waves(tuple(wave / scaling.factor for wave in plain))
    if scaling.kind == "yarn":
        return _yarn(scaling, position.theta, plain)
    if scaling.kind == "llama3":
        return Waves(tuple(_llama3(scaling, wave) for wave in plain))
    if scaling.kind == "longrope":
        return _longrope(scaling, plain, positions, length)
    return Waves(plain)


def _plain(theta: float, width: int) -> tuple[float, ...]:
    return tuple(theta ** -(2 * i / width) for i in range(width // 2))


def _ntk_base(theta: float, width: int, factor: float, length: int, original: int) -> float:
    stretch = factor * max(length, original) / original - (factor - 1)
    return float(theta * stretch ** (width / (width - 2)))


def sharpening(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on cosines and sines (Peng 2023, 3.4), with DeepSeek's weight on the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(scaling: YarnScaling, theta: float, plain: tuple[float, ...]) -> Waves:
    """Peng 2023, 3.2 and 3.3: a ramp over the channels between `beta_fast` and `beta_slow` turns."""
    width = 2 * len(plain)

    def channel(turns: float) -> float:
        context = scaling.original_max_position_embeddings
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    shares = (min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(plain)))
    mixed = tuple(wave * (1 - share) + wave / scaling.factor * share for wave, share in zip(plain, shares, strict=True))
    return Waves(mixed, _yarn_amplitude(scaling))


def _yarn_amplitude(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return sharpening(scaling.factor, scaling.mscale) / sharpening(scaling.factor, scaling.mscale_all_dim)
    return sharpening(scaling.factor)


def _llama3(scaling: Llama3Scaling, wave: float) -> float:
    turns = scaling.original_max_position_embeddings * wave / (2 * math.pi)  # over the old context
    if turns > scaling.high_freq_factor:
        return wave
    if turns < scaling.low_freq_factor:
        return wave / scaling.factor
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * wave / scaling.factor + smooth * wave


def _longrope(scaling: LongropeScaling, plain: tuple[float, ...], positions: int, length: int) -> Waves:
    original = scaling.original_max_position_embeddings
    long = length > original
    divisors = scaling.long_factor if long else scaling.short_factor
    amplitude = scaling.long_mscale if long else scaling.short_mscale
    if amplitude is None:
        factor = positions / original
        amplitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Waves(tuple(wave / divisor for wave, divisor in zip(plain, divisors, strict=True)), amplitude)
