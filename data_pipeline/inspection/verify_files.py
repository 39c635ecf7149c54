"""Verify one file of documents or tokens against its entry in the manifest: hashes, counts, ids.

Each problem is a `DatasetFinding`.

Invariants:
- Arrow parses a token file only after the checksum of the bytes that Arrow trusts was verified.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from llmsys.dataset.checked_file import CheckedFile
from llmsys.dataset.manifest import DocumentFile, TokenFile
from llmsys.dataset.manifest_section import TokenBatch
from llmsys.dataset.token_file import (
    PAGE_BYTES,
    compute_file_digest,
    compute_frame_checksum,
    describe_batch,
    describe_document_file,
)
from llmsys.errors import DataError
from llmsys.storage.arrow_file import (
    get_document_lengths,
    get_text_bytes,
    map_file,
    open_arrow,
    read_batch,
)


@dataclass(frozen=True)
class DatasetFinding:
    """One problem of a dataset folder.

    Attributes:
        file: path relative to the dataset folder.
        where: a part of the file, such as "record batch 3"; "" for all of it.
        problem: description of the problem.
    """

    file: str
    where: str
    problem: str


def format_findings(findings: Sequence[DatasetFinding]) -> str:
    """Format findings as a table with a header."""
    rows = [
        ("file", "where", "what is wrong"),
        *((finding.file, finding.where, finding.problem) for finding in findings),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip() for row in rows
    )


def verify_document_file(
    path: Path, subfolder: str, entry: DocumentFile
) -> Iterator[DatasetFinding]:
    """Verify a file of documents: digest, rows and columns.

    Args:
        path: The file.
        subfolder: "documents" or "dropped".
        entry: Its entry in the manifest.

    Yields:
        The problems of the file.
    """
    name = f"{subfolder}/{entry.name}"
    if (size := path.stat().st_size) != entry.size:
        yield DatasetFinding(
            name, "", f"it has {size:,} bytes, expected from the manifest: {entry.size:,}"
        )
    elif (digest := compute_file_digest(path)) != entry.digest:
        yield DatasetFinding(
            name, "", f"its digest is {digest}, expected from the manifest: {entry.digest}"
        )
    elif path.suffix == ".arrow":
        yield from _verify_row_count(path, name, entry)


def _verify_row_count(path: Path, name: str, entry: DocumentFile) -> Iterator[DatasetFinding]:
    try:
        rows = describe_document_file(path).rows
    except DataError as error:
        yield DatasetFinding(name, "", f"it cannot be read: {error}")
        return
    if rows != entry.rows:
        yield DatasetFinding(
            name, "", f"it has {rows:,} documents, expected from the manifest: {entry.rows:,}"
        )


_FIELD_NAMES = {
    "rows": "number of documents",
    "tokens": "number of tokens",
    "begin": "first byte",
    "end": "last byte",
    "checksum": "checksum of the tokens",
    "lengths_checksum": "checksum of the document lengths",
    "lineage_checksum": "checksum of the lineage",
}


def verify_token_file(
    path: Path, entry: TokenFile, vocab_size: int, end: int | None
) -> Iterator[DatasetFinding]:
    """Verify a token file: every page or batch, counts, ids and ends of documents.

    Args:
        path: The file.
        entry: Its entry in the manifest.
        vocab_size: Number of ids.
        end: The last id of every document; None if there is none.

    Yields:
        The problems of the file.
    """
    name = f"tokens/{entry.name}"
    if (size := path.stat().st_size) != entry.size:
        yield DatasetFinding(
            name, "", f"it has {size:,} bytes, expected from the manifest: {entry.size:,}"
        )
        return
    if entry.page_root:
        damage = list(_verify_pages(path, name, entry))
        yield from damage
        if damage:
            return
    data = map_file(path)
    if (
        not entry.page_root
        and (frame := compute_frame_checksum(data, entry.batches)) != entry.frame_checksum
    ):
        yield DatasetFinding(
            name,
            "headers",
            f"their checksum is {frame}, expected from the manifest: {entry.frame_checksum}",
        )
        return  # Arrow must not parse wrong headers
    arrow = open_arrow(path, data)
    batches = [read_batch(path, arrow, index) for index in range(arrow.num_record_batches)]
    damaged = False
    for index, batch in enumerate(batches):
        found = (
            []
            if entry.page_root
            else list(_verify_batch(name, index, describe_batch(data, batch), entry))
        )
        damaged |= bool(found)
        yield from found or _verify_tokens(name, index, batch, vocab_size, end)
    if not damaged:
        yield from _verify_totals(name, entry, batches, compute_file_digest(path))


def _verify_pages(path: Path, name: str, entry: TokenFile) -> Iterator[DatasetFinding]:
    """Yield the damaged pages of a file with a page table, before Arrow parses any of them."""
    try:
        damaged = CheckedFile(path, entry).find_damaged_pages()
    except DataError as error:
        yield DatasetFinding(name, "page table", str(error))
        return
    for page in damaged:
        begin, end = page * PAGE_BYTES, min((page + 1) * PAGE_BYTES, entry.size)
        yield DatasetFinding(
            name, f"page {page}", f"its checksum differs (bytes {begin:,} to {end:,})"
        )


def _verify_batch(
    name: str, index: int, found: TokenBatch, entry: TokenFile
) -> Iterator[DatasetFinding]:
    expected = entry.batches[index]
    for field, name_of_field in _FIELD_NAMES.items():
        ours = getattr(found, field)
        theirs = getattr(expected, field)
        if ours != theirs:
            problem = f"the {name_of_field} is {_format_value(ours)}, not {_format_value(theirs)}"
            where = f"bytes {expected.begin:,} to {expected.end:,}"
            yield DatasetFinding(name, f"record batch {index}", f"{problem} ({where})")


def _verify_tokens(
    name: str, index: int, batch: pa.RecordBatch, vocab_size: int, end: int | None
) -> Iterator[DatasetFinding]:
    """Yield problems that a checksum cannot show: ids above the vocabulary, documents without an
    end token.
    """
    column = batch.column("tokens")
    values = column.values.to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy()
    where = f"record batch {index}"
    if len(values) and (highest := int(values.max())) >= vocab_size:
        yield DatasetFinding(
            name, where, f"it has the id {highest:,}, but the vocabulary ends at {vocab_size - 1:,}"
        )
    if end is None:
        return
    lengths = np.diff(offsets)
    whole = lengths > 0
    open_ended = int((~whole).sum() + (values[offsets[1:][whole] - 1] != end).sum())
    if open_ended:
        yield DatasetFinding(
            name, where, f"{open_ended:,} documents do not end with the end-of-sequence id {end}"
        )


def _verify_totals(
    name: str, entry: TokenFile, batches: list[pa.RecordBatch], digest: str
) -> Iterator[DatasetFinding]:
    """Yield wrong totals and a wrong digest of a file whose batches are right."""
    counted = {
        "documents": (sum(batch.num_rows for batch in batches), entry.rows),
        "tokens": (int(sum(get_document_lengths(batch).sum() for batch in batches)), entry.tokens),
        "bytes of text": (
            int(sum(get_text_bytes(batch).sum() for batch in batches)),
            entry.text_bytes,
        ),
    }
    for unit, (found, expected) in counted.items():
        if found != expected:
            yield DatasetFinding(
                name, "", f"it has {found:,} {unit}, expected from the manifest: {expected:,}"
            )
    if digest != entry.digest:
        yield DatasetFinding(
            name,
            "padding",
            f"its digest is {digest}, not {entry.digest}: bytes between columns changed, no token "
            "did",
        )


def _format_value(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
