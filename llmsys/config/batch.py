"""Configuration of the global batch (`batch:`).

Batch sizes are counted over all ranks, in tokens or in sequences. Documents are packed into windows
of one length, so the tokens of a step are exact. Pairs and texts are bucketed by length, so the
tokens of a step are approximate; they are target tokens where there is a target.

Invariants:
- The size of step n and the sequences before it are functions of the config alone (see
  batch_ramp.py).
- The number of processes never changes the batch.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.batch_ramp import RampConfig, RampSteps
from llmsys.config.fill_in_middle import FillInMiddleConfig
from llmsys.config.section import Section, find_nearest_multiples, list_divisors, raise_violations
from llmsys.errors import Violation, format_choices

DEFAULT_SEQUENCES = 16


class LengthStageConfig(Section):
    """One stage of a sequence-length curriculum (Li 2021, arXiv:2108.06084): sequences of this
    length up to a token.
    """

    until_tokens: int = Field(
        ge=1, description="Training tokens at which the stage ends, at the next whole step."
    )
    sequence_length: int = Field(
        ge=1, description="Tokens of a sequence; divides batch.sequence_length."
    )


class BatchConfig(Section):
    """The global batch of one optimizer step, given by `sequences` or `tokens`; the default is 16
    sequences.

    For pairs and texts, `sequence_length` is the length of the longest source or text.
    """

    sequence_length: int = Field(512, ge=1, description="Length of one packed sequence, in tokens.")
    target_sequence_length: int | None = Field(
        None,
        ge=1,
        description="Maximum target length of an encoder-decoder, in tokens. null: "
        "sequence_length.",
    )
    sequences: int | None = Field(
        None, ge=1, le=10**12, description="Sequences in one optimizer step, over all ranks."
    )
    tokens: int | None = Field(
        None, ge=1, le=10**15, description="Tokens in one optimizer step, over all ranks."
    )
    ramp: RampConfig | None = Field(
        None, description="Batch size warmup. null: full size from the first step."
    )
    micro_sequences: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="Sequences in one forward pass of one rank. 0: the rank's share of the step. "
        "auto: the largest number whose estimated peak memory fits.",
    )
    assignment: Literal["sequential", "balanced"] = Field(
        "sequential",
        description="Assignment of sequences to ranks and micro-batches. sequential: in order. "
        "balanced: equalize the attention cost (sum of squared document lengths).",
    )
    num_length_buckets: int = Field(
        1,
        ge=1,
        description="Length buckets in one step of pairs or texts; each is one forward pass of a "
        "rank.",
    )
    attention_scope: Literal["document", "window"] = Field(
        "document",
        description="Attend to earlier tokens of the same document only, or of the whole packed "
        "sequence.",
    )

    packing: Literal["concatenate", "best_fit", "first_fit"] = Field(
        "concatenate",
        description="Packing of documents into sequences. concatenate: in order, cut at the end "
        "of a sequence. best_fit, first_fit: whole documents where they fit, and padding; "
        "longer ones are cut.",
    )
    window_order: Literal["shuffled", "consecutive"] = Field(
        "shuffled",
        description="Order of the windows of an epoch. consecutive: each row of the batch reads "
        "on from step to step, so the pieces of a document longer than a window come in its "
        "order.",
    )
    length_stages: tuple[LengthStageConfig, ...] = Field(
        (),
        description="Shorter sequences at the beginning of a run: a window is divided into "
        "sequences of the stage's length, and the tokens of a step stay the same.",
    )
    fill_in_middle: FillInMiddleConfig | None = Field(
        None, description="Documents whose middle comes last. null: none."
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
                f"{self.tokens} and sequences={self.sequences} of {self.counted_sequence_length} "
                "tokens disagree. Set one of them to null, or "
                f"tokens={self.sequences * self.counted_sequence_length}.",
            )

    def find_window_violations(self) -> Iterator[Violation]:
        """Yield the violations of a batch of packed windows."""
        if (
            self.tokens is not None
            and self.sequences is None
            and self.tokens % self.sequence_length
        ):
            legal = format_choices(find_nearest_multiples(self.tokens, self.sequence_length))
            yield Violation(
                "tokens",
                f"{self.tokens} is not a multiple of sequence_length={self.sequence_length}. Use "
                f"{legal}.",
            )
        yield from self._find_stage_violations()

    def _find_stage_violations(self) -> Iterator[Violation]:
        before, shorter = 0, 0
        for number, stage in enumerate(self.length_stages):
            key = f"length_stages.{number}"
            if (
                stage.sequence_length >= self.sequence_length
                or self.sequence_length % stage.sequence_length
            ):
                legal = format_choices(
                    [
                        one
                        for one in list_divisors(self.sequence_length)
                        if one < self.sequence_length
                    ]
                )
                yield Violation(
                    f"{key}.sequence_length",
                    f"{stage.sequence_length} is no part of "
                    f"sequence_length={self.sequence_length}. Use {legal}.",
                )
            elif stage.sequence_length <= shorter or stage.until_tokens <= before:
                yield Violation(
                    f"{key}.sequence_length",
                    f"{stage.sequence_length} until {stage.until_tokens} is not longer and later "
                    "than the stage before."
                    " Order the stages by both.",
                )
            before, shorter = stage.until_tokens, stage.sequence_length

    def resolve_micro_sequences(self, share: int) -> int:
        """Return the windows of one forward pass of a rank.

        Args:
            share: windows of the rank in one step.
        """
        # auto is resolved by the estimate before training; until then it is one forward pass, as 0
        # is.
        return (
            share if self.micro_sequences in (0, "auto") else min(int(self.micro_sequences), share)
        )

    @property
    def counted_sequence_length(self) -> int:
        """Length of the sequences that `tokens` counts: the target length where there is one."""
        return self.target_sequence_length or self.sequence_length

    @property
    def sequences_per_step(self) -> int:
        """Sequences of one full step, over all ranks; for pairs and texts, the number of longest
        ones that fit.
        """
        if self.sequences is not None:
            return self.sequences
        return (
            DEFAULT_SEQUENCES
            if self.tokens is None
            else max(1, self.tokens // self.counted_sequence_length)
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one full step, over all ranks; approximate for pairs and texts."""
        return self.tokens or self.sequences_per_step * self.counted_sequence_length

    def get_step_sequences(self, step: int) -> int:
        """Return the sequences of a step over all ranks.

        Args:
            step: number of the step, counted from 0.
        """
        return self.sequences_per_step if self.ramp is None else self._ramp_steps.get_size(step)

    def count_sequences_before(self, step: int) -> int:
        """Return the index of the first sequence of a step.

        Args:
            step: number of the step, counted from 0.
        """
        return (
            step * self.sequences_per_step
            if self.ramp is None
            else self._ramp_steps.count_sequences_before(step)
        )

    def find_step(self, sequence: int) -> int:
        """Return the step that contains a sequence, counted from 0.

        Args:
            sequence: index of the sequence in the run, counted from 0.
        """
        return (
            sequence // self.sequences_per_step
            if self.ramp is None
            else self._ramp_steps.find_step(sequence)
        )

    def get_step_tokens(self, step: int) -> int:
        """Return the tokens of a step over all ranks; approximate for pairs and texts.

        Args:
            step: number of the step, counted from 0.
        """
        return (
            self.tokens_per_step
            if self.ramp is None
            else self._ramp_steps.get_size(step) * self.sequence_length
        )

    def get_step_length(self, step: int) -> int:
        """Return the tokens of each sequence of a step.

        Args:
            step: number of the step, counted from 0.
        """
        if not self.length_stages:
            return self.sequence_length
        tokens = self.count_tokens_before(step)
        lengths = (
            stage.sequence_length for stage in self.length_stages if tokens < stage.until_tokens
        )
        return next(lengths, self.sequence_length)

    def count_tokens_before(self, step: int) -> int:
        """Return the tokens of the first steps of a run.

        Args:
            step: number of these steps.
        """
        return (
            step * self.tokens_per_step
            if self.ramp is None
            else self._ramp_steps.count_sequences_before(step) * self.sequence_length
        )

    def count_steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps that read at least so many tokens.

        Args:
            tokens: tokens of all ranks together.
        """
        if self.ramp is None:
            return -(-tokens // self.tokens_per_step)
        return self._ramp_steps.count_steps_for(-(-tokens // self.sequence_length))

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """Distinct sizes that steps of a run can have, in sequences, smallest first."""
        full = self.sequences_per_step
        return (full,) if self.ramp is None else self.ramp.list_sizes(self.sequence_length, full)

    @property
    def _ramp_steps(self) -> RampSteps:
        assert self.ramp is not None
        return self.ramp.build_ramp_steps(self.sequence_length, self.sequences_per_step)
