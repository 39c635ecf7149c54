"""Find the documents nearest to each threshold, dropped and kept: per document file, then merged.

Reads the statistics in documents/ and the values in dropped/ batch by batch, and the texts of the
few documents to show. Writes a summary per file; the merge returns a `ThresholdReport` per test.

Invariants:
- The documents shown are those nearest by distance, then by id, whatever the files, the batches and
  their order.
- Memory and the size of a summary do not grow with the dataset.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.language import DEFAULT, LanguageConfig, parse_language_rules
from llmsys.data_pipeline.core.funnel import EXAMPLE_CHARACTERS, EXAMPLES
from llmsys.data_pipeline.executors.base import Report
from llmsys.dataset.manifest_section import (
    CLOSE,
    NearThresholdDocument,
    ThresholdReport,
    ThresholdSide,
)
from llmsys.storage.arrow_file import read_columns
from llmsys.storage.atomic_write import write_bytes_atomically

if TYPE_CHECKING:
    from llmsys.data_pipeline.rules.rule import ThresholdTest


Floats = npt.NDArray[np.float64]


class BatchLocation(NamedTuple):
    """One record batch and the ids of its documents."""

    path: Path
    batch: int
    ids: pa.Array


class NearestDocument(NamedTuple):
    """A document near a threshold and the location of its text; sorts by distance, then by id."""

    distance: float
    id: str
    value: float
    threshold: float
    path: Path
    batch: int
    row: int


@dataclass
class FileThresholdSide:
    """One side of a threshold, collected from one file."""

    documents: int = 0
    bytes: int = 0
    close: int = 0
    nearest: list[NearestDocument] = field(default_factory=list)
    thresholds: set[float] = field(default_factory=set)

    def add_batch(
        self,
        values: Floats,
        thresholds: Floats,
        rows: npt.NDArray[np.int64],
        location: BatchLocation,
    ) -> None:
        """Count documents of a batch and keep the nearest.

        Args:
            values: (D,) measured values.
            thresholds: (D,) limits, which differ by language.
            rows: (D,) rows of the documents in the batch.
            location: Where the batch is, so that the report can read the nearest documents.
        """
        distances = np.abs(values - thresholds)
        self.documents += len(values)
        self.close += int((distances <= CLOSE * np.abs(thresholds)).sum())
        self.thresholds.update(np.unique(thresholds).tolist())
        bound = self.nearest[-1].distance if len(self.nearest) == EXAMPLES else np.inf
        if len(distances) > EXAMPLES:  # partition first: few documents then become Python objects
            bound = min(bound, float(np.partition(distances, EXAMPLES - 1)[EXAMPLES - 1]))
        near = np.flatnonzero(distances <= bound)
        columns = (column[near].tolist() for column in (distances, values, thresholds, rows))
        ids = location.ids.take(pa.array(rows[near])).to_pylist()
        for name, distance, value, threshold, row in zip(ids, *columns, strict=True):
            self.nearest.append(
                NearestDocument(
                    distance, name, value, threshold, location.path, location.batch, row
                )
            )
        self.nearest = sorted(self.nearest)[:EXAMPLES]

    def to_dict(self, texts: Mapping[tuple[Path, int, int], Mapping[str, str]]) -> dict[str, Any]:
        """Return a JSON-serializable summary; `texts` has URL, excerpt and reason of each shown
        document.
        """
        nearest = [
            {
                "id": one.id,
                "value": one.value,
                "threshold": one.threshold,
                **texts[one.path, one.batch, one.row],
            }
            for one in self.nearest
        ]
        counts = {"documents": self.documents, "bytes": self.bytes, "close": self.close}
        return {**counts, "thresholds": sorted(self.thresholds), "nearest": nearest}


@dataclass
class MergedThresholdSide:
    """One side of a threshold, merged over all files."""

    side: ThresholdSide = field(default_factory=ThresholdSide)
    thresholds: frozenset[float] = frozenset()

    def merge_file(self, plain: Mapping[str, Any]) -> None:
        """Add the summary of one file: `FileThresholdSide.to_dict`."""
        nearest = [*self.side.nearest, *(NearThresholdDocument(**one) for one in plain["nearest"])]
        nearest.sort(key=lambda one: (abs(one.value - one.threshold), one.id))
        self.side = ThresholdSide(
            self.side.documents + plain["documents"],
            self.side.bytes + plain["bytes"],
            self.side.close + plain["close"],
            tuple(nearest[:EXAMPLES]),
        )
        self.thresholds |= frozenset(plain["thresholds"])


Key = tuple[str, str, str]  # rule, test, above or below
_Texts = dict[tuple[Path, int, int], dict[str, str]]

_DROPPED = ("id", "rule", "test", "value", "threshold", "bytes")
_SHOWN = ("url", "text", "reason")


class LanguageThresholds:
    """The tests of each language that compare a stored statistic with a threshold.

    Args:
        language: the kept languages, and their minimum score.
        rules: rules per language, as `serialize_language_rules` writes them.
    """

    def __init__(self, language: LanguageConfig, rules: str) -> None:
        self._language = language
        self._rules = parse_language_rules(rules)
        self._by_language: dict[str, list[tuple[Key, str, float]]] = {}
        self.rules = {"language", *(rule.title for rule in self._rules[DEFAULT].rules)}

    def list_tests(self) -> list[Key]:
        """Return every test in order, whether or not a document reached it."""
        first = self._language.languages[0] if self._language.languages else DEFAULT
        return [key for key, _, _ in self.get_thresholds(first)]

    def get_thresholds(self, code: str) -> list[tuple[Key, str, float]]:
        """Return the tests of documents in one language.

        Args:
            code: Language code. One without rules has those of `default`.

        Returns:
            (rule, test, "above" or "below"), name of the column and threshold of each test: that of
            the language's score, then those of the rules in order. Thresholds that can drop nothing
            are left out: infinite ones, and a minimum of zero.
        """
        if code not in self._by_language:
            self._by_language[code] = list(self._iter_thresholds(code))
        return self._by_language[code]

    def _iter_thresholds(self, code: str) -> Iterator[tuple[Key, str, float]]:
        # not where the stage is only planned
        from llmsys.data_pipeline.rules.chain import list_thresholds

        yield ("language", "score", "below"), "language_score", self._language.min_score
        for rule in self._rules.get(code, self._rules[DEFAULT]).rules:
            for limit in list_thresholds(rule, code):
                if _can_drop(limit):
                    yield (
                        (rule.title, limit.test, limit.drop_side),
                        f"{rule.title}.{limit.statistic}",
                        limit.threshold,
                    )


def _can_drop(limit: ThresholdTest) -> bool:
    """Return whether the threshold can drop a document: it is finite, and not a minimum of zero."""
    # No count or share is below zero.
    return bool(np.isfinite(limit.threshold)) and not (
        limit.drop_side == "below" and limit.threshold == 0
    )


def summarize_near_thresholds(
    report: Report,
    *,
    documents: Path,
    dropped: Path,
    output: Path,
    language: LanguageConfig,
    rules: str,
) -> dict[str, Any]:
    """Summarize the documents near thresholds of one file.

    Args:
        report: progress callback, in documents.
        documents: file of kept documents.
        dropped: file of dropped documents.
        output: the JSON file to write.
        language: the kept languages, and their minimum score.
        rules: rules per language, as `serialize_language_rules` writes them.

    Returns:
        {}: the result is in `output`.
    """
    limits = LanguageThresholds(language, rules)
    kept: dict[Key, FileThresholdSide] = {key: FileThresholdSide() for key in limits.list_tests()}
    dropped_sides: dict[Key, FileThresholdSide] = {}
    _read_kept(documents, limits, kept, report)
    _read_dropped(dropped, limits.rules, dropped_sides, report)
    found = [
        document
        for sides in (kept, dropped_sides)
        for side in sides.values()
        for document in side.nearest
    ]
    texts = _read_excerpts(found)
    summaries = [
        {
            "test": key,
            "dropped": dropped_sides.get(key, FileThresholdSide()).to_dict(texts),
            "kept": kept.get(key, FileThresholdSide()).to_dict(texts),
        }
        for key in dict.fromkeys([*kept, *dropped_sides])
    ]
    write_bytes_atomically(
        output, json.dumps(summaries, ensure_ascii=False, separators=(",", ":")).encode()
    )
    return {}


def merge_threshold_reports(
    summaries: Iterable[Path], limits: LanguageThresholds, stages: Sequence[str]
) -> tuple[ThresholdReport, ...]:
    """Merge the summaries of all files.

    Args:
        summaries: files that `summarize_near_thresholds` wrote, in any order; one is in memory at a
            time.
        limits: thresholds of the same config.
        stages: stages of the funnel, in order.

    Returns:
        A report for each test of language and rules that has a threshold and met documents, in the
        order of the funnel.
    """
    sides: dict[Key, tuple[MergedThresholdSide, MergedThresholdSide]] = {
        key: (MergedThresholdSide(), MergedThresholdSide()) for key in limits.list_tests()
    }
    for path in summaries:
        for one in json.loads(path.read_bytes()):
            dropped_sides, kept = sides.setdefault(
                cast(Key, tuple(one["test"])), (MergedThresholdSide(), MergedThresholdSide())
            )
            dropped_sides.merge_file(one["dropped"])
            kept.merge_file(one["kept"])
    order = {stage: number for number, stage in enumerate(stages)}
    first = {key: number for number, key in enumerate(limits.list_tests())}
    keys = sorted(
        sides, key=lambda key: (order.get(key[0], len(order)), first.get(key, len(first)), key)
    )
    reports = [_build_threshold_report(key, *sides[key]) for key in keys]
    return tuple(report for report in reports if report.dropped.documents or report.kept.documents)


def _build_threshold_report(
    key: Key, dropped: MergedThresholdSide, kept: MergedThresholdSide
) -> ThresholdReport:
    drops = cast(Literal["above", "below"], key[2])
    thresholds = tuple(sorted(dropped.thresholds | kept.thresholds))
    return ThresholdReport(key[0], key[1], drops, thresholds, dropped.side, kept.side)


def _read_kept(
    path: Path, limits: LanguageThresholds, sides: dict[Key, FileThresholdSide], report: Report
) -> None:
    """Add the kept documents, compared with the thresholds of their language."""
    for number, batch in enumerate(
        read_columns(path, lambda name: name in ("id", "language") or _is_measured_column(name))
    ):
        location = BatchLocation(path, number, batch.column("id"))
        codes = batch.column("language").to_numpy(zero_copy_only=False)
        for code in sorted(set(codes.tolist())):
            rows = np.flatnonzero(codes == code)
            for key, column, threshold in limits.get_thresholds(code):
                if column not in batch.schema.names:
                    continue
                values = _get_float_column(batch, column)[rows]
                known = np.isfinite(values)
                side = sides.setdefault(key, FileThresholdSide())
                side.add_batch(
                    values[known], np.full(int(known.sum()), threshold), rows[known], location
                )
        report(batch.num_rows, 0)


def _is_measured_column(name: str) -> bool:
    return "." in name or name == "language_score"


def _read_dropped(
    path: Path, rules: Set[str], sides: dict[Key, FileThresholdSide], report: Report
) -> None:
    """Add the documents that `rules` dropped by a value, compared with their thresholds."""
    import pyarrow.compute as pc  # slow to import

    for number, batch in enumerate(read_columns(path, _DROPPED.__contains__)):
        location = BatchLocation(path, number, batch.column("id"))
        values, thresholds, sizes = (
            _get_float_column(batch, name) for name in ("value", "threshold", "bytes")
        )
        names = pc.binary_join_element_wise(
            batch.column("rule"), batch.column("test"), "\0"
        ).to_numpy(zero_copy_only=False)
        known = np.isfinite(values) & np.isfinite(thresholds)
        for name in sorted(set(names[known].tolist())):
            rule, _, test = name.partition("\0")
            if rule not in rules:
                continue
            for drops, beyond in (("above", values > thresholds), ("below", values <= thresholds)):
                rows = np.flatnonzero(known & beyond & (names == name))
                if len(rows):
                    side = sides.setdefault((rule, test, drops), FileThresholdSide())
                    side.add_batch(values[rows], thresholds[rows], rows, location)
                    side.bytes += int(sizes[rows].sum())
        report(batch.num_rows, 0)


def _get_float_column(batch: pa.RecordBatch, name: str) -> Floats:
    """Return a column as float64, NaN for nulls."""
    values = batch.column(name).to_numpy(zero_copy_only=False)
    return np.asarray(values, np.float64)


def _read_excerpts(found: Sequence[NearestDocument]) -> _Texts:
    """Return URL, excerpt and reason of the shown documents, by location."""
    wanted: dict[tuple[Path, int], set[int]] = {}
    for one in found:
        wanted.setdefault((one.path, one.batch), set()).add(one.row)
    texts: _Texts = {}
    for (path, number), rows in wanted.items():
        batch = next(iter(read_columns(path, _SHOWN.__contains__, [number])))
        for row in rows:
            values = {
                name: batch.column(name)[row].as_py() or ""
                for name in _SHOWN
                if name in batch.schema.names
            }
            text = values["text"]
            excerpt = text[:EXAMPLE_CHARACTERS] + "…" * (len(text) > EXAMPLE_CHARACTERS)
            texts[path, number, row] = {
                "url": values["url"],
                "excerpt": excerpt,
                "reason": values.get("reason", ""),
            }
    return texts
