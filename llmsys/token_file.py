"""Count and hash the Arrow files of a dataset for the manifest, and map token files that agree with it into memory.

Reads: files in documents/, dropped/ and tokens/.

Invariants:
- Sizes are checked when the file is opened, the tokens of a batch before the first of them is returned.
- A file that vanishes or shrinks during a run gives an error with its name instead of a bus error.
- Buffers are hashed as raw bytes, before any code decodes them.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import xxhash

from llmsys.arrow_file import (
    DAMAGED,
    NEXT_STEP,
    REMAKE,
    Integers,
    Tokens,
    get_document_lengths,
    get_text_bytes,
    map_file,
    open_arrow,
    read_batch,
)
from llmsys.errors import DataError
from llmsys.manifest import DocumentFile, TokenBatch, TokenFile

SIDE_COLUMNS = ("id", "file", "offset", "url_hash")


def compute_file_digest(path: Path) -> str:
    """Return the xxh3_128 of a file.

    Args:
        path: Any file.

    Returns:
        32 hex digits over all bytes.
    """
    state = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def describe_batch(data: pa.Buffer, batch: pa.RecordBatch) -> TokenBatch:
    """Count and hash one record batch of a token file.

    Args:
        data: The mapped bytes of the file.
        batch: A view of these bytes, from `read_batch`.

    Returns:
        The manifest entry. `begin` and `end` are byte offsets in the file.
    """
    buffers = [buffer for column in batch.columns for buffer in column.buffers() if buffer is not None and buffer.size]
    values = batch.column("tokens").values.to_numpy(zero_copy_only=True)
    return TokenBatch(
        rows=batch.num_rows,
        tokens=len(values),
        # buffers are views of the map, so their addresses tell where they lie in the file
        begin=min((buffer.address - data.address for buffer in buffers), default=0),
        end=max((buffer.address - data.address + buffer.size for buffer in buffers), default=0),
        checksum=xxhash.xxh64_hexdigest(values.data),
        lengths_checksum=compute_lengths_checksum(batch),
        lineage_checksum=compute_lineage_checksum(batch),
    )


def compute_lengths_checksum(batch: pa.RecordBatch) -> str:
    """Hash tokens and text bytes per document."""
    state = xxhash.xxh64(get_document_lengths(batch).tobytes())
    state.update(get_text_bytes(batch).tobytes())
    return state.hexdigest()


def compute_lineage_checksum(batch: pa.RecordBatch) -> str:
    """Hash the side columns as they lie in the file, before anything decodes them."""
    lineage = xxhash.xxh64()
    for name in SIDE_COLUMNS:
        for buffer in batch.column(name).buffers():
            # Arrow leaves out the validity bitmap of a column without nulls
            lineage.update(b"" if buffer is None else memoryview(buffer))
    return lineage.hexdigest()


def compute_frame_checksum(data: pa.Buffer, batches: Sequence[TokenBatch]) -> str:
    """Hash the bytes between the data of the batches: schema, batch headers and footer.

    Args:
        data: The mapped bytes of the file.
        batches: The manifest entries of all its batches, in file order.

    Returns:
        The xxh64, 16 hex digits.
    """
    edges = [0, *(edge for batch in batches for edge in (batch.begin, batch.end)), data.size]
    state, view = xxhash.xxh64(), memoryview(data)
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        state.update(view[begin:end])
    return state.hexdigest()


def describe_token_file(path: Path) -> TokenFile:
    """Return the manifest entry of a token file, counted and hashed from disk."""
    data = map_file(path)
    arrow = open_arrow(path, data)
    batches, text_bytes = [], 0
    for index in range(arrow.num_record_batches):
        batch = read_batch(path, arrow, index)
        batches.append(describe_batch(data, batch))
        text_bytes += int(get_text_bytes(batch).sum())
    return TokenFile(
        name=path.name,
        rows=sum(batch.rows for batch in batches),
        tokens=sum(batch.tokens for batch in batches),
        text_bytes=text_bytes,
        size=path.stat().st_size,
        digest=compute_file_digest(path),
        frame_checksum=compute_frame_checksum(data, batches),
        batches=tuple(batches),
    )


def describe_document_file(path: Path) -> DocumentFile:
    """Return the manifest entry of a document file, counted and hashed from disk.

    Args:
        path: A file in documents/ or dropped/.

    Returns:
        Name, rows, bytes and digest.

    Raises:
        DataError: The file is missing or damaged.
    """
    arrow = open_arrow(path, map_file(path))
    rows = sum(read_batch(path, arrow, index).num_rows for index in range(arrow.num_record_batches))
    return DocumentFile(name=path.name, rows=rows, size=path.stat().st_size, digest=compute_file_digest(path))


class MappedTokenFile:
    """The record batches of one token file. DataError when it is missing, of another size, or damaged."""

    def __init__(self, path: Path, entry: TokenFile) -> None:
        if not path.exists():
            raise DataError(f"{path} is missing, but the manifest lists it. {REMAKE}")
        if (size := path.stat().st_size) != entry.size:
            raise DataError(f"{path} has {size:,} bytes, expected from the manifest: {entry.size:,}. {NEXT_STEP}")
        self.path, self.entry = path, entry
        data = map_file(path)
        if (
            found := compute_frame_checksum(data, entry.batches)
        ) != entry.frame_checksum:  # Arrow may crash on a bad header
            raise DataError(
                f"{path}, headers: their checksum is {found}, expected from the manifest: "
                f"{entry.frame_checksum}: {DAMAGED} {NEXT_STEP}"
            )
        arrow = open_arrow(path, data)
        self.batches = [read_batch(path, arrow, index) for index in range(arrow.num_record_batches)]
        self.views = [self._view_batch(index) for index in range(len(self.batches))]
        self.tokens_checked = [False] * len(self.batches)
        self.lineage_checked = [False] * len(self.batches)

    def _view_batch(self, index: int) -> tuple[Tokens, Integers]:
        """Return values and offsets of one batch with checked lengths: packing uses them before it reads a token."""
        batch, expected = self.batches[index], self.entry.batches[index]
        column = batch.column("tokens")
        values, offsets = column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy()
        found = (batch.num_rows, len(values), compute_lengths_checksum(batch))
        if found != (expected.rows, expected.tokens, expected.lengths_checksum):
            raise self._build_corruption_error(index, "document lengths", found[2], expected.lengths_checksum)
        return values, offsets

    def _build_corruption_error(self, index: int, part: str, found: str, expected: str) -> DataError:
        batch = self.entry.batches[index]
        return DataError(
            f"{self.path}, record batch {index}: the checksum of its {part} is {found}, expected from the "
            f"manifest: {expected} (bytes {batch.begin:,} to {batch.end:,}): {DAMAGED} {NEXT_STEP}"
        )

    def get_document_tokens(self, index: int, row: int) -> Tokens:
        """Return the tokens of one document of batch `index`."""
        offsets = self.views[index][1]
        return self.get_batch_tokens(index)[offsets[row] : offsets[row + 1]]

    def get_batch_tokens(self, index: int) -> Tokens:
        """Return the tokens of all documents of batch `index`, concatenated."""
        values = self.views[index][0]
        if not self.tokens_checked[index]:
            self.require_complete()  # hashing what was cut off would be a bus error
            expected = self.entry.batches[index].checksum
            if (found := xxhash.xxh64_hexdigest(values.data)) != expected:
                raise self._build_corruption_error(index, "tokens", found, expected)
            self.tokens_checked[index] = True
        return values

    def require_complete(self) -> None:
        """Raise DataError when the file is gone or has another size: reading its map may be a bus error."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise DataError(
                f"{self.path} disappeared during the run. Restore it, or run llmsys prepare CONFIG, which "
                "makes only missing files. Then start again."
            ) from None
        if size != self.entry.size:
            raise DataError(
                f"{self.path} changed during the run: {size:,} bytes, expected from the manifest: "
                f"{self.entry.size:,}. {NEXT_STEP}"
            )

    def get_lineage(self, index: int, row: int) -> dict[str, str | int]:
        """Return the side columns of one document of batch `index`: id, file, offset and URL hash."""
        batch = self.batches[index]
        if not self.lineage_checked[index]:
            expected = self.entry.batches[index].lineage_checksum
            if (found := compute_lineage_checksum(batch)) != expected:
                raise self._build_corruption_error(index, "lineage", found, expected)
            self.lineage_checked[index] = True
        return {name: batch.column(name)[row].as_py() for name in SIDE_COLUMNS}
