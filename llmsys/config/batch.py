"""The batch: how many tokens one optimizer step sees, and in sequences of what length.

Counted in tokens or in sequences, over all ranks; the number of processes never changes it. Documents are cut into
windows of one length, so a step's tokens are exact. Pairs and texts are grouped by length, and a step has about its
tokens: those of the target where there is one. How large step n is and what came before it are functions of the config.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.base import Section
from llmsys.config.ramp import BatchRampConfig, RampSteps
from llmsys.config.rule import Violation, format_choices, find_nearest_multiples, raise_violations

DEFAULT_SEQUENCES = 16


class BatchConfig(Section):
    """Give `sequences` or `tokens` of one step; with neither, a step has 16 sequences.

    For pairs and texts, `sequence_length` is the longest source or text.
    """

    sequence_length: int = Field(512, ge=1, description="Positions of one window, in tokens.")
    target_length: int | None = Field(
        None, ge=1, description="Positions of the longest target of an encoder-decoder; null: as sequence_length."
    )
    sequences: int | None = Field(None, ge=1, description="Windows in one optimizer step, over all ranks.")
    tokens: int | None = Field(None, ge=1, description="Tokens in one optimizer step, over all ranks.")
    ramp: BatchRampConfig | None = Field(None, description="How steps grow to that size; null: they have it from the start.")
    micro_sequences: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="Windows in one forward pass of one rank; 0 puts a rank's whole share into one, auto the most that "
        "the estimate says fits its memory.",
    )
    deal: Literal["in_order", "balanced"] = Field(
        "in_order",
        description="Which rank and micro-batch takes which window of a step: one after another, or so that all have "
        "about the same work in attention (the sum of squared lengths of their documents).",
    )
    length_groups: int = Field(
        1, ge=1, description="Groups of similar length in a step of pairs or texts; each is one forward pass of a rank."
    )
    attend: Literal["document", "window"] = Field(
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
        if self.deal == "balanced" and self.attend == "window":
            yield Violation("deal", "balanced evens out documents, and with attend=window all windows cost the same. "
                         "Use in_order, or attend=document.")  # fmt: skip

    def find_pair_violations(self) -> Iterator[Violation]:
        """What batches of pairs and texts, which are grouped by length, do not know."""
        if self.ramp is not None:
            yield Violation("ramp", "pairs and texts come in groups of similar length, which do not grow. Set it to null.")
        if self.deal != "in_order":
            yield Violation("deal", f"{self.deal} is for windows; groups of similar length are even. Use in_order.")
        if self.micro_sequences == "auto":
            yield Violation("micro_sequences", "auto is for windows. Use 0 and say length_groups.")

    def resolve_micro_sequences(self, share: int) -> int:
        """Windows of one forward pass of a rank that has `share` in a step; auto, before it is settled, is all."""
        return share if self.micro_sequences in (0, "auto") else min(int(self.micro_sequences), share)

    @property
    def counted_sequence_length(self) -> int:
        """Positions of the sequences that `tokens` counts: the target's where there is one."""
        return self.target_length or self.sequence_length

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
        return step * self.tokens_per_step if self.ramp is None else self._ramp_steps.count_sequences_before(step) * self.sequence_length

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
