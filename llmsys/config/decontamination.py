"""Configuration of decontamination (`data.decontaminate:`): removal of evaluation items from
training data.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.section import LocalPath, Section, raise_violation, raise_violations
from llmsys.errors import Violation

Part = Literal["query", "label", "overlap"]


class EvaluationSetConfig(Section):
    """The items of one evaluation set. Field names may lead into a mapping (`answers.text`) or
    name a list of texts.
    """

    name: str = Field(
        min_length=1, description="Name of the evaluation set, in reasons and reports."
    )
    files: tuple[LocalPath, ...] = Field(
        min_length=1, description="JSON lines files; .gz and .zst are decompressed."
    )
    query_fields: tuple[str, ...] = Field(
        (), description="Fields with the question or prompt, such as [prompt]."
    )
    label_fields: tuple[str, ...] = Field(
        (), description="Fields with the answer, such as [canonical_solution]."
    )
    id_field: str = Field("", description="Field with the item id. Empty: the line number.")

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if not self.query_fields and not self.label_fields:
            raise_violation(
                "query_fields",
                "query_fields and label_fields are both empty. Name a field, such as "
                "query_fields: [prompt].",
            )
        return self


class NoDecontamination(Section):
    """No decontamination."""

    kind: Literal["none"] = "none"


class NoFuzzyMatch(Section):
    """Only exact n-grams find an item."""

    kind: Literal["none"] = "none"


class CoverageFuzzyMatchConfig(Section):
    """Also find items whose words were changed: by the share of an item's words that short n-grams
    cover within a passage of a document.

    A passage is at most half as long again as the item, so that n-grams that are scattered over a
    long document find nothing. N-grams that occur more than ten times among all items do not count.
    The default finds items of which every fifth word was replaced.
    """

    kind: Literal["coverage"] = "coverage"
    min_share: float = Field(
        0.6,
        gt=0,
        le=1,
        description="Minimum share of an item's words to find in one passage. At 0.5 and less, "
        "common code and short sentences match other texts.",
    )
    ngram_words: int = Field(
        3, ge=2, le=13, description="Words per n-gram; longer ones survive fewer changes of words."
    )
    min_item_words: int = Field(
        13,
        ge=1,
        description="Minimum words of a query or label that are in an n-gram that counts; shorter "
        "ones are searched by exact n-grams alone.",
    )


FuzzyMatchConfig = Annotated[NoFuzzyMatch | CoverageFuzzyMatchConfig, Field(discriminator="kind")]


class NgramDecontaminationConfig(Section):
    """Drop documents that share a word n-gram with an evaluation item, or cut the shared span.

    Defaults are GPT-3's (Brown et al. 2020, appendix C): 13-grams of lower-case words without
    punctuation. An n-gram in more than 10 documents is ignored as common. A cut removes 200
    characters on each side of a match. Remaining pieces below 200 characters are dropped, and so
    are documents in more than 10 pieces. As in datatrove, numbers and accents are normalized, and
    n-grams come from the query, the label and their concatenation.
    """

    kind: Literal["ngram"] = "ngram"
    sets: tuple[EvaluationSetConfig, ...] = Field(min_length=1, description="Evaluation sets.")
    ngram_words: int = Field(13, ge=2, le=64, description="Words per n-gram; datatrove uses 12.")
    min_item_words: int = Field(
        5,
        ge=1,
        description="Items shorter than `ngram_words` must match completely; items with fewer "
        "words than this are not searched.",
    )
    parts: tuple[Part, ...] = Field(
        ("query", "label", "overlap"),
        description="Parts of an item to take n-grams from. overlap: across the border of query "
        "and label.",
    )
    max_documents: int = Field(
        10,
        ge=0,
        description="Ignore n-grams (and fuzzy matches of an item) that occur in more documents "
        "than this. 0: ignore none.",
    )
    fuzzy: FuzzyMatchConfig = Field(
        NoFuzzyMatch(),
        description="Also find items of which some words were replaced, added or left out.",
    )
    action: Literal["drop", "cut"] = Field(
        "drop", description="Drop the document, or cut the matched span and its margin."
    )
    margin_characters: int = Field(
        200, ge=0, description="Characters to cut on each side of a match."
    )
    min_piece_characters: int = Field(
        200,
        ge=0,
        description="Minimum characters of a piece that remains after cutting; shorter ones are "
        "removed.",
    )
    max_pieces: int = Field(
        10,
        ge=1,
        description="Maximum pieces of a document after cutting; a document with more is dropped.",
    )

    @model_validator(mode="after")
    def _check_set_names(self) -> Self:
        names = [evaluation_set.name for evaluation_set in self.sets]
        raise_violations(
            Violation(
                f"sets.{number}.name",
                f"{name} is already the name of another set. Give each set a different name.",
            )
            for number, name in enumerate(names)
            if name in names[:number]
        )
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """Files of all evaluation sets."""
        return tuple(path for evaluation_set in self.sets for path in evaluation_set.files)


DecontaminateConfig = Annotated[
    NoDecontamination | NgramDecontaminationConfig, Field(discriminator="kind")
]
