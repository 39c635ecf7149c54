"""Filter a block again after thresholds changed: measure the documents whose verdict may differ.

Reads what an earlier config kept and dropped of the block, and of the extracted texts those of such
documents. What is written are the bytes that the stage `filter` would write from all of them.

Invariants:
    - A row is taken over only where its verdict is proven: a kept document whose stored statistics,
      which are rounded to float32, are within every new limit by more than the rounding; a dropped
      one whose value, which is stored as measured, fails its test still, where no earlier test
      became stricter. All others are measured.
    - Where something cannot be proven, such as two documents at one offset, nothing is taken over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.custom_rules import (
    AnnotatorConfig,
    BadWordsConfig,
    EncoderClassifierConfig,
    FastTextClassifierConfig,
    LinearClassifierConfig,
    MapperConfig,
    PerplexityConfig,
    PythonRuleConfig,
)
from llmsys.config.language import DEFAULT, LanguageRules, parse_language_rules
from llmsys.config.line_rules import (
    C4Config,
    C4DatatroveConfig,
    C4DolmaConfig,
    LineCorrectionsConfig,
)
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    NativeTextConfig,
    RuleConfig,
)
from llmsys.config.source_code import SourceCodeConfig
from llmsys.data_pipeline.core.document_schema import concat_batches
from llmsys.data_pipeline.core.funnel import format_reason
from llmsys.data_pipeline.rules.chain import list_thresholds
from llmsys.data_pipeline.rules.rule import ThresholdTest
from llmsys.storage.arrow_file import read_batches, read_columns, read_schema

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

# Above this share of the documents that reached the rules, measuring all of them is cheaper.
_LARGEST_SHARE = 0.5


@dataclass(frozen=True)
class EarlierFiltering:
    """The result of an earlier config for the same extracted texts.

    Attributes:
        rules: Its rules, as `serialize_language_rules` writes them.
        result: The result of its task.
    """

    rules: str
    result: dict[str, Any]


@dataclass(frozen=True)
class RuleChange:
    """The limits of one rule that changed for one language.

    Attributes:
        title: Name of the rule.
        limits: Its new limits.
        changed: Indices of the limits with another threshold.
        stricter: Those of them that drop more documents.
    """

    title: str
    limits: Sequence[ThresholdTest]
    changed: frozenset[int] = frozenset()
    stricter: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TakenOver:
    """Rows of an earlier filtering that hold, and the documents to measure again.

    Attributes:
        kept: Rows of kept documents.
        dropped: Rows of dropped documents.
        texts: The extracted texts of the others.
        places: The documents in the file of extracted texts.
    """

    kept: pa.RecordBatch
    dropped: pa.RecordBatch
    texts: pa.RecordBatch
    places: DocumentPlaces


class DocumentPlaces:
    """Places of documents in a file of extracted texts, by their offset in the crawl file."""

    def __init__(self, source: Path) -> None:
        """Read the offsets of a file of extracted texts."""
        offsets = [
            batch.column("offset").to_numpy()
            for batch in read_columns(source, {"offset"}.__contains__)
        ]
        # First row of each batch, and the number of rows.
        self.batches: list[int] = [0, *np.cumsum([len(each) for each in offsets]).tolist()]
        joined = np.concatenate([np.zeros(0, np.int64), *offsets])
        self._order = np.argsort(joined, kind="stable")
        self._sorted = joined[self._order]

    @property
    def is_unique(self) -> bool:
        """True where no two documents have one offset."""
        return bool((np.diff(self._sorted) > 0).all())

    def find_rows(self, documents: pa.RecordBatch) -> Rows:
        """Return the row of each document, which must be in the file."""
        found: Rows = self._order[
            np.searchsorted(self._sorted, documents.column("offset").to_numpy())
        ]
        return found

    def iter_batches(self, documents: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield documents batch by batch of the extracted texts, in the order they have there."""
        rows = self.find_rows(documents)
        order = np.argsort(rows, kind="stable")
        edges = np.searchsorted(rows[order], self.batches)
        for first, last in pairwise(edges.tolist()):
            yield documents.take(pa.array(order[first:last]))


def list_threshold_fields(rule: RuleConfig) -> frozenset[str]:
    """Return the fields of a rule that only its limits read: what the rule measures, how it
    rewrites a text and its other tests do not depend on them.

    Args:
        rule: The configuration of the rule.

    Returns:
        Names of fields; none where another value may change more than a limit.
    """
    match rule:
        case (
            GopherRepetitionConfig()
            | GopherQualityConfig()
            | FinewebQualityConfig()
            | NativeTextConfig()
            | SourceCodeConfig()
        ):
            fields = type(rule).model_fields
            return frozenset(name for name in fields if name.startswith(("min_", "max_")))
        case C4Config():
            return frozenset({"min_sentences", "max_page_characters"})
        case C4DatatroveConfig():
            return frozenset({"min_sentences"})
        case LineCorrectionsConfig():
            return frozenset({"max_removed_word_share"})
        case FastTextClassifierConfig() | LinearClassifierConfig() | EncoderClassifierConfig():
            return frozenset({"min_score", "max_score"})
        # the column `bucket` follows from the limits; listed words have no limit in some modes
        case PerplexityConfig() | BadWordsConfig() | C4DolmaConfig():
            return frozenset()
        case PythonRuleConfig() | AnnotatorConfig() | MapperConfig():
            return frozenset()
        case unreachable:
            assert_never(unreachable)


@lru_cache(maxsize=4)
def compare_rules(before: str, after: str) -> Mapping[str, Sequence[RuleChange]] | None:
    """Compare the rules of two configs.

    Args:
        before: Rules by language, as `serialize_language_rules` writes them.
        after: The same of the other config.

    Returns:
        The changes by language, one per rule in order; None if more than thresholds differs.
    """
    # Not the cached function: it holds one text, that of the present config.
    old, new = (parse_language_rules.__wrapped__(text) for text in (before, after))
    if old.keys() != new.keys():
        return None
    found = {}
    for code, own in new.items():
        changes = _compare_language(old[code], own, code)
        if changes is None:
            return None
        found[code] = changes
    return found


def _compare_language(
    old: LanguageRules, new: LanguageRules, code: str
) -> Sequence[RuleChange] | None:
    if old.words != new.words or len(old.rules) != len(new.rules):
        return None
    changes = []
    for before, after in zip(old.rules, new.rules, strict=True):
        change = _compare_rule(before, after, code)
        if change is None:
            return None
        changes.append(change)
    return changes


def _compare_rule(before: RuleConfig, after: RuleConfig, code: str) -> RuleChange | None:
    if before == after:
        return RuleChange(after.title, ())
    if type(before) is not type(after) or before.title != after.title:
        return None
    fields = type(after).model_fields
    different = {name for name in fields if getattr(before, name) != getattr(after, name)}
    if not different <= list_threshold_fields(after):
        return None
    limits = list_thresholds(after, code)
    earlier = list_thresholds(before, code)
    if len(earlier) != len(limits):
        return None  # a limit of 0 may mean none
    pairs = list(zip(earlier, limits, strict=True))
    if any(
        (old.test, old.statistic, old.drop_side) != (new.test, new.statistic, new.drop_side)
        for old, new in pairs
    ):
        return None
    changed = [index for index, (old, new) in enumerate(pairs) if old.threshold != new.threshold]
    stricter = [
        index
        for index in changed
        if (pairs[index][1].threshold < pairs[index][0].threshold)
        == (pairs[index][1].drop_side == "above")
    ]
    return RuleChange(after.title, limits, frozenset(changed), frozenset(stricter))


def take_over_rows(
    source: Path, files: Mapping[str, Path], changes: Mapping[str, Sequence[RuleChange]]
) -> TakenOver | None:
    """Read what an earlier filtering of a block decides about it now.

    Args:
        source: File of extracted texts.
        files: Files of its `kept` and `dropped` documents.
        changes: What changed since then, see `compare_rules`.

    Returns:
        The rows that hold; None if it is cheaper or safer to measure every document.
    """
    kept = _read_whole(files["kept"])
    dropped = _read_whole(files["dropped"])
    unsure = _find_unsure_documents(kept, changes)
    dropped, again = _decide_drops(dropped, changes)
    if unsure is None:
        return None
    reached = kept.num_rows + int(_mask_titles(dropped, changes).sum())
    if int(unsure.sum() + again.sum()) > _LARGEST_SHARE * reached:
        return None
    places = DocumentPlaces(source)
    if not places.is_unique or kept.num_rows + dropped.num_rows != places.batches[-1]:
        return None
    wanted = [
        places.find_rows(batch.select(["offset"]).filter(pa.array(mask)))
        for batch, mask in ((kept, unsure), (dropped, again))
    ]
    texts = _read_texts(source, places.batches, np.sort(np.concatenate(wanted)))
    return TakenOver(
        kept.filter(pa.array(~unsure)), dropped.filter(pa.array(~again)), texts, places
    )


def _read_whole(path: Path) -> pa.RecordBatch:
    schema = read_schema(path)
    empty = pa.RecordBatch.from_pylist([], schema)
    return concat_batches([*read_batches(path), empty])


def _find_unsure_documents(
    kept: pa.RecordBatch, changes: Mapping[str, Sequence[RuleChange]]
) -> Mask | None:
    """Mask the kept documents that a changed limit may drop; None if a statistic is not stored."""
    unsure = np.zeros(kept.num_rows, np.bool_)
    languages = np.array(kept.column("language").to_pylist(), np.object_)
    known = np.isin(languages.astype(str), list(changes)) if len(languages) else unsure
    for code, rules in changes.items():
        own = ~known | (languages == code) if code == DEFAULT else languages == code
        for rule in rules:
            for index in rule.changed:
                limit = rule.limits[index]
                name = f"{rule.title}.{limit.statistic}"
                if name not in kept.schema.names:
                    return None
                values = kept.column(name).to_numpy(zero_copy_only=False).astype(np.float32)
                # The measured value is less than one float32 away.
                if limit.drop_side == "above":
                    is_within = np.nextafter(values, np.float32(np.inf)) <= limit.threshold
                else:
                    is_within = np.nextafter(values, np.float32(-np.inf)) >= limit.threshold
                unsure |= own & ~is_within
    return unsure


def _mask_titles(dropped: pa.RecordBatch, changes: Mapping[str, Sequence[RuleChange]]) -> Mask:
    """Mask the documents that a rule dropped."""
    titles = {rule.title for rules in changes.values() for rule in rules}
    return np.array([stage in titles for stage in dropped.column("stage").to_pylist()], np.bool_)


def _decide_drops(
    dropped: pa.RecordBatch, changes: Mapping[str, Sequence[RuleChange]]
) -> tuple[pa.RecordBatch, Mask]:
    """Return the dropped documents with their new thresholds, and mask those whose first failed
    test may be another one now. The language of a dropped document is not stored: what changed for
    any counts for all.
    """
    names = ("stage", "test", "value", "threshold", "reason")
    rows = list(zip(*(dropped.column(name).to_pylist() for name in names), strict=True))
    sides = [_find_side(value, threshold) for _, _, value, threshold, _ in rows]
    keys = [(stage, test, side) for (stage, test, *_), side in zip(rows, sides, strict=True)]
    decisions = {key: _decide_test(*key, changes) for key in set(keys)}
    undecided = np.zeros(len(rows), np.bool_)
    thresholds = [row[3] for row in rows]
    reasons = [row[4] for row in rows]
    for number, (stage, test, value, threshold, reason) in enumerate(rows):
        decision = decisions[keys[number]]
        if not isinstance(decision, ThresholdTest):
            undecided[number] = decision
        # A reason in other words shows that the value is not all that the test saw.
        elif reason == format_reason(stage, test, value, threshold) and _is_beyond(value, decision):
            thresholds[number] = decision.threshold
            reasons[number] = format_reason(stage, test, value, decision.threshold)
        else:
            undecided[number] = True
    written = {"threshold": thresholds, "reason": reasons}
    columns = [
        pa.array(written[field.name], field.type)
        if field.name in written
        else dropped.column(field.name)
        for field in dropped.schema
    ]
    return pa.record_batch(columns, schema=dropped.schema), undecided


def _is_beyond(value: float | None, limit: ThresholdTest) -> bool:
    """Return whether a value fails a limit, both as they are and in float32: a rule that measures
    in float32 compares in it.
    """
    if value is None:
        return False
    pairs: list[tuple[float, float]] = [
        (value, limit.threshold),
        (float(np.float32(value)), float(np.float32(limit.threshold))),
    ]
    if limit.drop_side == "above":
        return all(measured > threshold for measured, threshold in pairs)
    return all(measured < threshold for measured, threshold in pairs)


def _find_side(value: float | None, threshold: float | None) -> str | None:
    """Return the side of its limit on which a value lies; None if nothing was measured."""
    if value is None or threshold is None:
        return None
    return "above" if value > threshold else "below"


def _decide_test(
    stage: str, test: str, side: str | None, changes: Mapping[str, Sequence[RuleChange]]
) -> bool | ThresholdTest:
    """Return what decides about the documents that a test dropped: False if they stay as they are,
    the limit that has their values now, True if only measuring them does.
    """
    found = {_decide_rule_test(stage, test, side, rules) for rules in changes.values()}
    return found.pop() if len(found) == 1 else True


def _decide_rule_test(
    stage: str, test: str, side: str | None, rules: Sequence[RuleChange]
) -> bool | ThresholdTest:
    """Return the same for documents of one language."""
    titles = [rule.title for rule in rules]
    if stage not in titles:
        return False  # they reached no rule
    number = titles.index(stage)
    if any(rule.stricter for rule in rules[:number]):
        return True
    rule = rules[number]
    if not rule.changed:
        return False
    # Two limits of a side may have one name, and other tests than limits have their own place in
    # the order.
    places = {
        index
        for index, limit in enumerate(rule.limits)
        if limit.test == test and side in (None, limit.drop_side)
    }
    if not places or any(index < max(places) for index in rule.stricter):
        return True
    if not places & rule.changed:
        return False
    return rule.limits[places.pop()] if len(places) == 1 else True


def _read_texts(source: Path, batches: Sequence[int], rows: Rows) -> pa.RecordBatch:
    """Read some rows of a file of extracted texts, in order."""
    edges = np.searchsorted(rows, batches).tolist()
    parts = [pa.RecordBatch.from_pylist([], read_schema(source))]
    for number, (first, last) in enumerate(pairwise(edges)):
        if first < last:
            (batch,) = read_batches(source, [number])
            parts.append(batch.take(pa.array(rows[first:last] - batches[number])))
    return concat_batches(parts)
