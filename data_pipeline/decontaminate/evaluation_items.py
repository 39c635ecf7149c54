"""Read evaluation sets and extract the n-grams of their items.

Reads JSON lines, plain, gzip or zstd; an item has queries and labels. A part (query, label, or
their overlap) of at least n words yields its n-grams. A shorter part is a separate n-gram
length. A part that is too short yields none and is counted.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from llmsys.config.decontamination import EvaluationSetConfig, NgramDecontaminationConfig, Part
from llmsys.data_pipeline.text.word_hashes import (
    Hashes,
    WordHasher,
    iter_joined_readings,
    iter_ngram_hashes,
)
from llmsys.errors import DataError


class EvaluationItem(NamedTuple):
    """One item of an evaluation set."""

    name: str
    queries: list[str]
    labels: list[str]


class ItemNgrams(NamedTuple):
    """N-grams of one part of an item, all of `words` words."""

    hashes: Hashes
    words: int
    part: Part


def read_items(dataset: EvaluationSetConfig) -> Iterator[EvaluationItem]:
    """Read the items of an evaluation set.

    Args:
        dataset: Files and fields of the set.

    Yields:
        The items, in the order of files and rows.

    Raises:
        DataError: Names file and line of an invalid row.
    """
    for path in dataset.files:
        for number, line in enumerate(_read_bytes(path).split(b"\n"), 1):
            if not line.strip():
                continue
            where = f"evaluation set {dataset.name}, {path}, line {number}"
            row = _parse_row(line, where)
            name = (
                _get_texts(row, dataset.id_field, where)[0]
                if dataset.id_field
                else f"{path.name}:{number}"
            )
            queries, labels = (
                [text for key in keys for text in _get_texts(row, key, where)]
                for keys in _get_field_names(dataset)
            )
            yield EvaluationItem(name, queries, labels)


def _get_field_names(dataset: EvaluationSetConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return dataset.query_fields, dataset.label_fields


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            return gzip.decompress(data)
        if path.suffix == ".zst":
            return zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        return data
    except OSError as error:
        reason = error.strerror or str(error)
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        reason = f"it is damaged ({error})"
    raise DataError(
        f"evaluation file {path} cannot be read: {reason}. Correct data.decontaminate.sets."
    )


def _parse_row(line: bytes, where: str) -> Any:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{where}: not JSON ({error}). Give a file with one JSON object per line."
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a {type(row).__name__}, not an object. Give a file with one JSON object "
            "per line."
        )
    return row


def _get_texts(row: Any, key: str, where: str) -> list[str]:
    """Return the text or texts of a field; `a.b` is field b of the mapping a."""
    value = row
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            fields = ", ".join(sorted(map(str, row)))
            raise DataError(
                f"{where}: no field {key!r}; its fields are {fields}. Correct "
                "data.decontaminate.sets."
            )
        value = value[name]
    values = value if isinstance(value, list) else [value]
    return [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values
    ]


def extract_item_ngrams(
    item: EvaluationItem, config: NgramDecontaminationConfig, words: WordHasher
) -> tuple[list[ItemNgrams], int]:
    """Extract the n-grams by which an item is found in documents.

    Args:
        item: Query and labels.
        config: Length of an n-gram and the shortest item.
        words: Splits and hashes words.

    Returns:
        The n-grams of an item, and the number of its parts that are too short to search for. An
        item whose words are broken at line ends has those of the broken and those of the joined
        words.
    """
    found, short = _extract_part_ngrams(item, config, words)
    joined = EvaluationItem(
        item.name, *(list(map(_join_broken_words, texts)) for texts in (item.queries, item.labels))
    )
    if joined != item:
        found = found + _extract_part_ngrams(joined, config, words)[0]
    return found, short


def _join_broken_words(text: str) -> str:
    return next(iter_joined_readings(text), text)


def _extract_part_ngrams(
    item: EvaluationItem, config: NgramDecontaminationConfig, words: WordHasher
) -> tuple[list[ItemNgrams], int]:
    queries, labels = _hash_item_words(item, words)
    found: list[ItemNgrams] = []
    if "query" in config.parts:
        found += [_build_ngrams(query, config, "query") for query in queries]
    if "label" in config.parts:
        found += [_build_ngrams(label, config, "label") for label in labels]
    short = sum(not len(grams.hashes) for grams in found)
    if "overlap" in config.parts and queries:
        found += [_build_overlap_ngrams(queries[-1], label, config) for label in labels]
    return [grams for grams in found if len(grams.hashes)], short


def _hash_item_words(item: EvaluationItem, words: WordHasher) -> tuple[list[Hashes], list[Hashes]]:
    """Return the words of each query and of each label."""
    split = words.hash_words([*item.queries, *item.labels])
    parts = np.split(split.hashes, split.offsets[1:-1])
    return parts[: len(item.queries)], parts[len(item.queries) :]


def list_item_words(
    item: EvaluationItem, config: NgramDecontaminationConfig, words: WordHasher
) -> list[tuple[Part, Hashes]]:
    """List the queries and labels of an item that the config searches for.

    Args:
        item: Query and labels.
        config: Names the parts to search for.
        words: Splits and hashes words.

    Returns:
        The name of each part and its words.
    """
    queries, labels = _hash_item_words(item, words)
    found: list[tuple[Part, Hashes]] = []
    if "query" in config.parts:
        found += [("query", query) for query in queries]
    if "label" in config.parts:
        found += [("label", label) for label in labels]
    return found


def _build_ngrams(words: Hashes, config: NgramDecontaminationConfig, part: Part) -> ItemNgrams:
    n = min(config.ngram_words, len(words))
    if n < config.min_item_words:
        return ItemNgrams(words[:0], n, part)
    return ItemNgrams(dict(iter_ngram_hashes(words, n))[n], n, part)


def _build_overlap_ngrams(
    query: Hashes, label: Hashes, config: NgramDecontaminationConfig
) -> ItemNgrams:
    """Return the n-grams with words of both query and label."""
    # One word less than n, so that every n-gram has words of both.
    reach = min(config.ngram_words - 1, len(query) * len(label))  # 0 if one of them is empty
    return _build_ngrams(
        np.concatenate([query[len(query) - min(reach, len(query)) :], label[:reach]]),
        config,
        "overlap",
    )
