"""Map one token file into memory and check it against its manifest entry.

Reads: a file of tokens/.

Invariants:
- Sizes are checked when the file is opened, the tokens of a batch before the first of them is returned.
- A file that vanishes or shrinks during a run gives an error with its name instead of a bus error.
"""

from pathlib import Path

import xxhash

from llmsys.arrow_checksums import (
    SIDE_COLUMNS,
    compute_frame_checksum,
    compute_lengths_checksum,
    compute_lineage_checksum,
)
from llmsys.arrow_file import (
    DAMAGED,
    NEXT_STEP,
    REMAKE,
    Integers,
    Tokens,
    map_file,
    open_arrow,
    read_batch,
)
from llmsys.errors import DataError
from llmsys.manifest import TokenFile


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
