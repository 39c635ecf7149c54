"""Documents at a threshold: what stands between the pipeline that looks for them and the report that shows them.

Reads nothing; gives `ThresholdReport`, one test of one rule with the documents that lie nearest to its threshold on
both sides.
"""

from dataclasses import dataclass
from typing import Literal

CLOSE = 0.1
"""A document is close to a threshold when its value differs from it by no more than this share of it."""


@dataclass(frozen=True)
class NearThresholdDocument:
    """One document: what the test measured, what that was compared with in its language, and why it was dropped."""

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
        documents: how many there are.
        bytes: of their texts when they were dropped; 0 for kept ones.
        close: how many of them are within `CLOSE` of the threshold.
        nearest: a few, by distance and then by id.
    """

    documents: int = 0
    bytes: int = 0
    close: int = 0
    nearest: tuple[NearThresholdDocument, ...] = ()


@dataclass(frozen=True)
class ThresholdReport:
    """One test: documents above (or below) the threshold were dropped.

    `thresholds` are all that were met, in rising order: more than one where languages differ.
    """

    rule: str
    test: str
    drops: Literal["above", "below"]
    thresholds: tuple[float, ...]
    dropped: ThresholdSide
    kept: ThresholdSide
