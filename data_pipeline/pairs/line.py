"""Lines of text files, in step or one by one: what each says, or why it cannot be used.

Reads UTF-8 files, plain or .gz; gives a `Line` per line. Promises: only `\\n` ends a line, so that all files are
counted alike; files that should be in step and are not are refused; no line is left out in silence.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

from llmsys.errors import DataError

LABELLED_SUFFIXES = (".tsv", ".jsonl")


class Problem(NamedTuple):
    """Why a line is dropped: the test, the value it found, the threshold, and a sentence."""

    test: str
    value: float | None
    threshold: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Line:
    """One pair: a source and its target, or a text and its label. `number` counts from 1, as editors do."""

    number: int
    source: str
    target: str
    problem: Problem | None = None


def lines_of(files: tuple[Path, ...]) -> Iterator[Line]:
    """The pairs of a source and a target file, or the labelled texts of a single file.

    DataError when a file cannot be read, is of an unknown kind, or has other lines than its partner.
    """
    if len(files) == 2:
        return _parallel(*files)
    return _labelled(files[0])


def _parallel(source: Path, target: Path) -> Iterator[Line]:
    number = 0
    for number, (left, right) in enumerate(zip_longest(_raw_lines(source), _raw_lines(target)), start=1):
        if left is None or right is None:
            raise DataError(_out_of_step(source, target, number - 1))
        yield _pair(number, left, right)
    if not number:
        raise DataError(f"{source} is empty. Give a file with a sentence on each line.")


def _out_of_step(source: Path, target: Path, common: int) -> str:
    counts = [sum(1 for _ in _raw_lines(path)) for path in (source, target)]
    return (
        f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}: line n of one must translate line n of the "
        f"other, and after line {common:,} one of them ends. Give files of equally many lines."
    )


def _pair(number: int, left: bytes, right: bytes) -> Line:
    texts, problem = ["", ""], None
    for place, (side, raw) in enumerate((("source", left), ("target", right))):
        texts[place], found = _decoded(side, raw)
        problem = problem or found
    return Line(number, texts[0], texts[1], problem)


def _decoded(side: str, raw: bytes) -> tuple[str, Problem | None]:
    try:
        text = raw.decode().strip()
    except UnicodeDecodeError as error:
        reason = f"the {side} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}"
        return raw.decode(errors="replace").strip(), Problem(f"{side}_not_utf8", error.start, None, reason)
    return text, None if text else Problem(f"{side}_empty", 0, 1, f"the {side} has 0 characters, less than 1")


def _labelled(path: Path) -> Iterator[Line]:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in LABELLED_SUFFIXES:
        raise DataError(
            f"{path}: labelled texts are read from .tsv and .jsonl, not from '{suffix}'. Rename or convert."
        )
    for number, raw in enumerate(_raw_lines(path), start=1):
        text, problem = _decoded("line", raw)
        if problem is not None:
            yield Line(number, text, "", problem)
            continue
        yield _from_json(number, text) if suffix == ".jsonl" else _from_tsv(number, text)


def _from_tsv(number: int, text: str) -> Line:
    label, tab, body = text.partition("\t")
    if not tab or not body.strip():
        return Line(number, text, "", Problem("no_label_and_text", None, None, "the line is not label<TAB>text"))
    return Line(number, body.strip(), label.strip())


def _from_json(number: int, text: str) -> Line:
    try:
        record = json.loads(text)
        body, label = record["text"], record["label"]
    except (ValueError, KeyError, TypeError):
        body, label = None, None
    if not isinstance(body, str) or not body.strip() or not isinstance(label, str | int):
        reason = 'the line is not {"text": …, "label": …} with a text that has characters'
        return Line(number, text, "", Problem("no_label_and_text", None, None, reason))
    return Line(number, body.strip(), str(label))


def _raw_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file as bytes, decompressed; DataError names the file when it cannot be read."""
    opening = gzip.open if path.suffix == ".gz" else open
    try:
        with cast(BinaryIO, opening(path, "rb")) as file:
            yield from file
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{path} cannot be read: {reason}. Correct the path (relative ones start in the working directory), "
            f"or give the file again."
        ) from None
