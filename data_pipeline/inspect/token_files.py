"""A token file recounted and hashed again, every byte of it, against its entry in the manifest.

Nothing is given to Arrow before the bytes that Arrow must trust have the checksum that they were written with.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from data_pipeline.inspect.finding import Finding
from llmsys.manifest import TokenBatch, TokenFile
from llmsys.shard_file import (
    batch_lengths,
    batch_text_bytes,
    describe_batch,
    file_digest,
    frame_checksum,
    get_batch,
    map_file,
    open_arrow,
)

_SAID = {
    "rows": "number of documents",
    "tokens": "number of tokens",
    "begin": "first byte",
    "end": "last byte",
    "checksum": "checksum of the tokens",
    "lengths_checksum": "checksum of the document lengths",
    "lineage_checksum": "checksum of the lineage",
}


def check_token_file(path: Path, entry: TokenFile, vocab_size: int, end: int | None) -> Iterator[Finding]:
    """Yield what is wrong with one file; `end` is the id that every document ends with, None where there is none."""
    name = f"tokens/{entry.name}"
    if (size := path.stat().st_size) != entry.size:
        yield Finding(name, "", f"it has {size:,} bytes, the manifest says {entry.size:,}")
        return
    data = map_file(path)
    if (frame := frame_checksum(data, entry.batches)) != entry.frame_checksum:
        yield Finding(name, "headers", f"their checksum is {frame}, the manifest says {entry.frame_checksum}")
        return  # nothing in it can be trusted
    arrow = open_arrow(path, data)
    batches = [get_batch(path, arrow, index) for index in range(arrow.num_record_batches)]
    damaged = False
    for index, (batch, expected) in enumerate(zip(batches, entry.batches, strict=True)):
        found = list(_batch_findings(name, index, describe_batch(data, batch), expected))
        damaged |= bool(found)
        yield from found or _values(name, index, batch, vocab_size, end)
    if not damaged:
        yield from _whole(name, entry, batches, file_digest(path))


def _batch_findings(name: str, index: int, found: TokenBatch, expected: TokenBatch) -> Iterator[Finding]:
    for field, said in _SAID.items():
        ours, theirs = getattr(found, field), getattr(expected, field)
        if ours != theirs:
            problem = f"the {said} is {_shown(ours)}, not {_shown(theirs)}"
            where = f"bytes {expected.begin:,} to {expected.end:,}"
            yield Finding(name, f"record batch {index}", f"{problem} ({where})")


def _values(name: str, index: int, batch: pa.RecordBatch, vocab_size: int, end: int | None) -> Iterator[Finding]:
    """What a checksum cannot know: ids that no piece has, documents that do not end."""
    column = batch.column("tokens")
    values, offsets = column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy()
    where = f"record batch {index}"
    if len(values) and (highest := int(values.max())) >= vocab_size:
        yield Finding(name, where, f"it has the id {highest:,}, and the vocabulary ends at {vocab_size - 1:,}")
    if end is None:
        return
    lengths = np.diff(offsets)
    whole = lengths > 0
    open_ended = int((~whole).sum() + (values[offsets[1:][whole] - 1] != end).sum())
    if open_ended:
        yield Finding(name, where, f"{open_ended:,} documents do not end with the end-of-sequence id {end}")


def _whole(name: str, entry: TokenFile, batches: list[pa.RecordBatch], digest: str) -> Iterator[Finding]:
    """Sums and bytes of a file whose batches are right."""
    counted = {
        "documents": (sum(batch.num_rows for batch in batches), entry.rows),
        "tokens": (int(sum(batch_lengths(batch).sum() for batch in batches)), entry.tokens),
        "bytes of text": (int(sum(batch_text_bytes(batch).sum() for batch in batches)), entry.text_bytes),
    }
    for what, (found, expected) in counted.items():
        if found != expected:
            yield Finding(name, "", f"it has {found:,} {what}, the manifest says {expected:,}")
    if digest != entry.digest:
        yield Finding(
            name, "padding", f"its digest is {digest}, not {entry.digest}: bytes between columns changed, no token did"
        )


def _shown(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
