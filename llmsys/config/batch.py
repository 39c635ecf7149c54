"""The batch: how many tokens one optimizer step sees, and in sequences of what length.

Counted in tokens or in sequences, over all ranks; the number of processes never changes it. Documents are cut into
windows of one length, so a step's tokens are exact. Pairs and texts are grouped by length, and a step has about its
tokens: those of the target where there is one.
"""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from llmsys.config.base import Section
from llmsys.config.rule import Broken, listed, nearest_multiples, refuse

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
    micro_sequences: int = Field(
        0, ge=0, description="Windows in one forward pass of one rank; 0 puts a rank's whole share into one."
    )
    length_groups: int = Field(
        1, ge=1, description="Groups of similar length in a step of pairs or texts; each is one forward pass of a rank."
    )
    attend: Literal["document", "window"] = Field(
        "document", description="Whether a token sees its own document only, or the whole window before it."
    )

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[Broken]:
        if self.tokens is None or self.sequences is None:
            return
        if self.sequences * self.counted_length != self.tokens:
            yield Broken(
                "tokens",
                f"{self.tokens} and sequences={self.sequences} of {self.counted_length} tokens disagree. "
                f"Set one of them to null, or tokens={self.sequences * self.counted_length}.",
            )

    def window_problems(self) -> Iterator[Broken]:
        """What forbids cutting a step into whole windows."""
        if self.tokens is not None and self.sequences is None and self.tokens % self.sequence_length:
            legal = listed(nearest_multiples(self.tokens, self.sequence_length))
            yield Broken(
                "tokens", f"{self.tokens} is not a multiple of sequence_length={self.sequence_length}. Use {legal}."
            )

    @property
    def counted_length(self) -> int:
        """Positions of the sequences that `tokens` counts: the target's where there is one."""
        return self.target_length or self.sequence_length

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimizer step, over all ranks; of pairs and texts, how many of the longest fit."""
        if self.sequences is not None:
            return self.sequences
        return DEFAULT_SEQUENCES if self.tokens is None else max(1, self.tokens // self.counted_length)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step, over all ranks; of pairs and texts, about."""
        return self.tokens or self.sequences_per_step * self.counted_length
