"""Lines of text files, in step or one by one: what each says, or why it cannot be used.

Reads UTF-8 files, plain or .gz; gives a `TextPair` per line. Promises: only `\\n` ends a line, so that all files are
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


class LineProblem(NamedTuple):
    """Why a line is dropped: the test, the value it found, the threshold, and a sentence."""

    test: str
    value: float | None
    threshold: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class TextPair:
    """One pair: a source and its target, or a text and its label. `number` counts from 1, as editors do."""

    number: int
    source: str
    target: str
    problem: LineProblem | None = None


def iter_text_pairs(files: tuple[Path, ...]) -> Iterator[TextPair]:
    """The pairs of a source and a target file, or the labelled texts of a single file.

    DataError when a file cannot be read, is of an unknown kind, or has other lines than its partner.
    """
    if len(files) == 2:
        return _iter_parallel_pairs(*files)
    return _iter_labelled_texts(files[0])


def _iter_parallel_pairs(source: Path, target: Path) -> Iterator[TextPair]:
    number = 0
    for number, (left, right) in enumerate(zip_longest(_iter_raw_lines(source), _iter_raw_lines(target)), start=1):
        if left is None or right is None:
            raise DataError(_describe_length_mismatch(source, target, number - 1))
        yield _build_pair(number, left, right)
    if not number:
        raise DataError(f"{source} is empty. Give a file with a sentence on each line.")


def _describe_length_mismatch(source: Path, target: Path, common: int) -> str:
    counts = [sum(1 for _ in _iter_raw_lines(path)) for path in (source, target)]
    return (
        f"{source} has {counts[0]:,} lines and {target} has {counts[1]:,}: line n of one must translate line n of the "
        f"other, and after line {common:,} one of them ends. Give files of equally many lines."
    )


def _build_pair(number: int, left: bytes, right: bytes) -> TextPair:
    texts, problem = ["", ""], None
    for place, (side, raw) in enumerate((("source", left), ("target", right))):
        texts[place], found = _decode_line(side, raw)
        problem = problem or found
    return TextPair(number, texts[0], texts[1], problem)


def _decode_line(side: str, raw: bytes) -> tuple[str, LineProblem | None]:
    try:
        text = raw.decode().strip()
    except UnicodeDecodeError as error:
        reason = f"the {side} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}"
        return raw.decode(errors="replace").strip(), LineProblem(f"{side}_not_utf8", error.start, None, reason)
    return text, None if text else LineProblem(f"{side}_empty", 0, 1, f"the {side} has 0 characters, less than 1")


def _iter_labelled_texts(path: Path) -> Iterator[TextPair]:
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in LABELLED_SUFFIXES:
        raise DataError(
            f"{path}: labelled texts are read from .tsv and .jsonl, not from '{suffix}'. Rename or convert."
        )
    for number, raw in enumerate(_iter_raw_lines(path), start=1):
        text, problem = _decode_line("line", raw)
        if problem is not None:
            yield TextPair(number, text, "", problem)
            continue
        yield _parse_json_line(number, text) if suffix == ".jsonl" else _parse_tsv_line(number, text)


def _parse_tsv_line(number: int, text: str) -> TextPair:
    label, tab, body = text.partition("\t")
    if not tab or not body.strip():
        return TextPair(number, text, "", LineProblem("no_label_and_text", None, None, "the line is not label<TAB>text"))
    return TextPair(number, body.strip(), label.strip())


def _parse_json_line(number: int, text: str) -> TextPair:
    try:
        record = json.loads(text)
        body, label = record["text"], record["label"]
    except (ValueError, KeyError, TypeError):
        body, label = None, None
    if not isinstance(body, str) or not body.strip() or not isinstance(label, str | int):
        reason = 'the line is not {"text": …, "label": …} with a text that has characters'
        return TextPair(number, text, "", LineProblem("no_label_and_text", None, None, reason))
    return TextPair(number, body.strip(), str(label))


def _iter_raw_lines(path: Path) -> Iterator[bytes]:
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
