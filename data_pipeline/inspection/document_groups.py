"""Group the kept and dropped documents of a dataset by host, domain, or any column.

Reads documents/ and dropped/ of a dataset folder, one column at a time.

Invariants:
- Numbers are exact, and memory does not grow with the corpus: where a column has too many values,
  the files are read again for each part of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from llmsys.data_pipeline.core.document_schema import count_text_bytes, read_cells
from llmsys.data_pipeline.rules.derived_columns import DERIVED, NO_VALUE
from llmsys.dataset.manifest import load_manifest
from llmsys.errors import ConfigError, DataError
from llmsys.storage.arrow_file import read_columns, read_schema

MAX_VALUES = 1 << 19  # values in memory at once
_NUM_RANGES = 10
_FEW_INTEGERS = 20  # a smaller range of integers has a group for each
_VALUE_CHARACTERS = 200
_MOST_POWERS = 7  # at most 4^6 parts, each of which reads the files


@dataclass(frozen=True)
class DocumentGroup:
    """The documents with one value of a column.

    Attributes:
        value: The value, or the range of numbers.
        documents: Number of kept documents.
        bytes: UTF-8 bytes of their texts.
        dropped: Number of dropped documents; None if dropped/ does not have the column.
    """

    value: str
    documents: int
    bytes: int
    dropped: int | None


@dataclass(frozen=True)
class DocumentGroups:
    """The largest groups of a dataset.

    Attributes:
        column: The column.
        groups: The groups with the most documents, kept and dropped.
        num_groups: Number of all groups.
        documents: Number of all kept documents.
        bytes: UTF-8 bytes of their texts.
    """

    column: str
    groups: tuple[DocumentGroup, ...]
    num_groups: int
    documents: int
    bytes: int


@dataclass(frozen=True)
class _Files:
    """Files of kept or dropped documents.

    Attributes:
        paths: The files.
        column: The stored column of the values; None if these files have none.
        size: The column that has or is the size of a text.
    """

    paths: Sequence[Path]
    column: str | None
    size: str


def group_documents(folder: Path, column: str, limit: int) -> DocumentGroups:
    """Group the documents of a dataset by a column.

    Args:
        folder: The dataset folder.
        column: `host`, `domain`, `year`, `month`, or a column of documents/. Numbers are divided
            into ten ranges. Long texts are compared by their first 200 characters.
        limit: Maximum number of groups.

    Returns:
        The groups. Places that could not be read are no dropped documents.

    Raises:
        ConfigError: There is no such column.
        DataError: The dataset has no documents.
    """
    kept, dropped = _find_files(folder, column)
    derive = DERIVED[column][1] if column in DERIVED and kept.column != column else None
    label = _choose_label(kept, dropped, derive)
    for power in range(_MOST_POWERS):
        parts = 4**power
        found = [_count_part(kept, dropped, label, part, parts, limit) for part in range(parts)]
        if all(one is not None for one in found):
            break
    else:
        raise DataError(
            f"{column} has more than {MAX_VALUES * 4 ** (_MOST_POWERS - 1):,} values, which are "
            "not counted. Group by another column, such as host."
        )
    whole = [one for one in found if one is not None]
    groups = sorted((group for one in whole for group in one[0]), key=_get_order)[:limit]
    num_groups, documents, size = (sum(one[1][place] for one in whole) for place in range(3))
    return DocumentGroups(column, tuple(groups), num_groups, documents, size)


def _find_files(folder: Path, column: str) -> tuple[_Files, _Files]:
    manifest = load_manifest(folder)
    rooms = {"documents": manifest.documents.files, "dropped": manifest.dropped.files}
    paths = {name: [folder / name / file.name for file in rooms[name]] for name in rooms}
    if not paths["documents"]:
        raise DataError(f"{folder} has no documents. Prepare it first: llmsys prepare CONFIG")
    names = {name: read_schema(found[0]).names if found else [] for name, found in paths.items()}
    if "text" not in names["documents"]:
        raise DataError(f"{folder}/documents has pairs or labelled texts, which have no columns.")
    stored = column
    if column not in names["documents"] and column in DERIVED:
        stored = DERIVED[column][0]
    if stored not in names["documents"]:
        there = ", ".join(sorted({*names["documents"], *DERIVED} - {"text", "id"}))
        raise ConfigError(f"--by {column} is no column of {folder}/documents. Use one of: {there}.")
    has_dropped = stored in names["dropped"]
    return (
        _Files(paths["documents"], stored, "text"),
        _Files(paths["dropped"], stored if has_dropped else None, "bytes"),
    )


def _iter_columns(files: _Files) -> Iterator[tuple[pa.Array, Any]]:
    """Yield the column, and the bytes of the texts, batch by batch."""
    wanted = {files.column, files.size, "stage"}
    for path in files.paths if files.column is not None else ():
        for batch in read_columns(path, wanted.__contains__):
            if files.size == "bytes":  # dropped documents
                batch = batch.filter(pc.not_equal(batch.column("stage"), "read"))
            sizes = batch.column(files.size)
            is_text = files.size == "text"
            yield batch.column(files.column), count_text_bytes(sizes) if is_text else sizes


_Label = Callable[[pa.Array], Iterable[str]]


def _choose_label(kept: _Files, dropped: _Files, derive: Callable[[str], str] | None) -> _Label:
    """Return a function that gives the group of each value of a column."""
    assert kept.column is not None  # it was found
    kind = read_schema(kept.paths[0]).field(kept.column).type
    if derive is not None:
        return lambda column: (derive(value or "") or NO_VALUE for value in column.to_pylist())
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return _label_texts
    least, most = np.inf, -np.inf
    for files in (kept, dropped):
        for column, _ in _iter_columns(files):
            values = column.drop_null().to_numpy(zero_copy_only=False).astype(np.float64)
            values = values[np.isfinite(values)]
            if len(values):
                least, most = min(least, values.min()), max(most, values.max())
    if pa.types.is_integer(kind) and most - least < _FEW_INTEGERS:
        return _label_texts
    edges = np.linspace(least, most, _NUM_RANGES + 1) if most > least else np.array([least, least])
    return lambda column: (_format_range(edges, value) for value in column.to_pylist())


def _label_texts(column: pa.Array) -> Iterator[str]:
    for value in read_cells(column):
        yield NO_VALUE if value is None or value == "" else str(value)[:_VALUE_CHARACTERS]


def _format_range(edges: Any, value: float | None) -> str:
    if value is None or value != value:
        return NO_VALUE
    place = int(np.clip(np.searchsorted(edges, value, side="right") - 1, 0, len(edges) - 2))
    return f"{edges[place]:.4g} to {edges[place + 1]:.4g}"


_Part = tuple[list[DocumentGroup], tuple[int, int, int]]


def _count_part(
    kept: _Files, dropped: _Files, label: _Label, part: int, parts: int, limit: int
) -> _Part | None:
    """Count the values whose hash is in a part; None if they are too many."""
    counts: dict[str, list[int]] = {}
    for place, files in enumerate((kept, dropped)):
        for column, sizes in _iter_columns(files):
            for value, size in zip(label(column), sizes.tolist(), strict=True):
                if (
                    parts > 1
                    and xxhash.xxh64_intdigest(value.encode("utf-8", "replace")) % parts != part
                ):
                    continue
                found = counts.setdefault(value, [0, 0, 0])
                if place:
                    found[2] += 1
                else:
                    found[0] += 1
                    found[1] += size
            if len(counts) > MAX_VALUES:
                return None
    has_dropped = dropped.column is not None
    groups = [
        DocumentGroup(value, documents, size, gone if has_dropped else None)
        for value, (documents, size, gone) in counts.items()
    ]
    totals = np.array([[group.documents, group.bytes] for group in groups], np.int64).reshape(-1, 2)
    documents, size = totals.sum(axis=0).tolist()
    return sorted(groups, key=_get_order)[:limit], (len(groups), documents, size)


def _get_order(group: DocumentGroup) -> tuple[int, str]:
    return -group.documents - (group.dropped or 0), group.value


def format_document_groups(found: DocumentGroups) -> str:
    """Format groups as a table.

    Args:
        found: The groups.

    Returns:
        Lines of text.
    """
    width = max([len(found.column), *(len(group.value) for group in found.groups)])
    rows = [
        f"{found.column:<{width}} {'documents':>10} {'share':>7} {'bytes':>14} {'dropped':>10} "
        f"{'kept':>7}"
    ]
    for group in found.groups:
        gone = "-" if group.dropped is None else f"{group.dropped:,}"
        total = group.documents + (group.dropped or 0)
        kept = "-" if group.dropped is None else f"{group.documents / total:.1%}"
        rows.append(
            f"{group.value:<{width}} {group.documents:>10,} "
            f"{group.documents / max(1, found.documents):>7.2%} {group.bytes:>14,} {gone:>10} "
            f"{kept:>7}"
        )
    rows += ["", f"{found.documents:,} documents, {found.bytes:,} bytes of text"]
    if found.num_groups > len(found.groups):
        rows.append(
            f"the {len(found.groups)} of {found.num_groups:,} with the most documents; --limit N "
            "shows more"
        )
    return "\n".join(rows)
