"""Decide about documents that match evaluation items, and report the matches.

Returns a verdict per document and a report row per document and item: which n-gram, where, how
many. Writes the rows as JSON lines.

`cut_spans` removes matches from a text as GPT-3 did (Brown et al. 2020, appendix C). Each match is
removed with a margin on both sides, short remaining pieces are removed too, and a text that falls
into too many pieces is dropped. Pieces are joined by a blank line; margins end at white space."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.decontamination import NgramDecontaminationConfig
from llmsys.data_pipeline.core.funnel import DECONTAMINATE
from llmsys.data_pipeline.decontaminate.evaluation_index import EvaluationIndex
from llmsys.data_pipeline.decontaminate.ngram_index import PARTS, read_item_names
from llmsys.dataset.manifest_section import (
    ContaminatedDocument,
    DecontaminationSummary,
    SetContamination,
    SparedDocument,
    SparedItem,
)
from llmsys.storage.atomic_write import write_bytes_atomically

Span = tuple[int, int]


class CutResult(NamedTuple):
    """The remaining text, or the reason why there is none (`failure`), with the number of
    pieces.
    """

    text: str
    pieces: int
    failure: str = ""


def cut_spans(text: str, spans: Iterable[Span], config: NgramDecontaminationConfig) -> CutResult:
    """Cut spans out of a text.

    Args:
        text: The text of a document.
        spans: Spans of matches, in characters.
        config: The margin around a match, the shortest piece that stays and the most pieces.

    Returns:
        The text that remains and its pieces; the reason where the document is dropped (nothing
        is left, or too many pieces).
    """
    pieces: list[str] = []
    position = 0
    for begin, end in [*merge_spans(text, spans, config.margin_characters), (len(text), len(text))]:
        piece = text[position:begin].strip()
        if len(piece) >= max(config.min_piece_characters, 1):
            pieces.append(piece)
        position = end
    if not pieces:
        return CutResult("", 0, "nothing left")
    if len(pieces) > config.max_pieces:
        return CutResult("", len(pieces), "pieces")
    return CutResult("\n\n".join(pieces), len(pieces))


def merge_spans(text: str, spans: Iterable[Span], margin: int) -> list[Span]:
    """Extend spans by a margin and merge those that touch.

    Args:
        text: The text of a document.
        spans: Spans of matches, in characters.
        margin: Characters on each side.

    Returns:
        Sorted spans; each ends between words.
    """
    found: list[Span] = []
    for begin, end in sorted(spans):
        begin, end = (
            _find_word_start(text, max(0, begin - margin)),
            _find_word_end(text, min(len(text), end + margin)),
        )
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


# characters; a margin that ends in a longer run without spaces ends right there
_LONGEST_WORD = 100


def _find_word_start(text: str, position: int) -> int:
    for start in range(position, max(0, position - _LONGEST_WORD), -1):
        if text[start - 1].isspace():
            return start
    return position


def _find_word_end(text: str, position: int) -> int:
    for end in range(position, min(len(text), position + _LONGEST_WORD)):
        if text[end].isspace():
            return end
    return position


SPARED = "spared"
EXAMPLES = 5
MAX_SPARED_ITEMS = 100  # listed in the manifest per set; the reports list all
_EXCERPT_CHARACTERS = 80  # of the text before and after a match
_MATCH_CHARACTERS = 400  # of an n-gram or excerpt in a report row


class ContaminationResult(NamedTuple):
    """The result for a document: its new text, or the verdict that drops it, or neither; and its
    report rows.
    """

    text: str | None
    verdict: tuple[str, float | None, float | None, str] | None
    rows: list[dict[str, Any]]


class ContaminationJudge:
    """Judge of documents by their matches."""

    def __init__(
        self, config: NgramDecontaminationConfig, index: EvaluationIndex, items: Path
    ) -> None:
        """Read the names of the evaluation items.

        Args:
            config: Decides whether a match drops a document or is cut out of it.
            index: The n-grams and parts that the matches number.
            items: File of items that was written with the index.
        """
        self._config = config
        self._index = index
        self._names = read_item_names(items)

    def judge_document(
        self, document: dict[str, Any], matches: pa.RecordBatch
    ) -> ContaminationResult:
        """Judge a document by its matches.

        Args:
            document: Its columns `id`, `url` and `text`.
            matches: Its rows of `DECIDED_SCHEMA`. Spared ones are only reported.

        Returns:
            The cut text, or the verdict that drops the document, or neither where all matches are
            spared; and the rows of the report.
        """
        is_spared = matches.column("spared")
        spared = [
            {**row, "action": SPARED}
            for row in self._build_rows(document, matches.filter(is_spared))
        ]
        matches = matches.filter(pc.invert(is_spared))
        if not matches.num_rows:
            return ContaminationResult(None, None, spared)
        rows = self._build_rows(document, matches)
        first = rows[0]
        others = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        share = f", {first['share']:.0%} of its words" if first["share"] else ""
        where = f"{first['set']} {first['item']}{share}{others}"
        count = float(matches.num_rows)
        verdict: tuple[str, float | None, float | None, str] | None
        text = None
        verdict = (
            "matches",
            count,
            0.0,
            f"{DECONTAMINATE}: matches {count:g} > 0 ({where}: {first['ngram']!r})",
        )
        if self._config.action == "cut":
            spans = zip(
                matches.column("begin").to_pylist(), matches.column("end").to_pylist(), strict=True
            )
            cut = cut_spans(document["text"], spans, self._config)
            text, verdict = (
                (None, self._build_cut_verdict(cut.failure, cut.pieces, where))
                if cut.failure
                else (cut.text, None)
            )
        rows = [{**row, "action": "dropped" if verdict else "cut"} for row in rows]
        return ContaminationResult(
            text, verdict, rows if verdict else [*rows, *_drop_reported_items(spared, rows)]
        )

    def _build_cut_verdict(
        self, test: str, pieces: int, where: str
    ) -> tuple[str, float | None, float | None, str]:
        if test == "pieces":
            limit = self._config.max_pieces
            return (
                test,
                float(pieces),
                float(limit),
                f"{DECONTAMINATE}: pieces {pieces} > {limit} ({where} cut out)",
            )
        return test, None, None, f"{DECONTAMINATE}: {test} ({where} cut out)"

    def _build_rows(
        self, document: dict[str, Any], matches: pa.RecordBatch
    ) -> list[dict[str, Any]]:
        """Build one row per item, in text order."""
        which, held, parts = self._index.get_items(matches.column("gram").to_numpy())
        items, first, inverse, counts = np.unique(
            held, return_index=True, return_inverse=True, return_counts=True
        )
        shares = np.zeros(len(items), np.float32)
        np.maximum.at(shares, inverse, matches.column("share").to_numpy()[which])
        order = np.argsort(first).tolist()
        return [
            self._build_row(
                document,
                matches,
                int(which[at]),
                PARTS[parts[at]],
                self._get_set_and_name(item),
                int(counts[number]),
                float(shares[number]),
            )
            for number, item, at in ((i, int(items[i]), int(first[i])) for i in order)
        ]

    def _get_set_and_name(self, item: int) -> tuple[str, str]:
        """Return the set of an item and its name in it."""
        return self._names.column("set")[item].as_py(), self._names.column("item")[item].as_py()

    def _build_row(
        self,
        document: dict[str, Any],
        matches: pa.RecordBatch,
        row: int,
        part: str,
        name: tuple[str, str],
        count: int,
        share: float,
    ) -> dict[str, Any]:
        begin, end = matches.column("begin")[row].as_py(), matches.column("end")[row].as_py()
        gram = matches.column("gram")[row].as_py()
        text = document["text"]
        return {
            "set": name[0],
            "item": name[1],
            "part": part,
            "words": int(self._index.get_words(np.array([gram]))[0]),
            # of the item's words that count, in the best passage; None without a fuzzy match
            "share": round(share, 4) or None,
            "matches": count,
            "ngram": " ".join(text[begin:end].split())[:_MATCH_CHARACTERS],
            "url": document["url"],
            "id": document["id"],
            "excerpt": text[max(0, begin - _EXCERPT_CHARACTERS) : end + _EXCERPT_CHARACTERS][
                :_MATCH_CHARACTERS
            ],
        }


def _drop_reported_items(
    rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows whose items are in none of the other rows."""
    named = {(row["set"], row["item"]) for row in others}
    return [row for row in rows if (row["set"], row["item"]) not in named]


def summarize_rows(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarize the report rows of one file, by evaluation set.

    Args:
        rows: report rows of `ContaminationResult`.

    Returns:
        Per set: numbers of documents `dropped` and `cut`, the `items` found, the items `spared`,
        and `examples`.
    """
    sets: dict[str, dict[str, Any]] = {}
    for row in rows:
        counts = sets.setdefault(
            row["set"], {"dropped": set(), "cut": set(), "items": set(), "rows": [], SPARED: {}}
        )
        if row["action"] == SPARED:
            _count_spared(counts[SPARED], row)
            continue
        counts[row["action"]].add(row["id"])
        counts["items"].add(row["item"])
        counts["rows"].append(row)
    return {
        name: {
            "dropped": len(counts["dropped"]),
            "cut": len(counts["cut"]),
            "items": sorted(counts["items"]),
            "examples": _select_examples(counts["rows"]),
            SPARED: counts[SPARED],
        }
        for name, counts in sets.items()
    }


def _count_spared(items: dict[str, dict[str, Any]], row: Mapping[str, Any]) -> None:
    """Count a document of a spared item; the documents with the smallest ids are the examples."""
    new = {
        "documents": 1,
        "ngram": row["ngram"],
        "examples": [{"id": row["id"], "url": row["url"]}],
    }
    items[row["item"]] = _join_spared(items[row["item"]], new) if row["item"] in items else new


def _join_spared(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Join the summaries of two groups of documents for one spared item."""
    examples = sorted(
        [*one["examples"], *other["examples"]], key=lambda example: str(example["id"])
    )[:EXAMPLES]
    ngram = min(one["ngram"], other["ngram"])
    return {
        "documents": one["documents"] + other["documents"],
        "ngram": ngram,
        "examples": examples,
    }


def _build_spared_items(summaries: Iterable[Mapping[str, Any]]) -> list[SparedItem]:
    """Return the spared items of a set from the summaries of all files, those with most
    documents first.
    """
    items: dict[str, dict[str, Any]] = {}
    for summary in summaries:
        for name, item in summary.get(SPARED, {}).items():
            items[name] = _join_spared(items[name], item) if name in items else item
    order = sorted(items, key=lambda name: (-items[name]["documents"], name))
    return [
        SparedItem(
            item=name,
            ngram=items[name]["ngram"],
            documents=items[name]["documents"],
            examples=tuple(SparedDocument(**example) for example in items[name]["examples"]),
        )
        for name in order
    ]


def _select_examples(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["id"], row["item"]))[:EXAMPLES]


def merge_summaries(
    sets: Mapping[str, Mapping[str, int]], exempt: int, summaries: Sequence[Mapping[str, Any]]
) -> DecontaminationSummary:
    """Merge the summaries of all files.

    Args:
        sets: numbers of items and n-grams of each evaluation set, from `write_ngram_index`.
        exempt: number of n-grams that are exempt because they are too common.
        summaries: results of `summarize_rows`, in any order.

    Returns:
        The decontamination section of the manifest.
    """
    return DecontaminationSummary(
        sets={name: _merge_set_summaries(name, counts, summaries) for name, counts in sets.items()},
        exempt_ngrams=exempt,
    )


def _merge_set_summaries(
    name: str, counts: Mapping[str, int], summaries: Sequence[Mapping[str, Any]]
) -> SetContamination:
    own = [summary[name] for summary in summaries if name in summary]
    fields = ContaminatedDocument.model_fields
    spared = _build_spared_items(own)
    return SetContamination(
        **counts,
        items_found=len({item for summary in own for item in summary["items"]}),
        documents_dropped=sum(summary["dropped"] for summary in own),
        documents_cut=sum(summary["cut"] for summary in own),
        examples=tuple(
            ContaminatedDocument(**{key: row[key] for key in fields})
            for row in _select_examples([row for summary in own for row in summary["examples"]])
        ),
        items_spared=len(spared),
        spared=tuple(spared[:MAX_SPARED_ITEMS]),
    )


def write_contamination_report(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write report rows as JSON lines.

    Args:
        path: the file to write, atomically.
        rows: report rows.
    """
    lines = (json.dumps(row, ensure_ascii=False, sort_keys=False) for row in rows)
    write_bytes_atomically(path, "".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
