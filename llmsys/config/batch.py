"""The batch: how many tokens one optimizer step sees, and in windows of what length.

Counted in tokens or in sequences, over all ranks; the number of processes never changes it.
"""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from llmsys.config.base import Section
from llmsys.config.rule import Broken, listed, nearest_multiples, refuse

DEFAULT_SEQUENCES = 16


class BatchConfig(Section):
    """Give `sequences` or `tokens` of one step; with neither, a step has 16 sequences."""

    sequence_length: int = Field(512, ge=1, description="Positions of one window, in tokens.")
    sequences: int | None = Field(None, ge=1, description="Windows in one optimizer step, over all ranks.")
    tokens: int | None = Field(None, ge=1, description="Tokens in one optimizer step, over all ranks.")
    micro_sequences: int = Field(
        0, ge=0, description="Windows in one forward pass of one rank; 0 puts a rank's whole share into one."
    )
    attend: Literal["document", "window"] = Field(
        "document", description="Whether a token sees its own document only, or the whole window before it."
    )

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[Broken]:
        if self.tokens is None:
            return
        if self.tokens % self.sequence_length:
            legal = listed(nearest_multiples(self.tokens, self.sequence_length))
            yield Broken(
                "tokens", f"{self.tokens} is not a multiple of sequence_length={self.sequence_length}. Use {legal}."
            )
        elif self.sequences is not None and self.sequences * self.sequence_length != self.tokens:
            yield Broken(
                "tokens",
                f"{self.tokens} and sequences={self.sequences} of {self.sequence_length} tokens disagree. "
                f"Set one of them to null, or tokens={self.sequences * self.sequence_length}.",
            )

    @property
    def sequences_per_step(self) -> int:
        """Windows in one optimizer step, over all ranks."""
        if self.sequences is not None:
            return self.sequences
        return DEFAULT_SEQUENCES if self.tokens is None else self.tokens // self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all ranks."""
        return self.sequences_per_step * self.sequence_length
