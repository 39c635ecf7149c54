"""A batch that grows: its section of the config, and the sizes of all steps as arithmetic.

GPT-3 (Brown 2020, appendix B) went from 32 thousand tokens a step to the full batch "linearly over the first 4-12
billion tokens". Steps are whole sequences, so the straight line is climbed in equal rungs. How large step n is and what
came before it follow from the config alone, by bisection over the rungs.

The batch: how many tokens one optimizer step sees, and in sequences of what length.

Counted in tokens or in sequences, over all ranks; the number of processes never changes it. Documents are cut into
windows of one length, so a step's tokens are exact. Pairs and texts are grouped by length, and a step has about its
tokens: those of the target where there is one. How large step n is and what came before it are functions of the config.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.section import Section
from llmsys.config.violation import (
    Violation,
    find_nearest,
    find_nearest_multiples,
    format_choices,
    list_divisors,
    raise_violations,
)


class BatchRampConfig(Section):
    """`batch.ramp:` — steps grow from `start_tokens` to the size that the batch section says, linearly in tokens."""

    start_tokens: int = Field(ge=1, description="Tokens of the first step, over all ranks.")
    ramp_tokens: int = Field(ge=1, description="Tokens of the run after which a step has its full size.")
    increment_sequences: int | None = Field(
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
                "ramp.increment_sequences",
                f"steps of {start} to {full} sequences are not multiples of {self.compute_increment(length)}. "
                f"Use {find_nearest(self.compute_increment(length), both)}, or other sizes.",
            )

    def compute_increment(self, length: int) -> int:
        """Sequences by which steps grow."""
        return self.increment_sequences or self.start_tokens // length

    def build_ramp_steps(self, length: int, full: int) -> "RampSteps":
        """The sizes of all steps, for sequences of `length` tokens and `full` sequences in the end."""
        return _build_ramp_steps(
            self.start_tokens // length, full, self.compute_increment(length), self.ramp_tokens, length
        )


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
def _build_ramp_steps(start: int, full: int, quantum: int, ramp_tokens: int, length: int) -> RampSteps:
    """Rung k of K holds from k/K of `ramp_tokens` on; a rung between two steps is left out.

    So the size of a step is start + quantum · floor(tokens before it · K / ramp_tokens), and no more than full.
    """
    climbs = (full - start) // quantum
    found, step, sequence = [], 0, 0
    for rung in range(climbs + 1):
        size = start + rung * quantum
        left = (rung + 1) * ramp_tokens - sequence * length * climbs
        steps = max(0, -(-left // (size * length * climbs))) if rung < climbs else 1
        if steps:
            found.append((step, sequence, size))
        step, sequence = step + steps, sequence + steps * size
    return RampSteps(*(tuple(column) for column in zip(*found, strict=True)))


DEFAULT_SEQUENCES = 16


class BatchConfig(Section):
    """Give `sequences` or `tokens` of one step; with neither, a step has 16 sequences.

    For pairs and texts, `sequence_length` is the longest source or text.
    """

    sequence_length: int = Field(512, ge=1, description="Positions of one window, in tokens.")
    target_sequence_length: int | None = Field(
        None, ge=1, description="Positions of the longest target of an encoder-decoder; null: as sequence_length."
    )
    sequences: int | None = Field(None, ge=1, description="Windows in one optimizer step, over all ranks.")
    tokens: int | None = Field(None, ge=1, description="Tokens in one optimizer step, over all ranks.")
    ramp: BatchRampConfig | None = Field(
        None, description="How steps grow to that size; null: they have it from the start."
    )
    micro_sequences: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="Windows in one forward pass of one rank; 0 puts a rank's whole share into one, auto the most that "
        "the estimate says fits its memory.",
    )
    assignment: Literal["sequential", "balanced"] = Field(
        "sequential",
        description="Which rank and micro-batch takes which window of a step: one after another, or so that all have "
        "about the same work in attention (the sum of squared lengths of their documents).",
    )
    num_length_buckets: int = Field(
        1, ge=1, description="Groups of similar length in a step of pairs or texts; each is one forward pass of a rank."
    )
    attention_scope: Literal["document", "window"] = Field(
        "document", description="Whether a token sees its own document only, or the whole window before it."
    )

    @model_validator(mode="after")
    def _check_step_sizes(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        if self.ramp is not None:
            yield from self.ramp.find_violations(self.sequence_length, self.sequences_per_step)
        if self.tokens is None or self.sequences is None:
            return
        if self.sequences * self.counted_sequence_length != self.tokens:
            yield Violation(
                "tokens",
                f"{self.tokens} and sequences={self.sequences} of {self.counted_sequence_length} tokens disagree. "
                f"Set one of them to null, or tokens={self.sequences * self.counted_sequence_length}.",
            )

    def find_window_violations(self) -> Iterator[Violation]:
        """What forbids cutting a step into whole windows."""
        if self.tokens is not None and self.sequences is None and self.tokens % self.sequence_length:
            legal = format_choices(find_nearest_multiples(self.tokens, self.sequence_length))
            yield Violation(
                "tokens", f"{self.tokens} is not a multiple of sequence_length={self.sequence_length}. Use {legal}."
            )
        if self.assignment == "balanced" and self.attention_scope == "window":
            yield Violation(
                "assignment",
                "balanced evens out documents, and with attention_scope=window all windows cost the same. "
                "Use sequential, or attention_scope=document.",
            )

    def find_pair_violations(self) -> Iterator[Violation]:
        """What batches of pairs and texts, which are grouped by length, do not know."""
        if self.ramp is not None:
            yield Violation(
                "ramp", "pairs and texts come in groups of similar length, which do not grow. Set it to null."
            )
        if self.assignment != "sequential":
            yield Violation(
                "assignment", f"{self.assignment} is for windows; groups of similar length are even. Use sequential."
            )
        if self.micro_sequences == "auto":
            yield Violation("micro_sequences", "auto is for windows. Use 0 and say num_length_buckets.")

    def resolve_micro_sequences(self, share: int) -> int:
        """Windows of one forward pass of a rank that has `share` in a step; auto, before it is settled, is all."""
        return share if self.micro_sequences in (0, "auto") else min(int(self.micro_sequences), share)

    @property
    def counted_sequence_length(self) -> int:
        """Positions of the sequences that `tokens` counts: the target's where there is one."""
        return self.target_sequence_length or self.sequence_length

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one full step, over all ranks; of pairs and texts, how many of the longest fit."""
        if self.sequences is not None:
            return self.sequences
        return DEFAULT_SEQUENCES if self.tokens is None else max(1, self.tokens // self.counted_sequence_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one full step, over all ranks; of pairs and texts, about."""
        return self.tokens or self.sequences_per_step * self.counted_sequence_length

    def get_sequences_at(self, step: int) -> int:
        """Sequences of step `step`, counted from 0, over all ranks."""
        return self.sequences_per_step if self.ramp is None else self._ramp_steps.get_size(step)

    def count_sequences_before(self, step: int) -> int:
        """The number of the first sequence of step `step`, counted from 0."""
        return step * self.sequences_per_step if self.ramp is None else self._ramp_steps.count_sequences_before(step)

    def find_step(self, sequence: int) -> int:
        """The step that sequence `sequence` is in; both counted from 0."""
        return sequence // self.sequences_per_step if self.ramp is None else self._ramp_steps.find_step(sequence)

    def get_tokens_at(self, step: int) -> int:
        """Tokens of step `step`, counted from 0, over all ranks; of pairs and texts, about."""
        return self.tokens_per_step if self.ramp is None else self._ramp_steps.get_size(step) * self.sequence_length

    def count_tokens_before(self, step: int) -> int:
        """Tokens that `step` steps train on."""
        return (
            step * self.tokens_per_step
            if self.ramp is None
            else self._ramp_steps.count_sequences_before(step) * self.sequence_length
        )

    def count_steps_for(self, tokens: int) -> int:
        """The least number of steps that train on so many tokens."""
        if self.ramp is None:
            return -(-tokens // self.tokens_per_step)
        return self._ramp_steps.count_steps_for(-(-tokens // self.sequence_length))

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Every number of sequences that a step of a run can have."""
        return (self.sequences_per_step,) if self.ramp is None else self._ramp_steps.sizes

    @property
    def _ramp_steps(self) -> RampSteps:
        assert self.ramp is not None
        return self.ramp.build_ramp_steps(self.sequence_length, self.sequences_per_step)
