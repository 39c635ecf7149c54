"""A batch that grows: its section of the config, and the sizes of all steps as arithmetic.

GPT-3 (Brown 2020, appendix B) went from 32 thousand tokens a step to the full batch "linearly over the first 4-12
billion tokens". Steps are whole sequences, so the straight line is climbed in equal rungs. How large step n is and what
came before it follow from the config alone, by bisection over the rungs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pydantic import Field

from llmsys.config.base import Section
from llmsys.config.rule import Violation, list_divisors, format_choices, find_nearest, find_nearest_multiples


class BatchRampConfig(Section):
    """`batch.ramp:` — steps grow from `start_tokens` to the size that the batch section says, linearly in tokens."""

    start_tokens: int = Field(ge=1, description="Tokens of the first step, over all ranks.")
    over_tokens: int = Field(ge=1, description="Tokens of the run after which a step has its full size.")
    quantum_sequences: int | None = Field(
        None,
        ge=1,
        description="Every size is a multiple of so many windows, and a step grows by so many at a time; a multiple of "
        "data ranks · micro_sequences. null: the first step's.",
    )

    def find_violations(self, length: int, full: int) -> Iterator[Violation]:
        """What forbids climbing to `full` sequences of `length` tokens."""
        start = self.start_tokens // length
        if self.start_tokens % length:
            legal = format_choices(find_nearest_multiples(self.start_tokens, length))
            yield Violation(
                "ramp.start_tokens", f"{self.start_tokens} is not a multiple of sequence_length={length}. Use {legal}."
            )
        elif start >= full:
            yield Violation(
                "ramp.start_tokens",
                f"{self.start_tokens} is not less than the {full * length} tokens of a full step. "
                f"Use less, or set ramp to null.",
            )
        elif start % self.compute_increment(length) or full % self.compute_increment(length):
            both = sorted(set(list_divisors(start)) & set(list_divisors(full)))
            yield Violation(
                "ramp.quantum_sequences",
                f"steps of {start} to {full} sequences are not multiples of {self.compute_increment(length)}. "
                f"Use {find_nearest(self.compute_increment(length), both)}, or other sizes.",
            )

    def compute_increment(self, length: int) -> int:
        """Sequences by which steps grow."""
        return self.quantum_sequences or self.start_tokens // length

    def build_ramp_steps(self, length: int, full: int) -> "RampSteps":
        """The sizes of all steps, for sequences of `length` tokens and `full` sequences in the end."""
        return _build_ramp_steps(self.start_tokens // length, full, self.compute_increment(length), self.over_tokens, length)


@dataclass(frozen=True)
class RampSteps:
    """Steps of one size after another: the step and the sequence where each size begins, and that size."""

    first_steps: tuple[int, ...]
    first_sequences: tuple[int, ...]
    sizes: tuple[int, ...]

    def get_size(self, step: int) -> int:
        """Sequences of step `step`, counted from 0."""
        return self.sizes[bisect_right(self.first_steps, step) - 1]

    def count_sequences_before(self, step: int) -> int:
        """Sequences of all steps before it."""
        rung = bisect_right(self.first_steps, step) - 1
        return self.first_sequences[rung] + (step - self.first_steps[rung]) * self.sizes[rung]

    def find_step(self, sequence: int) -> int:
        """The step that a sequence is in."""
        rung = bisect_right(self.first_sequences, sequence) - 1
        return self.first_steps[rung] + (sequence - self.first_sequences[rung]) // self.sizes[rung]

    def count_steps_for(self, sequences: int) -> int:
        """The least number of steps that have so many sequences."""
        rung = max(0, bisect_left(self.first_sequences, sequences) - 1)
        return self.first_steps[rung] + -(-(sequences - self.first_sequences[rung]) // self.sizes[rung])


@lru_cache(maxsize=64)
def _build_ramp_steps(start: int, full: int, quantum: int, over_tokens: int, length: int) -> RampSteps:
    """Rung k of K holds from k/K of `over_tokens` on; a rung between two steps is left out.

    So the size of a step is start + quantum · floor(tokens before it · K / over_tokens), and no more than full.
    """
    climbs = (full - start) // quantum
    found, step, sequence = [], 0, 0
    for rung in range(climbs + 1):
        size = start + rung * quantum
        left = (rung + 1) * over_tokens - sequence * length * climbs
        steps = max(0, -(-left // (size * length * climbs))) if rung < climbs else 1
        if steps:
            found.append((step, sequence, size))
        step, sequence = step + steps, sequence + steps * size
    return RampSteps(*(tuple(column) for column in zip(*found, strict=True)))
