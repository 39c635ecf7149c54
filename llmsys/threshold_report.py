"""Describe the documents nearest to a threshold. The pipeline collects them and the report shows them."""

from dataclasses import dataclass
from typing import Literal

CLOSE = 0.1
"""A document is close to a threshold when its value differs from it by no more than this share of it."""


@dataclass(frozen=True)
class NearThresholdDocument:
    """One document: its measured value, the threshold of its language, and the reason why it was dropped."""

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
