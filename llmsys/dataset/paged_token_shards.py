"""Token files with page tables: documents by number, and their side columns.

Reads: tokens/ of a dataset folder. Tokens are those of a `TokenStream`; side columns are read by
Arrow from verified bytes.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.dataset.checked_file import CheckedColumns
from llmsys.dataset.manifest import Manifest
from llmsys.dataset.token_file import SIDE_COLUMNS
from llmsys.dataset.token_split import SideColumn, TokenShards, read_token_index
from llmsys.dataset.token_stream import TokenStream
from llmsys.errors import DataError
from llmsys.storage.arrow_file import Integers, Tokens


class PagedTokenShards(TokenShards):
    """The documents of one split, read in verified pages."""

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        """Read the index of the split; DataError when it is missing or damaged."""
        self.folder = folder
        self.split = split
        self.manifest = manifest
        index = manifest.splits[split].index  # type: ignore[index]
        assert index is not None
        self.stream = TokenStream(
            folder / "tokens", read_token_index(folder, index), manifest.token_dtype or "uint32"
        )

    def get_tokens(self, document: int, /) -> Tokens:
        """Implement `TokenShards.get_tokens`."""
        return self.stream.read_range(*self.stream.get_document_span(document))

    def copy_spans(
        self, documents: Integers, begins: Integers, lengths: Integers, out: Integers
    ) -> None:
        """Implement `TokenShards.copy_spans`."""
        at = 0
        for document, begin, length in zip(
            documents.tolist(), begins.tolist(), lengths.tolist(), strict=True
        ):
            start = self.stream.get_document_span(document)[0] + begin
            out[at : at + length] = self.stream.read_range(start, start + length)
            at += length

    @cached_property
    def lengths(self) -> Integers:
        """Tokens of every document, (documents,) int64; reads the lengths of all files."""
        return self.read_leading_sizes(0)[0]

    @cached_property
    def text_bytes(self) -> Integers:
        """UTF-8 bytes of text of every document, (documents,) int64; reads a column of all
        files.
        """
        return self.read_leading_sizes(0)[1]

    def read_leading_sizes(self, max_tokens: int) -> tuple[Integers, Integers]:
        """Implement `TokenShards.read_leading_sizes`."""
        lengths = [np.zeros(0, np.int64)]
        sizes = [np.zeros(0, np.int64)]
        tokens = 0
        for number, batch, record in self._iter_batches(["text_bytes"]):
            ends = self.stream.get_batch_ends(number, batch)
            opens = self.stream.get_batch_tokens(number, self.stream.get_file(number), batch)[0]
            lengths.append(np.diff(ends, prepend=opens))
            sizes.append(record.column("text_bytes").to_numpy())
            tokens += int(ends[-1]) - opens
            if 0 < max_tokens <= tokens:
                break
        return np.concatenate(lengths), np.concatenate(sizes)

    # --- Side columns ---

    def _iter_batches(self, columns: Sequence[str]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
        """Yield (file, batch, some columns) of all record batches."""
        for number in range(self.stream.num_files):
            file = self.stream.get_file(number)
            found = CheckedColumns(file, columns)
            for batch in range(len(file.batches.rows)):
                yield number, batch, found.get_batch(batch)

    def iter_side_column(self, column: str) -> Iterator[tuple[int, pa.Array]]:
        """Read a column of all token files that has no tokens.

        Args:
            column: `id`, `file`, `offset`, `url_hash` or `text_bytes`.

        Yields:
            Number of the first document of a record batch, and the value of each of its documents.

        Raises:
            DataError: A file is damaged or gone.
        """
        for number, batch, record in self._iter_batches([column]):
            yield self.stream.get_first_document(number, batch), record.column(column)

    def get_lineage(self, document: int) -> dict[str, str | int]:
        """Implement `TokenShards.get_lineage`."""
        number, batch, row = self.stream.locate_document(document)
        record = CheckedColumns(self.stream.get_file(number), SIDE_COLUMNS).get_batch(batch)
        return {name: record.column(name)[row].as_py() for name in SIDE_COLUMNS}

    def select_documents(self, column: SideColumn, *values: str | int) -> list[int]:
        """Implement `TokenShards.select_documents`."""
        found: list[int] = []
        for number, batch, record in self._iter_batches([column]):
            cells = record.column(column)
            same = pc.is_in(cells, pa.array(values, cells.type)).to_numpy(zero_copy_only=False)
            found += (np.flatnonzero(same) + self.stream.get_first_document(number, batch)).tolist()
        return found


def require_paged(shards: TokenShards) -> PagedTokenShards:
    """Return shards as ones that are read in pages.

    Args:
        shards: The shards of a dataset in order 2.

    Returns:
        The same shards.

    Raises:
        DataError: The manifest contradicts itself: its files have no page tables.
    """
    if isinstance(shards, PagedTokenShards):
        return shards
    raise DataError(
        f"{shards.folder}: order 2 needs token files with page tables. Run llmsys prepare CONFIG "
        "again."
    )
