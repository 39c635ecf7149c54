"""Configuration of a mixture (`data.kind=mixture`): prepared datasets with weights that can change
in stages.

Invariants:
- Weights are reduced to integers (0.8 and 0.2 to 4 and 1), so the proportions of a period are
  exact.
- The source of sequence n is a function of n: no count from the start of the run is needed.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.section import FolderPath, Section, raise_violations
from llmsys.errors import Violation

# Maximum period of the source order, in sequences; the loader holds a table with one row per
# sequence.
LONGEST_PERIOD = 1 << 16

Weight = Annotated[float, Field(ge=0)]


class MixtureSourceConfig(Section):
    """One prepared dataset of a mixture."""

    folder: FolderPath = Field(description="Dataset folder, prepared with its own config.")
    weight: Weight = Field(1.0, description="Sampling weight, relative to the other sources.")
    name: str = Field(
        "", description="Name in logs and evaluations. Default: the last component of the folder."
    )

    @property
    def title(self) -> str:
        """Name of the source: `name`, or the name of its folder."""
        return self.name or self.folder.name


class MixtureStageConfig(Section):
    """Weights from a given token of the run onwards."""

    start_tokens: int = Field(ge=1, description="Training tokens from which these weights apply.")
    weights: tuple[Weight, ...] = Field(
        description="One weight per source, in order. 0: exclude the source."
    )


class MixtureConfig(Section):
    """Several prepared datasets of documents with weights; all have the same tokenizer.

    Weights are shares of the sequences, and thus of the tokens. Each source starts its next epoch,
    with a new order, when it is exhausted.
    """

    kind: Literal["mixture"] = "mixture"
    name: str = Field("mixture", min_length=1, description="Display name of the mixture.")
    sources: tuple[MixtureSourceConfig, ...] = Field(
        min_length=1, description="Dataset folders and their weights."
    )
    stages: tuple[MixtureStageConfig, ...] = Field(
        (), description="Weights for later parts of the run, such as its end."
    )

    @property
    def folder(self) -> Path:
        """Folder of the first source, whose tokenizer all sources share."""
        return self.sources[0].folder

    @property
    def stage_weights(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """(first token, integer weight of each source) of each stage; the first stage starts at
        0.
        """
        first = tuple(source.weight for source in self.sources)
        return (
            (0, reduce_to_integers(first)),
            *((stage.start_tokens, reduce_to_integers(stage.weights)) for stage in self.stages),
        )

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        titles, folders = (
            [source.title for source in self.sources],
            [source.folder for source in self.sources],
        )
        for number, source in enumerate(self.sources):
            if source.folder in folders[:number]:
                yield Violation(
                    f"sources.{number}.folder",
                    f"{source.folder} is listed twice. List it once, with the sum of its weights.",
                )
            elif source.title in titles[:number]:
                yield Violation(
                    f"sources.{number}.name",
                    f"two sources have the name {source.title}. Rename one of them.",
                )
        yield from _find_weight_violations("sources", [source.weight for source in self.sources])
        for number, stage in enumerate(self.stages):
            if len(stage.weights) != len(self.sources):
                yield Violation(
                    f"stages.{number}.weights",
                    f"{len(stage.weights)} weights for {len(self.sources)} sources. Give one for "
                    "each, or 0.",
                )
            else:
                yield from _find_weight_violations(f"stages.{number}.weights", stage.weights)
            if number and stage.start_tokens <= (before := self.stages[number - 1].start_tokens):
                yield Violation(
                    f"stages.{number}.start_tokens",
                    f"{stage.start_tokens} is not after the stage before it, from {before}. Sort "
                    "the stages.",
                )


def reduce_to_integers(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the proportions of the weights, such as (4, 1) for (0.8,
    0.2).
    """
    # repr gives the decimal as written; the float itself is not exactly 0.8.
    shares = [Fraction(repr(weight)) for weight in weights]
    unit = lcm(*(share.denominator for share in shares))
    counts = [int(share * unit) for share in shares]
    return tuple(count // gcd(*counts) for count in counts)


def _find_weight_violations(key: str, weights: Sequence[float]) -> Iterator[Violation]:
    if not sum(weights):
        yield Violation(key, "all weights are 0. Give at least one source a weight.")
    elif (period := sum(reduce_to_integers(weights))) > LONGEST_PERIOD:
        rounded = ", ".join(
            f"{max(round(weight / sum(weights), 4), 0.0001):g}" for weight in weights
        )
        yield Violation(
            key,
            f"the weights {', '.join(f'{weight:g}' for weight in weights)} are {period:,} integer "
            f"parts, and the limit is {LONGEST_PERIOD:,}. Use rounder weights, such as {rounded}.",
        )
