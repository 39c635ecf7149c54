"""Configuration of a batch that grows (`batch.ramp:`), and the sizes of its steps.

Invariants:
- The size of step n and the sequences before it are functions of the config alone: of a ramp by
  noise scale, with the doublings that the run has recorded in `doubled_after_steps`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from llmsys.config.section import Section, find_nearest, find_nearest_multiples, list_divisors
from llmsys.errors import Violation, format_choices


class BatchRampConfig(Section):
    """`batch.ramp:` — a batch that grows linearly in tokens from `start_tokens` to its full size.

    GPT-3 (Brown et al. 2020, appendix B) grew the batch from 32 thousand tokens to its full size
    "linearly over the first 4-12 billion tokens of training".
    """

    kind: Literal["linear"] = "linear"
    start_tokens: int = Field(ge=1, description="Tokens in the first step, over all ranks.")
    ramp_tokens: int = Field(
        ge=1, description="Training tokens after which the batch has its full size."
    )
    increment_sequences: int | None = Field(
        None,
        ge=1,
        description="Every batch size is a multiple of this number of sequences, itself a "
        "multiple of data ranks · micro_sequences. null: the size of the first step.",
    )

    def find_violations(self, length: int, full: int) -> Iterator[Violation]:
        """Yield the violations of a ramp to full steps.

        Args:
            length: tokens per sequence.
            full: sequences of a full step.
        """
        start = self.start_tokens // length
        if self.start_tokens % length:
            legal = format_choices(find_nearest_multiples(self.start_tokens, length))
            yield Violation(
                "ramp.start_tokens",
                f"{self.start_tokens} is not a multiple of sequence_length={length}. Use {legal}.",
            )
        elif start >= full:
            yield Violation(
                "ramp.start_tokens",
                f"{self.start_tokens} is not less than the {full * length} tokens of a full step. "
                "Use fewer, or set ramp to null.",
            )
        elif start % self.compute_increment(length) or full % self.compute_increment(length):
            both = sorted(set(list_divisors(start)) & set(list_divisors(full)))
            yield Violation(
                "ramp.increment_sequences",
                f"steps of {start} to {full} sequences are not multiples of "
                f"{self.compute_increment(length)}. Use "
                f"{find_nearest(self.compute_increment(length), both)}, or other sizes.",
            )

    def compute_increment(self, length: int) -> int:
        """Return the sequences by which a step grows, for sequences of `length` tokens."""
        return self.increment_sequences or self.start_tokens // length

    def build_ramp_steps(self, length: int, full: int) -> "RampSteps":
        """Return the sizes of all steps, for sequences of `length` tokens and full steps of
        `full` sequences.
        """
        return _build_ramp_steps(
            self.start_tokens // length,
            full,
            self.compute_increment(length),
            self.ramp_tokens,
            length,
        )

    def to_trajectory(self, every_steps: int) -> dict[str, Any]:
        """Return the settings that checkpoints record. `every_steps`, between measurements,
        decides nothing here.
        """
        return self.model_dump(mode="json")

    def list_sizes(self, length: int, full: int) -> tuple[int, ...]:
        """Return the sizes that steps of a run can have, in sequences, smallest first."""
        return self.build_ramp_steps(length, full).sizes


class NoiseRampConfig(Section):
    """`batch.ramp: {kind: noise_scale}` — a batch that doubles as the measured gradient noise scale
    grows.

    Batches far below the noise scale cost few additional tokens for the same loss, larger ones save
    steps only at the price of tokens (McCandlish 2018, arXiv:1812.06162). The noise scale grows
    during training, and the batch follows.
    """

    kind: Literal["noise_scale"] = "noise_scale"
    start_tokens: int = Field(
        ge=1, description="Tokens in the first step, over all ranks; full size / a power of two."
    )
    max_share: float = Field(
        1.0,
        gt=0,
        description="Largest batch, as a share of the noise scale. The batch doubles once twice "
        "its size fits.",
    )
    min_measurements: int = Field(
        20,
        ge=1,
        description="Measurements of the noise scale before the first doubling, and between two.",
    )
    doubled_after_steps: tuple[int, ...] = Field(
        (),
        description="Steps after which the batch has doubled. A run decides and records them. "
        "Given: the doublings of another run, which are repeated without measurements, in "
        "every engine.",
    )

    def find_violations(self, length: int, full: int) -> Iterator[Violation]:
        """Yield the violations of doublings to full steps.

        Args:
            length: tokens per sequence.
            full: sequences of a full step.
        """
        legal = [sequences * length for sequences in _list_halves(full)]
        if self.start_tokens not in legal:
            remedy = (
                f"Use {format_choices(legal)}"
                if legal
                else "Use an even number of sequences, or set ramp to null"
            )
            yield Violation(
                "ramp.start_tokens",
                f"{self.start_tokens} does not become the {full * length} tokens of a full step "
                "by doubling"
                f". {remedy}.",
            )
            return
        steps = (0, *self.doubled_after_steps)
        if any(later <= earlier for earlier, later in pairwise(steps)):
            yield Violation(
                "ramp.doubled_after_steps",
                f"{list(self.doubled_after_steps)} are not ascending numbers of steps. Use each "
                "step once, in order.",
            )
        elif self.start_tokens << len(self.doubled_after_steps) > full * length:
            yield Violation(
                "ramp.doubled_after_steps",
                f"{len(self.doubled_after_steps)} doublings of {self.start_tokens} exceed the "
                f"{full * length} tokens"
                " of a full step. Use fewer, or a larger batch.",
            )

    def compute_increment(self, length: int) -> int:
        """Return the sequences that every size is a multiple of, for sequences of `length`
        tokens.
        """
        return self.start_tokens // length

    def build_ramp_steps(self, length: int, full: int) -> "RampSteps":
        """Return the sizes of all steps after the doublings so far."""
        first_steps, first_sequences, sizes = [0], [0], [self.start_tokens // length]
        for step in self.doubled_after_steps:
            first_sequences.append(first_sequences[-1] + (step - first_steps[-1]) * sizes[-1])
            first_steps.append(step)
            sizes.append(2 * sizes[-1])
        return RampSteps(tuple(first_steps), tuple(first_sequences), tuple(sizes))

    def to_trajectory(self, every_steps: int) -> dict[str, Any]:
        """Return the settings that checkpoints record.

        Args:
            every_steps: steps between measurements of the noise scale; 0 where the doublings are
                given.

        Returns:
            Plain values. Measured doublings follow from their interval, which is recorded instead
            of them.
        """
        changes = {"every_steps": every_steps, "doubled_after_steps": []} if every_steps else {}
        return self.model_dump(mode="json") | changes

    def list_sizes(self, length: int, full: int) -> tuple[int, ...]:
        """Return the sizes that steps of a run can have, in sequences, smallest first."""
        start = self.start_tokens // length
        return tuple(start << doublings for doublings in range((full // start).bit_length()))


def _list_halves(full: int) -> list[int]:
    """Return the half of a number, its half, and so on while they are whole; largest first."""
    halves = []
    while full % 2 == 0:
        full //= 2
        halves.append(full)
    return halves


def _get_tag(value: object) -> str:
    """Return the kind of a ramp; linear where none is given."""
    return str(
        value.get("kind", "linear") if isinstance(value, dict) else getattr(value, "kind", "")
    )


RampConfig = Annotated[
    Annotated[BatchRampConfig, Tag("linear")] | Annotated[NoiseRampConfig, Tag("noise_scale")],
    Discriminator(_get_tag),
]


@dataclass(frozen=True)
class RampSteps:
    """Step sizes of a ramp, one entry per size.

    Attributes:
        first_steps: first step of each size.
        first_sequences: first sequence of each size.
        sizes: sequences per step.
    """

    first_steps: tuple[int, ...]
    first_sequences: tuple[int, ...]
    sizes: tuple[int, ...]

    def get_size(self, step: int) -> int:
        """Return the sequences of step `step`, counted from 0."""
        return self.sizes[bisect_right(self.first_steps, step) - 1]

    def count_sequences_before(self, step: int) -> int:
        """Return the sequences of all steps before step `step`."""
        level = bisect_right(self.first_steps, step) - 1
        return self.first_sequences[level] + (step - self.first_steps[level]) * self.sizes[level]

    def find_step(self, sequence: int) -> int:
        """Return the step that contains sequence `sequence`; both are counted from 0."""
        level = bisect_right(self.first_sequences, sequence) - 1
        return (
            self.first_steps[level] + (sequence - self.first_sequences[level]) // self.sizes[level]
        )

    def count_steps_for(self, sequences: int) -> int:
        """Return the smallest number of steps with at least `sequences` sequences."""
        level = max(0, bisect_left(self.first_sequences, sequences) - 1)
        return self.first_steps[level] + -(
            -(sequences - self.first_sequences[level]) // self.sizes[level]
        )


@lru_cache(maxsize=64)
def _build_ramp_steps(
    start: int, full: int, increment: int, ramp_tokens: int, length: int
) -> RampSteps:
    """Return the step sizes of a ramp of K increments.

    The size of a step is min(full, start + increment · floor(K · tokens before it / ramp_tokens)).
    """
    num_increments = (full - start) // increment
    rows, step, sequence = [], 0, 0
    for level in range(num_increments + 1):
        size = start + level * increment
        # Tokens until the next level, times K: integers have no rounding.
        remaining = (level + 1) * ramp_tokens - sequence * length * num_increments
        steps = (
            max(0, -(-remaining // (size * length * num_increments)))
            if level < num_increments
            else 1
        )
        if steps:  # a level that begins and ends within one step has none
            rows.append((step, sequence, size))
        step, sequence = step + steps, sequence + steps * size
    return RampSteps(*(tuple(column) for column in zip(*rows, strict=True)))
