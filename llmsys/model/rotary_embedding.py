"""Rotary position embedding (RoPE): angle tables and the rotation of queries and keys.

Dynamic NTK and LongRoPE change their frequencies when a sequence grows past the original context.
Cached keys were rotated with the old frequencies, in every layer, so the cache must then be
computed again.

Inverse frequencies of every scaling kind (linear, NTK, YaRN, Llama 3, LongRoPE) are Python floats.
Formulas follow the papers named in llmsys/config/position.py. Where a paper leaves a detail open,
they follow Hugging Face, because published weights were trained with it."""

import math
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from llmsys.config.layer_types import LayerType
from llmsys.config.model import ModelConfig
from llmsys.config.position import (
    LinearRopeScalingConfig,
    Llama3RopeScalingConfig,
    LongRopeScalingConfig,
    NoRopeScaling,
    NtkRopeScalingConfig,
    RopeConfig,
    YarnRopeScalingConfig,
    is_length_dependent,
)
from llmsys.model import cpu_kernels
from llmsys.model.kv_cache import KeyValueCache


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
            return RopeFrequencies(
                tuple(_compute_llama3_frequency(scaling, frequency) for frequency in base)
            )
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
    """Return YaRN's factor on cosines and sines (Peng 2023, arXiv:2309.00071, 3.4).

    Args:
        factor: Length over the length that the model was trained with.
        weight: DeepSeek's weight on the logarithm (`mscale`).

    Returns:
        0.1 · weight · ln(factor) + 1; 1 for a factor of at most 1.
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _compute_yarn_frequencies(
    scaling: YarnRopeScalingConfig, theta: float, base: tuple[float, ...]
) -> RopeFrequencies:
    """Interpolate by a ramp over the channels between `beta_fast` and `beta_slow` rotations
    (Peng 2023, 3.2, 3.3).
    """
    width = 2 * len(base)

    def compute_correction_dim(rotations: float) -> float:
        context = scaling.original_max_position_embeddings
        # The index of the channel that makes this many rotations over the original context.
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = compute_correction_dim(scaling.beta_fast), compute_correction_dim(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # A ramp of no width would divide by zero.
    high += 0.001 if low == high else 0
    shares = (min(max((i - low) / (high - low), 0.0), 1.0) for i in range(len(base)))
    mixed = tuple(
        w * (1 - share) + w / scaling.factor * share for w, share in zip(base, shares, strict=True)
    )
    return RopeFrequencies(mixed, _compute_yarn_attention_factor(scaling))


def _compute_yarn_attention_factor(scaling: YarnRopeScalingConfig) -> float:
    """Return YaRN's factor on cosines and sines: the config's, else the quotient of DeepSeek's two
    weights, else the paper's.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return compute_yarn_mscale(scaling.factor, scaling.mscale) / compute_yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return compute_yarn_mscale(scaling.factor)


def _compute_llama3_frequency(scaling: Llama3RopeScalingConfig, frequency: float) -> float:
    # over the original context
    rotations = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    if rotations > scaling.high_freq_factor:
        return frequency
    if rotations < scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (rotations - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
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
    return RopeFrequencies(
        tuple(w / divisor for w, divisor in zip(base, divisors, strict=True)), amplitude
    )


# B rows, T positions, P positions of the table, H heads, K width of a head, R rotated channels of
# it


class RotaryCosSin:
    """Cosines and signed sines of the positions of one forward pass. Not a tensor, so that no
    wrapper casts it.
    """

    def __init__(self, cos: Tensor, sin: Tensor, pairing: str = "halves") -> None:
        self.cos = cos
        self.sin = sin
        self.pairing = pairing
        self._other: RotaryCosSin | None = None

    def to_pairing(self, pairing: str) -> "RotaryCosSin":
        """Return the rotation by the same angles of channels that are paired otherwise.

        Args:
            pairing: `halves` or `neighbours`.

        Returns:
            This rotation, or one that is built at the first call, for all layers.
        """
        if pairing == self.pairing:
            return self
        if self._other is None:
            half = self.cos.shape[-1] // 2
            # The second of each pair, whose sine has its own sign.
            second = slice(half, None) if self.pairing == "halves" else slice(1, None, 2)
            tables = _expand_pairs(self.cos[..., second], self.sin[..., second], pairing)
            self._other = RotaryCosSin(*tables, pairing)
        return self._other

    def __call__(self, x_BTHK: Tensor) -> Tensor:
        """Rotate the first R channels of each head, and keep the others.

        Args:
            x_BTHK: Queries or keys of the positions that this object was built for.

        Returns:
            The rotated heads, in the shape and dtype of the input. The product is computed in
            float32.
        """
        width = self.cos.shape[-1]
        if width == x_BTHK.shape[-1]:
            return self._rotate_channels(x_BTHK)
        return torch.cat([self._rotate_channels(x_BTHK[..., :width]), x_BTHK[..., width:]], dim=-1)

    def _rotate_channels(self, x_BTHR: Tensor) -> Tensor:
        if self.pairing == "halves" and cpu_kernels.is_cpu_rotary_supported(x_BTHR, self.cos):
            return cpu_kernels.rotate_halves(x_BTHR, self.cos, self.sin)
        rotated_BTHR: Tensor = x_BTHR * self.cos + self._swap_partners(x_BTHR) * self.sin
        return rotated_BTHR.to(x_BTHR.dtype)

    def _swap_partners(self, x_BTHR: Tensor) -> Tensor:
        if self.pairing == "halves":  # i with i + R/2, as in Hugging Face's Llama
            return torch.roll(x_BTHR, x_BTHR.shape[-1] // 2, dims=-1)
        # Neighbours: 2i with 2i + 1.
        swapped_BTHR: Tensor = x_BTHR.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return swapped_BTHR


def _expand_pairs(cos: Tensor, sin: Tensor, pairing: str) -> tuple[Tensor, Tensor]:
    """Return the cosines and signed sines of all channels, from those of each pair."""
    # The first of a pair gets minus its partner; a signed table saves a negation per rotation.
    if pairing == "halves":
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return cos.repeat_interleave(2, dim=-1), torch.stack([-sin, sin], dim=-1).flatten(-2)


@dataclass
class _CosSinTable:
    cos_PR: Tensor
    sin_PR: Tensor


class RotaryEmbedding:
    """Angles m · theta^(-2i/R) of every position m (Su 2021, arXiv:2104.09864, 3.2.2), with the
    configured scaling.
    """

    def __init__(self, config: ModelConfig, position: RopeConfig) -> None:
        self.width = config.rotary_channels
        self.positions = config.max_position_embeddings
        self.position = position
        self._tables: dict[RopeFrequencies, _CosSinTable] = {}

    def __call__(
        self,
        positions_BT: Tensor | None,
        length: int,
        *,
        device: torch.device,
        sliding: bool = False,
    ) -> RotaryCosSin:
        """Look up the rotation of some positions in a table, which grows when it is too short.

        Args:
            positions_BT: Positions below `length`. None: 0 to `length` - 1, the same in every row.
            length: Tokens of the sequence. NTK and LongRoPE scaling choose the frequencies by it,
                so it is that of the whole sequence, cached tokens included.
            device: Device of the result.
            sliding: Use the base of sliding-window layers, where they have their own. Default:
                False.

        Returns:
            The rotation, for any number of heads.
        """
        own_base = sliding and self.position.sliding_theta is not None
        rope = compute_rope_frequencies(
            self.position, self.width, self.positions, length, own_base=own_base
        )
        table = self._get_table(rope, length, device)
        if positions_BT is None:
            return RotaryCosSin(
                table.cos_PR[:length, None], table.sin_PR[:length, None], self.position.pairing
            )
        rows = positions_BT.to(device)
        return RotaryCosSin(
            table.cos_PR[rows].unsqueeze(2), table.sin_PR[rows].unsqueeze(2), self.position.pairing
        )

    def _get_table(self, rope: RopeFrequencies, length: int, device: torch.device) -> _CosSinTable:
        table = self._tables.get(rope)
        if table is None or len(table.cos_PR) < length or table.cos_PR.device != device:
            # The next power of two, so that a generation does not compute it again for every token.
            end = min(max(self.positions, length), max(64, 1 << (length - 1).bit_length()))
            table = self._compute_table(rope, torch.arange(end), device)
            if len(self._tables) > 2:  # dynamic NTK has other frequencies for every length
                self._tables.clear()
            self._tables[rope] = table
        return table

    def compute_rows(
        self, positions_BT: Tensor, length: int, *, sliding: bool = False
    ) -> RotaryCosSin:
        """Compute the rotation of some positions, without a table of all of them.

        Args:
            positions_BT: The positions; one row serves all rows.
            length: Tokens of the whole sequence, see `__call__`.
            sliding: The rotation is for sliding-window layers. Default: False.

        Returns:
            The rotation, on the device of the positions.
        """
        rope = compute_rope_frequencies(
            self.position, self.width, self.positions, length, own_base=sliding
        )
        rows = positions_BT[0] if len(positions_BT) == 1 else positions_BT
        table = self._compute_table(rope, rows, positions_BT.device)
        return RotaryCosSin(
            table.cos_PR.unsqueeze(-2), table.sin_PR.unsqueeze(-2), self.position.pairing
        )

    def _compute_table(
        self, rope: RopeFrequencies, positions_P: Tensor, device: torch.device
    ) -> _CosSinTable:
        # float64, stored as float32 whatever the dtype of the weights: angles grow with the
        # position, and at position 100,000 a float32 product is off by 4e-3 radians.
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float64).to(
            positions_P.device, non_blocking=True
        )
        angles = positions_P.to(torch.float64)[..., None] * frequencies
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        cos, sin = _expand_pairs(cos, sin, self.position.pairing)
        return _CosSinTable(cos.to(device, torch.float32), sin.to(device, torch.float32))


# B rows, T positions


class RotaryBuilder:
    """Builder of the rotations of one stack."""

    def __init__(self, config: ModelConfig, position: RopeConfig) -> None:
        self.config = config
        self.position = position
        self.table = RotaryEmbedding(config, position)
        self.kinds = sorted(
            {
                config.get_layer_type(layer)
                for layer in range(config.num_hidden_layers)
                if config.has_attention(layer)
            }
        )
        self.is_length_dependent = is_length_dependent(position.scaling)

    def __call__(
        self, length: int, cache: KeyValueCache | None, device: torch.device
    ) -> dict[LayerType, RotaryCosSin]:
        """Build the rotations of new tokens.

        Args:
            length: Number of new tokens, T.
            cache: Their positions follow those in it, of each row without its padding. None: they
                begin at 0.
            device: Device of the result.

        Returns:
            A rotation for each layer type of the stack.
        """
        return {
            kind: self._build_cos_sin(length, cache, device, kind == "sliding_attention")
            for kind in self.kinds
        }

    def build_rows(self, positions_BT: Tensor, length: int) -> dict[LayerType, RotaryCosSin]:
        """Return the rotations of some positions of a sequence of `length` tokens, by layer type.

        Args:
            positions_BT: The positions; one row serves all rows.
            length: Tokens of the whole sequence.

        Returns:
            The rotations.
        """
        return {
            kind: self.table.compute_rows(positions_BT, length, sliding=kind == "sliding_attention")
            for kind in self.kinds
        }

    def must_recompute(self, cache: KeyValueCache, new: int) -> bool:
        """Return whether `new` more tokens change the frequencies that the cache was filled
        with, in any row.
        """
        if not self.is_length_dependent or not cache.length:
            return False
        lengths = [cache.length - padding for padding in cache.padding_B.tolist()]
        return any(
            self._compute_frequencies(length) != self._compute_frequencies(length + new)
            for length in lengths
        )

    def _build_cos_sin(
        self, length: int, cache: KeyValueCache | None, device: torch.device, sliding: bool
    ) -> RotaryCosSin:
        if cache is None:
            return self.table(None, length, device=device, sliding=sliding)
        end = cache.length + length
        positions_BT = cache.get_positions(cache.length, end)
        if not self.is_length_dependent or not cache.is_padded:
            return self.table(
                positions_BT, end - int(cache.padding_B.min()), device=device, sliding=sliding
            )
        # Rows of unequal length have their own frequencies, so that no row depends on its
        # neighbours.
        rows = [
            self.table(positions_T[None], end - padding, device=device, sliding=sliding)
            for positions_T, padding in zip(positions_BT, cache.padding_B.tolist(), strict=True)
        ]
        cos, sin = torch.cat([row.cos for row in rows]), torch.cat([row.sin for row in rows])
        return RotaryCosSin(cos, sin, rows[0].pairing)

    def _compute_frequencies(self, length: int) -> RopeFrequencies:
        return compute_rope_frequencies(
            self.position, self.table.width, self.config.max_position_embeddings, max(length, 1)
        )
