"""Base class of the mappings in manifest.json, and sections that both the pipeline and the page
read.

The sections are about evaluation items found in documents, the documents nearest to a threshold,
token files, and the location of a record in its input file.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict

MANIFEST_NAME = "manifest.json"
# A document is close to a threshold when its value differs from it by no more than this share of
# it.
CLOSE = 0.1


@dataclass(frozen=True)
class NearThresholdDocument:
    """One document: its measured value, the threshold of its language, and the reason why it was
    dropped.
    """

    id: str
    url: str
    value: float
    threshold: float
    excerpt: str
    reason: str = ""


@dataclass(frozen=True)
class ThresholdSide:
    """The documents on one side of a threshold.

    Attributes:
        documents: Number of documents.
        bytes: UTF-8 bytes of their texts when they were dropped; 0 for kept ones.
        close: Number of documents within `CLOSE` of the threshold.
        nearest: A few examples, by distance and then by id.
    """

    documents: int = 0
    bytes: int = 0
    close: int = 0
    nearest: tuple[NearThresholdDocument, ...] = ()


@dataclass(frozen=True)
class ThresholdReport:
    """One test: documents above (or below) the threshold were dropped.

    `thresholds` are all that were applied, in rising order: more than one where languages differ.
    """

    rule: str
    test: str
    drops: Literal["above", "below"]
    thresholds: tuple[float, ...]
    dropped: ThresholdSide
    kept: ThresholdSide


class ManifestSection(BaseModel):
    """One mapping of the manifest: frozen, and strict about keys that this version does not
    know.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class InputColumn(ManifestSection):
    """A column of documents/ and dropped/ that comes from a field of the input.

    `values` counts the values of the field in all rows that were read, nulls excepted. Of these
    `other_values` are not of the column's type, and are in `more_fields`. `json` is a text.
    """

    column: str
    field: str
    type: str
    values: int
    other_values: int


class SampledGroup(ManifestSection):
    """Training documents with one value, or in one bucket, of a column of `data.sampling`, before
    and after sampling. Tokens count the end of each document.
    """

    value: str
    documents: int
    tokens: int
    sampled_documents: int
    sampled_tokens: int


class SampledColumn(ManifestSection):
    """The groups of training documents by one rule of `data.sampling`."""

    column: str
    rule: str
    groups: tuple[SampledGroup, ...]


class SparedDocument(ManifestSection):
    """A document that keeps a spared item."""

    id: str
    url: str


class SparedItem(ManifestSection):
    """An item that stays in documents, because too many of them have its n-gram.

    `documents` counts those that keep it; at most five are examples, those with the smallest ids.
    """

    item: str
    ngram: str
    documents: int
    examples: tuple[SparedDocument, ...]


class ContaminatedDocument(ManifestSection):
    """A document that contains an item of an evaluation set, with the first n-gram they share."""

    item: str
    part: str
    ngram: str
    share: float | None = None  # of the item's words, with a fuzzy match
    matches: int
    action: str
    url: str
    excerpt: str


class SetContamination(ManifestSection):
    """The matches of one evaluation set, with up to five examples: the smallest document ids.

    `too_short` counts parts with too few words to search for, `only_exact` those with too few for a
    fuzzy match. `spared` lists the hundred items with the most documents.
    """

    items: int
    ngrams: int
    too_short: int
    only_exact: int = 0
    items_found: int
    documents_dropped: int
    documents_cut: int
    examples: tuple[ContaminatedDocument, ...]
    items_spared: int = 0
    spared: tuple[SparedItem, ...] = ()


class DecontaminationSummary(ManifestSection):
    """The matches of evaluation sets by name; decontamination/ has a line for each document and
    item.

    `exempt_ngrams` (and fuzzy matches) were found in more documents than the config allows for one
    that decides.
    """

    sets: dict[str, SetContamination]
    exempt_ngrams: int


class TokenBatch(ManifestSection):
    """One Arrow record batch of a token file, in the bytes `begin` to `end` of the file.

    Each checksum is the xxh64 (hex) of a portion that is read separately.
    """

    rows: int
    tokens: int
    begin: int
    end: int
    checksum: str  # over the token ids
    lengths_checksum: str  # over tokens per document and text bytes per document, both int64
    lineage_checksum: str  # over the buffers of the side columns id, file, offset, url_hash


class TokenIndex(ManifestSection):
    """The Arrow file in tokens/ that lists the token files of a split; `digest` is the xxh3_128
    (hex) of its bytes.
    """

    name: str
    files: int
    digest: str


_COUNTED_IN_ROWS = frozenset({".parquet", ".pq", ".arrow", ".feather", ".ipc"})


def is_counted_in_rows(file: str) -> bool:
    """Return True when the offsets of a file are row numbers instead of bytes.

    Args:
        file: The name or path of the file. Its suffix decides.

    Returns:
        True for Parquet and Arrow files.
    """
    return PurePosixPath(file).suffix.lower() in _COUNTED_IN_ROWS


def format_record_place(file: str, offset: int) -> str:
    """Format the location of a record.

    Args:
        file: The name or path of the file.
        offset: The row number or byte offset.

    Returns:
        `FILE at byte 1,234`, or `FILE at row 12`.
    """
    return f"{file} at {'row' if is_counted_in_rows(file) else 'byte'} {offset:,}"
