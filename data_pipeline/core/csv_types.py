"""Types of CSV columns, as pyarrow.csv infers and converts them.

CSV has texts alone. What their column is follows from all texts of the dataset: the first of
`INFERRED` that accepts every one of them, or else text. Each file counts, for each type, the texts
before the first one that the type refuses; the counts of files are merged.

Invariants:
- The type depends neither on the order of files nor on batches: a type is left out when any text
  refuses it.
- A count takes constant memory.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

TEXT = "csv"  # kind of a value whose type is not known yet
# In the order in which pyarrow.csv tries them for a column.
INFERRED = {
    str(kind): kind
    for kind in (
        pa.null(),
        pa.int64(),
        pa.bool_(),
        pa.date32(),
        pa.time32("s"),
        pa.timestamp("s"),
        pa.timestamp("ns"),
        pa.timestamp("s", "UTC"),
        pa.timestamp("ns", "UTC"),
        pa.float64(),
    )
}
BATCH = 1_024  # texts that are worth a call
MOST_WAITING = 1 << 23  # characters of texts that wait for more
LONGEST = 1_024  # characters; longer texts are of no other type
_SHOWN = 60

# Numbers of texts by type: [texts before the first refused one], and then its offset, itself, and
# its file.
TypeCounts = dict[str, list[Any]]


def convert_texts(texts: Sequence[str], kind: pa.DataType) -> list[Any]:
    """Convert the texts of a column.

    Args:
        texts: None of them empty.
        kind: A type that pyarrow.csv converts to.

    Returns:
        Values as cells of further fields have them: numbers and booleans, and mappings of other
        types (`{"date32[day]": 19000}`); None for pyarrow's spellings of null, such as NA.

    Raises:
        pa.ArrowInvalid: The type refuses a text.
    """
    if not texts:
        return []
    column = _read_column(texts, kind)
    if not pa.types.is_temporal(kind):
        return list(column.to_pylist())
    payloads = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
    return [None if one is None else {str(kind): one} for one in payloads]


def _read_column(texts: Sequence[str], kind: pa.DataType) -> pa.ChunkedArray:
    if any(len(text) > LONGEST for text in texts):
        raise pa.ArrowInvalid(f"a text of more than {LONGEST} characters")
    from pyarrow import csv  # slow to import

    stream = pa.BufferOutputStream()
    table = pa.table({"0": pa.array(texts, pa.string())})
    csv.write_csv(table, stream, csv.WriteOptions(include_header=False))
    written = stream.getvalue()
    return csv.read_csv(
        pa.BufferReader(written),
        # One block: the texts are few and short.
        csv.ReadOptions(column_names=["0"], use_threads=False, block_size=written.size + 1),
        csv.ParseOptions(newlines_in_values=True),
        csv.ConvertOptions(column_types={"0": kind}),
    ).column("0")


def find_refused_text(texts: Sequence[str], kind: pa.DataType) -> int | None:
    """Find the first text that a type refuses.

    Args:
        texts: None of them empty.
        kind: The type.

    Returns:
        Its number; None if there is none.
    """
    if _can_convert(texts, kind):
        return None
    start, stop = 0, len(texts)
    while stop - start > 1:
        middle = (start + stop) // 2
        if _can_convert(texts[start:middle], kind):
            start = middle
        else:
            stop = middle
    return start


def _can_convert(texts: Sequence[str], kind: pa.DataType) -> bool:
    try:
        _read_column(texts, kind)
    except pa.ArrowInvalid:
        return False
    return True


def count_texts(counts: TypeCounts, texts: Sequence[str], offsets: Sequence[int]) -> None:
    """Count further texts of a column of one file.

    Args:
        counts: Those of the texts before; changed.
        texts: None of them empty.
        offsets: Positions of their rows in the file.
    """
    for name, kind in INFERRED.items():
        found = counts.setdefault(name, [0])
        if len(found) > 1:
            continue
        refused = find_refused_text(texts, kind)
        found[0] += len(texts) if refused is None else refused
        if refused is not None:
            found += [offsets[refused], texts[refused][:_SHOWN]]


def merge_texts(counts: TypeCounts, file_counts: Mapping[str, Sequence[Any]], file: str) -> None:
    """Add the counts of a file.

    Args:
        counts: Those of the files before; changed.
        file_counts: What `count_texts` counted.
        file: The file, as messages show it.
    """
    for name, (number, *refused) in file_counts.items():
        found = counts.setdefault(name, [0])
        found[0] += number
        if refused and len(found) == 1:
            found += [*refused, file]


def choose_text_type(counts: Mapping[str, Sequence[Any]]) -> str:
    """Choose the type of a column's texts.

    Args:
        counts: Those of all files.

    Returns:
        The first type that refuses none; `large_string` if each refuses one, or if every text
        spells null.
    """
    chosen = next((name for name in INFERRED if len(counts[name]) == 1), "null")
    return "large_string" if chosen == "null" else chosen


def describe_refused_text(counts: Mapping[str, Sequence[Any]], total: int) -> str:
    """Describe the text that keeps most texts of a column from another type.

    Args:
        counts: Those of all files; each type refuses a text.
        total: Number of texts.

    Returns:
        The text with its place; "" where no type accepts half of the texts before it.
    """
    name, (accepted, *refused) = max(counts.items(), key=lambda item: int(item[1][0]))
    if not refused or 2 * accepted < total:
        return ""
    offset, text, file = refused
    return f"{accepted} of {total} texts are {name}, but {text!r} in {file} at {offset} is not"
