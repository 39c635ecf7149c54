"""The documents nearest to one threshold on one side: looked for file by file, joined afterwards.

Reads values and thresholds by columns; gives counts, and the nearest few documents. Promises: whatever the files, the
batches and their order, the nearest are by distance and then by id.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_pipeline.funnel import EXAMPLES
from llmsys.threshold import CLOSE, NearThresholdDocument, ThresholdSide

Floats = npt.NDArray[np.float64]


class BatchLocation(NamedTuple):
    """One record batch and the ids of its documents."""

    path: Path
    batch: int
    ids: pa.Array


class NearestDocument(NamedTuple):
    """A document near a threshold and where its text is; sorts by distance, then by id."""

    distance: float
    id: str
    value: float
    threshold: float
    path: Path
    batch: int
    row: int


@dataclass
class FileThresholdSide:
    """One side of a threshold while the documents of one file are read."""

    documents: int = 0
    bytes: int = 0
    close: int = 0
    nearest: list[NearestDocument] = field(default_factory=list)
    thresholds: set[float] = field(default_factory=set)

    def add_batch(self, values: Floats, thresholds: Floats, rows: npt.NDArray[np.int64], place: BatchLocation) -> None:
        """Count documents of a batch and keep the nearest."""
        distances = np.abs(values - thresholds)
        self.documents += len(values)
        self.close += int((distances <= CLOSE * np.abs(thresholds)).sum())
        self.thresholds.update(np.unique(thresholds).tolist())
        bound = self.nearest[-1].distance if len(self.nearest) == EXAMPLES else np.inf
        if len(distances) > EXAMPLES:
            bound = min(bound, float(np.partition(distances, EXAMPLES - 1)[EXAMPLES - 1]))
        near = np.flatnonzero(distances <= bound)
        columns = (column[near].tolist() for column in (distances, values, thresholds, rows))
        ids = place.ids.take(pa.array(rows[near])).to_pylist()
        for name, distance, value, threshold, row in zip(ids, *columns, strict=True):
            self.nearest.append(NearestDocument(distance, name, value, threshold, place.path, place.batch, row))
        self.nearest = sorted(self.nearest)[:EXAMPLES]

    def to_dict(self, texts: Mapping[tuple[Path, int, int], Mapping[str, str]]) -> dict[str, Any]:
        """What JSON can hold of it; `texts` has URL, excerpt and reason of each document that is shown."""
        nearest = [
            {"id": one.id, "value": one.value, "threshold": one.threshold, **texts[one.path, one.batch, one.row]}
            for one in self.nearest
        ]
        counts = {"documents": self.documents, "bytes": self.bytes, "close": self.close}
        return {**counts, "thresholds": sorted(self.thresholds), "nearest": nearest}


@dataclass
class MergedThresholdSide:
    """One side of a threshold in all files."""

    side: ThresholdSide = field(default_factory=ThresholdSide)
    thresholds: frozenset[float] = frozenset()

    def merge_file(self, plain: Mapping[str, Any]) -> None:
        """Take in what one file has: `NearSide.plain`."""
        nearest = [*self.side.nearest, *(NearThresholdDocument(**one) for one in plain["nearest"])]
        nearest.sort(key=lambda one: (abs(one.value - one.threshold), one.id))
        self.side = ThresholdSide(
            self.side.documents + plain["documents"],
            self.side.bytes + plain["bytes"],
            self.side.close + plain["close"],
            tuple(nearest[:EXAMPLES]),
        )
        self.thresholds |= frozenset(plain["thresholds"])
