"""Configuration of the sampling of documents by column (`data.sampling`): weights and caps that
decide how often each document is in the training tokens.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from llmsys.config.section import Section, raise_violations
from llmsys.errors import Violation

# Most copies of a document, by all weights together.
MAX_COPIES = 100

DocumentWeight = Annotated[float, Field(ge=0, le=MAX_COPIES)]
_COLUMN = (
    "`host`, `domain`, `year`, `month`, or a column of documents/: of the pipeline, of a rule or "
    "annotator, or a further field of the input."
)


class ValueWeightsConfig(Section):
    """Weights by value of a column: 0 leaves documents out, 0.5 keeps half of them, 2 has each
    twice, 2.5 twice or three times.
    """

    kind: Literal["values"]
    column: str = Field(description=f"Column: {_COLUMN}")
    weights: dict[str, DocumentWeight] = Field(
        min_length=1, description="Weight of each value, such as `{en: 0.5, de: 2}`."
    )
    other: DocumentWeight = Field(
        1.0, description="Weight of documents with another value, or without one."
    )

    @field_validator("weights", mode="before")
    @classmethod
    def _name_values(cls, weights: Any) -> Any:
        """YAML reads `2024` and `true` as no texts."""
        if not isinstance(weights, dict):
            return weights
        return {
            str(value).lower() if isinstance(value, bool) else str(value): weight
            for value, weight in weights.items()
        }


class BucketWeightsConfig(Section):
    """Weights by ranges of a column of numbers, such as the score of a classifier."""

    kind: Literal["buckets"]
    column: str = Field(description=f"Column of numbers: {_COLUMN}")
    edges: tuple[float, ...] = Field(
        min_length=1,
        description="Edges between buckets, rising; an edge is in the bucket above it.",
    )
    weights: tuple[DocumentWeight, ...] = Field(
        description="Weight of each bucket, one more than edges."
    )
    missing: DocumentWeight = Field(1.0, description="Weight of documents without a number.")

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        if any(edge >= following for edge, following in pairwise(self.edges)):
            yield Violation("edges", f"{list(self.edges)} do not rise. Sort them, each once.")
        if len(self.weights) != len(self.edges) + 1:
            yield Violation(
                "weights",
                f"{len(self.weights)} weights for {len(self.edges)} edges. Give "
                f"{len(self.edges) + 1}: one below the first edge, and one above each.",
            )


class CapConfig(Section):
    """A limit on the documents with the same value of a column.

    Of the documents with a weight above 0 those with the smallest hashes stay. Documents without a
    value are not limited. Each cap counts what the weights leave, not what another cap leaves.
    """

    kind: Literal["cap"]
    column: str = Field(description=f"Column: {_COLUMN}")
    max_documents: int = Field(ge=1, description="Most documents with one value.")


SamplingRule = Annotated[
    ValueWeightsConfig | BucketWeightsConfig | CapConfig, Field(discriminator="kind")
]
