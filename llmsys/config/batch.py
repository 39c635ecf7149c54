"""Configuration of the global batch (`batch:`) and of its ramp (`batch.ramp:`).

Batch sizes are counted over all ranks, in tokens or in sequences. Documents are packed into windows of one length, so
the tokens of a step are exact. Pairs and texts are bucketed by length, so the tokens of a step are approximate; they
are target tokens where there is a target.

Invariants:
- The size of step n and the sequences before it are functions of the config alone.
- The number of processes never changes the batch.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.section import (
    Section,
    Violation,
    find_nearest,
    find_nearest_multiples,
    format_choices,
    list_divisors,
    raise_violations,
)


class BatchRampConfig(Section):
    """`batch.ramp:` — a batch that grows linearly in tokens from `start_tokens` to its full size.

    GPT-3 (Brown et al. 2020, appendix B) grew the batch from 32 thousand tokens to its full size "linearly over the
    first 4-12 billion tokens of training".
    """

    start_tokens: int = Field(ge=1, description="Tokens in the first step, over all ranks.")
    ramp_tokens: int = Field(ge=1, description="Training tokens after which the batch has its full size.")
    increment_sequences: int | None = Field(
        None,
        ge=1,
        description="Every batch size is a multiple of this number of sequences, itself a multiple of data ranks · "
        "micro_sequences. null: the size of the first step.",
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
                "ramp.start_tokens", f"{self.start_tokens} is not a multiple of sequence_length={length}. Use {legal}."
            )
        elif start >= full:
            yield Violation(
                "ramp.start_tokens",
                f"{self.start_tokens} is not less than the {full * length} tokens of a full step. Use fewer, "
                "or set ramp to null.",
            )
        elif start % self.compute_increment(length) or full % self.compute_increment(length):
            both = sorted(set(list_divisors(start)) & set(list_divisors(full)))
            yield Violation(
                "ramp.increment_sequences",
                f"steps of {start} to {full} sequences are not multiples of {self.compute_increment(length)}. "
                f"Use {find_nearest(self.compute_increment(length), both)}, or other sizes.",
            )

    def compute_increment(self, length: int) -> int:
        """Return the sequences by which a step grows, for sequences of `length` tokens."""
        return self.increment_sequences or self.start_tokens // length

    def build_ramp_steps(self, length: int, full: int) -> "RampSteps":
        """Return the sizes of all steps, for sequences of `length` tokens and full steps of `full` sequences."""
        return _build_ramp_steps(
            self.start_tokens // length, full, self.compute_increment(length), self.ramp_tokens, length
        )


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
        return self.first_steps[level] + (sequence - self.first_sequences[level]) // self.sizes[level]

    def count_steps_for(self, sequences: int) -> int:
        """Return the smallest number of steps with at least `sequences` sequences."""
        level = max(0, bisect_left(self.first_sequences, sequences) - 1)
        return self.first_steps[level] + -(-(sequences - self.first_sequences[level]) // self.sizes[level])


@lru_cache(maxsize=64)
def _build_ramp_steps(start: int, full: int, increment: int, ramp_tokens: int, length: int) -> RampSteps:
    """Return the step sizes of a ramp of K increments.

    The size of a step is min(full, start + increment · floor(K · tokens before it / ramp_tokens)).
    """
    num_increments = (full - start) // increment
    rows, step, sequence = [], 0, 0
    for level in range(num_increments + 1):
        size = start + level * increment
        # Tokens until the next level, times K: integers have no rounding.
        remaining = (level + 1) * ramp_tokens - sequence * length * num_increments
        steps = max(0, -(-remaining // (size * length * num_increments))) if level < num_increments else 1
        if steps:  # a level that begins and ends within one step has none
            rows.append((step, sequence, size))
        step, sequence = step + steps, sequence + steps * size
    return RampSteps(*(tuple(column) for column in zip(*rows, strict=True)))


DEFAULT_SEQUENCES = 16


class BatchConfig(Section):
    """The global batch of one optimizer step, given by `sequences` or `tokens`; the default is 16 sequences.

    For pairs and texts, `sequence_length` is the length of the longest source or text.
    """

    sequence_length: int = Field(512, ge=1, description="Length of one packed sequence, in tokens.")
    target_sequence_length: int | None = Field(
        None, ge=1, description="Maximum target length of an encoder-decoder, in tokens. null: sequence_length."
    )
    sequences: int | None = Field(None, ge=1, description="Sequences in one optimizer step, over all ranks.")
    tokens: int | None = Field(None, ge=1, description="Tokens in one optimizer step, over all ranks.")
    ramp: BatchRampConfig | None = Field(None, description="Batch size warmup. null: full size from the first step.")
    micro_sequences: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="Sequences in one forward pass of one rank. 0: the rank's share of the step. auto: the largest "
        "number whose estimated peak memory fits.",
    )
    assignment: Literal["sequential", "balanced"] = Field(
        "sequential",
        description="Assignment of sequences to ranks and micro-batches. sequential: in order. balanced: equalize "
        "the attention cost (sum of squared document lengths).",
    )
    num_length_buckets: int = Field(
        1, ge=1, description="Length buckets in one step of pairs or texts; each is one forward pass of a rank."
    )
    attention_scope: Literal["document", "window"] = Field(
        "document", description="Attend to earlier tokens of the same document only, or of the whole packed sequence."
    )

    packing: Literal["concatenate", "best_fit", "first_fit"] = Field(
        "concatenate",
        description="Packing of documents into sequences. concatenate: in order, cut at the end of a sequence. "
        "best_fit, first_fit: whole documents where they fit, and padding; longer ones are cut.",
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
        """Yield the violations of a batch of packed windows."""
        if self.tokens is not None and self.sequences is None and self.tokens % self.sequence_length:
            legal = format_choices(find_nearest_multiples(self.tokens, self.sequence_length))
            yield Violation(
                "tokens", f"{self.tokens} is not a multiple of sequence_length={self.sequence_length}. Use {legal}."
            )
        if self.assignment == "balanced" and self.attention_scope == "window":
            yield Violation(
                "assignment",
                "balanced equalizes the attention cost of documents, but with attention_scope=window all "
                "sequences cost the same. Use sequential, or attention_scope=document.",
            )

        if self.packing != "concatenate" and self.attention_scope == "window":
            yield Violation(
                "packing",
                f"{self.packing} keeps documents whole, but with attention_scope=window each sees the others of its "
                "sequence. Use attention_scope=document, or packing=concatenate.",
            )

    def find_pair_violations(self) -> Iterator[Violation]:
        """Yield the violations of a batch of pairs or texts, which are bucketed by length."""
        if self.packing != "concatenate":
            yield Violation("packing", f"{self.packing} packs documents, not pairs or texts. Use concatenate.")
        if self.ramp is not None:
            yield Violation("ramp", "pairs and texts are batched in length buckets, which do not grow. Set it to null.")
        if self.assignment != "sequential":
            yield Violation(
                "assignment",
                f"{self.assignment} applies to packed sequences; length buckets are balanced already. Use sequential.",
            )
        if self.micro_sequences == "auto":
            yield Violation("micro_sequences", "auto applies to packed sequences. Use 0 and set num_length_buckets.")

    def resolve_micro_sequences(self, share: int) -> int:
        """Return the windows of one forward pass of a rank.

        Args:
            share: windows of the rank in one step.
        """
        # auto is resolved by the estimate before training; until then it is one forward pass, as 0 is.
        return share if self.micro_sequences in (0, "auto") else min(int(self.micro_sequences), share)

    @property
    def counted_sequence_length(self) -> int:
        """Length of the sequences that `tokens` counts: the target length where there is one."""
        return self.target_sequence_length or self.sequence_length

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one full step, over all ranks; for pairs and texts, the number of longest ones that fit."""
        if self.sequences is not None:
            return self.sequences
        return DEFAULT_SEQUENCES if self.tokens is None else max(1, self.tokens // self.counted_sequence_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one full step, over all ranks; approximate for pairs and texts."""
        return self.tokens or self.sequences_per_step * self.counted_sequence_length

    def get_step_sequences(self, step: int) -> int:
        """Return the sequences of step `step`, counted from 0, over all ranks."""
        return self.sequences_per_step if self.ramp is None else self._ramp_steps.get_size(step)

    def count_sequences_before(self, step: int) -> int:
        """Return the index of the first sequence of step `step`; both are counted from 0."""
        return step * self.sequences_per_step if self.ramp is None else self._ramp_steps.count_sequences_before(step)

    def find_step(self, sequence: int) -> int:
        """Return the step that contains sequence `sequence`; both are counted from 0."""
        return sequence // self.sequences_per_step if self.ramp is None else self._ramp_steps.find_step(sequence)

    def get_step_tokens(self, step: int) -> int:
        """Return the tokens of step `step`, counted from 0, over all ranks; approximate for pairs and texts."""
        return self.tokens_per_step if self.ramp is None else self._ramp_steps.get_size(step) * self.sequence_length

    def count_tokens_before(self, step: int) -> int:
        """Return the tokens of the first `step` steps."""
        return (
            step * self.tokens_per_step
            if self.ramp is None
            else self._ramp_steps.count_sequences_before(step) * self.sequence_length
        )

    def count_steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps with at least `tokens` tokens."""
        if self.ramp is None:
            return -(-tokens // self.tokens_per_step)
        return self._ramp_steps.count_steps_for(-(-tokens // self.sequence_length))

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Distinct sizes of the steps of a run, in sequences."""
        return (self.sequences_per_step,) if self.ramp is None else self._ramp_steps.sizes

    @property
    def _ramp_steps(self) -> RampSteps:
        assert self.ramp is not None
        return self.ramp.build_ramp_steps(self.sequence_length, self.sequences_per_step)
