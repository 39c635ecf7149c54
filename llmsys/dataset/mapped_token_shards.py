"""Token files of pairs, texts with labels and images as memory-mapped views, with a checksum for
each record batch.

Reads: tokens/ of a dataset folder. All files are mapped at once.

Invariants:
- Tokens are never copied.
- Sizes are checked when a file is opened, the tokens of a batch before the first of them is
  returned.
- A file that vanishes or shrinks during a run gives an error with its name instead of a bus error.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from llmsys.dataset.manifest import Manifest, TokenFile
from llmsys.dataset.token_file import (
    SIDE_COLUMNS,
    compute_frame_checksum,
    compute_lengths_checksum,
    compute_lineage_checksum,
)
from llmsys.dataset.token_split import SideColumn, TokenShards
from llmsys.errors import DataError
from llmsys.storage.arrow_file import (
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


class MappedTokenFile:
    """The record batches of one token file. DataError when it is missing, of another size, or
    damaged.
    """

    def __init__(self, path: Path, entry: TokenFile) -> None:
        if not path.exists():
            raise DataError(f"{path} is missing, but the manifest lists it. {REMAKE}")
        if (size := path.stat().st_size) != entry.size:
            raise DataError(
                f"{path} has {size:,} bytes, expected from the manifest: {entry.size:,}. "
                f"{NEXT_STEP}"
            )
        self.path = path
        self.entry = entry
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
        """Return values and offsets of one batch with checked lengths: packing uses them before
        it reads a token.
        """
        batch = self.batches[index]
        expected = self.entry.batches[index]
        column = batch.column("tokens")
        values = column.values.to_numpy(zero_copy_only=True)
        offsets = column.offsets.to_numpy()
        found = (batch.num_rows, len(values), compute_lengths_checksum(batch))
        if found != (expected.rows, expected.tokens, expected.lengths_checksum):
            raise self._build_corruption_error(
                index, "document lengths", found[2], expected.lengths_checksum
            )
        return values, offsets

    def _build_corruption_error(
        self, index: int, part: str, found: str, expected: str
    ) -> DataError:
        batch = self.entry.batches[index]
        return DataError(
            f"{self.path}, record batch {index}: the checksum of its {part} is {found}, expected "
            f"from the manifest: {expected} (bytes {batch.begin:,} to {batch.end:,}): {DAMAGED} "
            f"{NEXT_STEP}"
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
        """Raise DataError when the file is gone or has another size: reading its map may be a
        bus error.
        """
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            raise DataError(
                f"{self.path} disappeared during the run. Restore it, or run llmsys prepare "
                "CONFIG, which makes only missing files. Then start again."
            ) from None
        if size != self.entry.size:
            raise DataError(
                f"{self.path} changed during the run: {size:,} bytes, expected from the manifest: "
                f"{self.entry.size:,}. {NEXT_STEP}"
            )

    def get_lineage(self, index: int, row: int) -> dict[str, str | int]:
        """Return the side columns of one document of batch `index`: id, file, offset and URL
        hash.
        """
        batch = self.batches[index]
        if not self.lineage_checked[index]:
            expected = self.entry.batches[index].lineage_checksum
            if (found := compute_lineage_checksum(batch)) != expected:
                raise self._build_corruption_error(index, "lineage", found, expected)
            self.lineage_checked[index] = True
        return {name: batch.column(name)[row].as_py() for name in SIDE_COLUMNS}


class MappedTokenShards(TokenShards):
    """The documents of one split as memory-mapped token views, numbered across all files in
    manifest order.
    """

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        """Map every file of the split; DataError when one is missing, of another size, or its
        lengths are damaged.
        """
        self.folder = folder
        self.split = split
        self.manifest = manifest
        entries = manifest.splits[split].files  # type: ignore[index]
        self._files = [MappedTokenFile(folder / "tokens" / entry.name, entry) for entry in entries]
        self._places = [(file, index) for file in self._files for index in range(len(file.batches))]
        batches = [file.batches[index] for file, index in self._places]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._offsets = np.concatenate(
            [np.zeros(0, np.int32), *(file.views[index][1][:-1] for file, index in self._places)]
        )
        self._lengths: Integers = np.concatenate(
            [np.zeros(0, np.int64), *map(get_document_lengths, batches)]
        )

    @property
    def lengths(self) -> Integers:
        """Tokens of every document, (documents,) int64."""
        return self._lengths

    @cached_property
    def text_bytes(self) -> Integers:
        """UTF-8 bytes of text of every document, (documents,) int64."""
        columns = [get_text_bytes(file.batches[index]) for file, index in self._places]
        return np.concatenate([np.zeros(0, np.int64), *columns])

    def read_leading_sizes(self, max_tokens: int) -> tuple[Integers, Integers]:
        """Implement `TokenShards.read_leading_sizes`: all are in memory."""
        return self.lengths, self.text_bytes

    def _locate_document(self, document: int) -> tuple[MappedTokenFile, int, int]:
        if not 0 <= document < self.num_documents:
            raise IndexError(
                f"document {document} of split '{self.split}', which has {self.num_documents}"
            )
        place = int(np.searchsorted(self._starts, document, side="right")) - 1
        file, index = self._places[place]
        return file, index, document - int(self._starts[place])

    def get_tokens(self, document: int) -> Tokens:
        """Return the tokens of one document.

        Args:
            document: number of the document in the dataset, counted from 0.

        Returns:
            A read-only view of the mapped file, (T,) uint16 or uint32.
        """
        file, index, row = self._locate_document(document)
        return file.get_document_tokens(index, row)

    def copy_spans(
        self, documents: Integers, begins: Integers, lengths: Integers, out: Integers
    ) -> None:
        """Fill `out` with spans of documents, concatenated: `lengths[i]` tokens from `begins[i]` of
        each.

        Raises:
            DataError: One of their files is gone or has another size.
        """
        places = np.searchsorted(self._starts, documents, side="right") - 1
        used = {place: self._places[place] for place in np.unique(places).tolist()}
        for file in {id(file): file for file, _ in used.values()}.values():
            file.require_complete()
        values = {place: file.get_batch_tokens(index) for place, (file, index) in used.items()}
        lows = self._offsets[documents] + begins
        at = 0
        for place, low, length in zip(
            places.tolist(), lows.tolist(), lengths.tolist(), strict=True
        ):
            out[at : at + length] = values[place][low : low + length]
            at += length

    def get_lineage(self, document: int) -> dict[str, str | int]:
        """Return where a document is from.

        Args:
            document: number of the document in the dataset, counted from 0.

        Returns:
            Its id, its crawl file, its record offset and the xxh64 of its URL, by column.
        """
        file, index, row = self._locate_document(document)
        return file.get_lineage(index, row)

    def select_documents(self, column: SideColumn, *values: str | int) -> list[int]:
        """Return the numbers of the documents with one of these values in a side column. Reads the
        whole
        column.

        Args:
            column: name of the column.
            values: values to look for, of the type of the column.

        Returns:
            Ascending numbers, counted from 0.
        """
        found: list[int] = []
        for (file, index), start in zip(self._places, self._starts[:-1].tolist(), strict=True):
            cells = file.batches[index].column(column)
            same = pc.is_in(cells, pa.array(values, cells.type)).to_numpy(zero_copy_only=False)
            found += (np.flatnonzero(same) + start).tolist()
        return found
