"""A sequence length that marks the dimensions that derive from positions, to find tables of
positions by positions.

The length of the probe is a prime, times the ranks that share a sequence. The prime divides no
width and no count of the model, so a tensor whose number of elements it divides twice has two
dimensions of positions: also a mask of two dimensions, and where a width equals the length of the
run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import compute_micro_batch
from llmsys.estimate.model_tensors import list_model_tensors

KINDS = ("multi_head", "latent", "python")
OBJECTIVES = ("next_token", "masked", "masked_next_sentence")
SMALLEST_PRIME = 7


@dataclass(frozen=True)
class PositionProbe:
    """A length whose dimensions are recognized.

    Attributes:
        length: positions of a sequence of the probe.
        prime: divides a dimension of the probe that derives from positions, and no other.
        full_length: positions of a sequence of the run.
    """

    length: int
    prime: int
    full_length: int

    def is_table(self, shape: tuple[int, ...]) -> bool:
        """Return whether two dimensions derive from positions, also where they are one together.

        Args:
            shape: Of a tensor of the probe.
        """
        divisible = 0
        for size in shape:
            while size and size % self.prime == 0:
                size //= self.prime
                divisible += 1
        return divisible >= 2

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a tensor of the probe has in the run.

        Args:
            shape: Of a tensor of the probe.
        """
        return tuple(self._scale_size(size) for size in shape)

    def _scale_size(self, size: int) -> int:
        scaled = size
        rest = size
        while rest and rest % self.prime == 0:
            rest //= self.prime
            scaled = scaled * self.full_length // self.length
        return scaled


def find_position_probe(config: RunConfig, layout: ParallelLayout) -> PositionProbe | None:
    """Find the longest probe that a run's sequences have room for.

    Args:
        config: The config of the run.
        layout: The resolved layout.

    Returns:
        The probe; None for models whose length is part of the architecture, and for sequences that
        are too short.
    """
    model = config.model
    if (
        model.attention.kind not in KINDS
        or config.objective.kind not in OBJECTIVES
        or model.patches is not None
        or model.rnn is not None
        or model.has_linear_layers  # chunks are filled up, and a loop runs over them
    ):
        return None
    ranks = lcm(layout.sequence_parallel_size, 2 * layout.ring_size if layout.ring_size > 1 else 1)
    length = config.batch.sequence_length
    others = {ranks, *_iter_sizes(model), compute_micro_batch(config, layout)[0]}
    for prime in range(length // ranks, SMALLEST_PRIME - 1, -1):
        if _is_prime(prime) and all(size % prime for size in others):
            return PositionProbe(prime * ranks, prime, length)
    return None


def _iter_sizes(model: ModelConfig) -> Iterator[int]:
    """Yield the widths and counts of a model."""
    for row in list_model_tensors(model):
        yield from row.shape
    yield from (model.num_attention_heads, model.num_key_value_heads, model.head_dim)
    if model.moe is not None:
        yield from (model.moe.num_experts, model.moe.num_experts_per_tok)


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))
