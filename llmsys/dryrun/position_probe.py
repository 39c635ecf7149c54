"""Sequence lengths that mark the dimensions that derive from positions, to find tables of
positions by positions.

The length of a probe is a prime, times the ranks that share a sequence. The prime divides no width
and no count of the model, so a tensor whose number of elements it divides twice has two dimensions
of positions: also a mask of two dimensions, and where a width equals the length of the run. Source
and target of an encoder-decoder have a prime each.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import lcm

from llmsys.config.lsh_attention import LshAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import compute_micro_batch
from llmsys.estimate.model_tensors import list_model_tensors

SMALLEST_PRIME = 7


@dataclass(frozen=True)
class ProbeAxis:
    """A length whose dimensions are recognized.

    Attributes:
        length: positions of a sequence of the probe.
        prime: divides a dimension of the probe that derives from positions, and no other.
        full_length: positions of a sequence of the run.
    """

    length: int
    prime: int
    full_length: int

    def count_dimensions(self, size: int) -> int:
        """Return how many dimensions of positions a size is the product of.

        Args:
            size: In the probe.
        """
        dimensions = 0
        while size and size % self.prime == 0:
            size //= self.prime
            dimensions += 1
        return dimensions

    def scale_size(self, size: int, dimensions: int) -> int:
        """Return the size of the run that a size of the probe stands for.

        Args:
            size: In the probe, or scaled along another axis.
            dimensions: From `count_dimensions`.
        """
        scaled: int = size * self.full_length**dimensions // self.length**dimensions
        return scaled


@dataclass(frozen=True)
class PositionProbe:
    """The lengths of source and target; equal where there is one stack.

    Attributes:
        source: Positions of the encoder, or of the content stream.
        target: Positions of the decoder, or of both streams.
    """

    source: ProbeAxis
    target: ProbeAxis

    @property
    def lengths(self) -> tuple[int, int]:
        """Positions of a source and of a target."""
        return self.source.length, self.target.length

    def is_table(self, shape: tuple[int, ...]) -> bool:
        """Return whether two dimensions derive from positions, also where they are one together.

        Args:
            shape: Of a tensor of the probe.
        """
        return sum(axis.count_dimensions(size) for axis in self._axes for size in shape) >= 2

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a tensor of the probe has in the run.

        Args:
            shape: Of a tensor of the probe.
        """
        return tuple(self._scale_size(size) for size in shape)

    @property
    def _axes(self) -> tuple[ProbeAxis, ...]:
        """Axes of different primes."""
        has_one = self.source.prime == self.target.prime
        return (self.source,) if has_one else (self.source, self.target)

    def _scale_size(self, size: int) -> int:
        scaled = size
        for axis in self._axes:
            # Both streams together are longer than the first, by positions of the same prime.
            longer = self.target if size % self.target.length == 0 else axis
            chosen = longer if longer.prime == axis.prime else axis
            scaled = chosen.scale_size(scaled, axis.count_dimensions(size))
        return scaled


def find_position_probe(config: RunConfig, layout: ParallelLayout) -> PositionProbe | None:
    """Find the longest probe that a run's sequences have room for.

    Args:
        config: The config of the run.
        layout: The resolved layout.

    Returns:
        The probe; None for recurrent layers, for images whose number of patches is no probe, and
        for sequences that are too short.
    """
    model = config.model
    if model.rnn is not None:
        return None
    ranks = lcm(layout.sequence_parallel_size, 2 * layout.ring_size if layout.ring_size > 1 else 1)
    source, target = config.sequence_lengths
    sizes = {ranks, *_iter_sizes(model), compute_micro_batch(config, layout)[0]}
    if model.patches is not None:
        # An image has as many positions as there are: they have to be a probe themselves.
        prime = _find_prime([target // ranks], sizes - {target})
        return None if prime * ranks != target else _build_probe(ProbeAxis(target, prime, target))
    if config.objective.kind == "permutation":
        # The stream of queries is shorter by this factor: both are multiples of one prime.
        predicted = target - source
        times = source // max(predicted, 1)
        prime = _find_prime(range(predicted // ranks, times + 1, -1), {times, times + 1, *sizes})
        content = ProbeAxis(prime * ranks * times, prime, source)
        both = ProbeAxis(prime * ranks * (times + 1), prime, target)
        return None if prime == 1 else PositionProbe(content, both)
    # Blocks of positions that attention fills up have no such dimension; all before them has.
    first = _find_prime(range(source // ranks, _count_one_block(model) // ranks, -1), sizes)
    axis = ProbeAxis(first * ranks, first, source)
    if first == 1 or model.family != "encoder_decoder":
        return None if first == 1 else _build_probe(axis)
    second = _find_prime(range(target // ranks, 1, -1), {first, *sizes})
    return None if second == 1 else PositionProbe(axis, ProbeAxis(second * ranks, second, target))


def _count_one_block(model: ModelConfig) -> int:
    """Return the positions of which hashed attention makes all scores, as one chunk."""
    return model.attention.chunk_length if isinstance(model.attention, LshAttentionConfig) else 1


def _build_probe(axis: ProbeAxis) -> PositionProbe:
    return PositionProbe(axis, axis)


def _find_prime(numbers: Iterable[int], others: set[int]) -> int:
    """Return the first prime that divides none of the other numbers; 1 where there is none."""
    for number in numbers:
        if (
            number >= SMALLEST_PRIME
            and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
            and all(size % number for size in others)
        ):
            return number
    return 1


def _iter_sizes(model: ModelConfig) -> Iterator[int]:
    """Yield the widths and counts of a model."""
    for row in list_model_tensors(model):
        yield from row.shape
    yield from (model.num_attention_heads, model.num_key_value_heads, model.head_dim)
    if model.moe is not None:
        yield from (model.moe.num_experts, model.moe.num_experts_per_tok)
    if model.linear_attention is not None:
        linear = model.linear_attention
        yield from (linear.num_key_heads, linear.num_value_heads)
        yield from (linear.key_head_dim, linear.value_head_dim)
