"""The token files of one split of a dataset: their index, and the interface of their readers.

Reads/Writes: tokens/*.index, an Arrow file with a row per token file.

Invariants:
- An index is read once, in one piece, and has the digest that the manifest names.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import xxhash

from llmsys.dataset.manifest import Manifest, Split, TokenFile
from llmsys.dataset.manifest_section import TokenIndex
from llmsys.dataset.token_file import INDEX_SCHEMA
from llmsys.errors import DataError
from llmsys.storage.arrow_file import DAMAGED, NEXT_STEP, REMAKE, Integers, Tokens, open_arrow
from llmsys.storage.received_files import RECEIVED
from llmsys.storage.stored_formats import TOKEN_INDEX, require_arrow_version

# Columns that documents can be found by.
SideColumn = Literal["id", "file", "url_hash"]


class TokenShards(ABC):
    """The documents of one split, numbered across all files in manifest order."""

    folder: Path
    split: str
    manifest: Manifest

    @property
    def fingerprint(self) -> str:
        """The dataset's fingerprint: changes when any token or the tokenizer changes."""
        return self.manifest.fingerprint

    @property
    def num_documents(self) -> int:
        """Number of documents in the split."""
        return self._totals.documents

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the split, the end-of-sequence ids among them."""
        return self._totals.tokens

    @property
    def num_text_bytes(self) -> int:
        """Number of UTF-8 bytes of text that the tokens of the split stand for."""
        return self._totals.bytes

    @property
    def _totals(self) -> Split:
        return self.manifest.splits[self.split]  # type: ignore[index]

    @property
    @abstractmethod
    def lengths(self) -> Integers:
        """Tokens of every document, (documents,) int64."""

    @property
    @abstractmethod
    def text_bytes(self) -> Integers:
        """UTF-8 bytes of text of every document, (documents,) int64."""

    @abstractmethod
    def read_leading_sizes(self, max_tokens: int) -> tuple[Integers, Integers]:
        """Return tokens and text bytes of the first documents, at least of all within
        `max_tokens` (0: of all).
        """

    @abstractmethod
    def get_tokens(self, document: int, /) -> Tokens:
        """Return the tokens of one document, (T,) uint16 or uint32, read-only."""

    @abstractmethod
    def copy_spans(
        self, documents: Integers, begins: Integers, lengths: Integers, out: Integers
    ) -> None:
        """Fill `out` with spans of documents, concatenated: `lengths[i]` tokens from `begins[i]` of
        each.

        Raises:
            DataError: One of their files is gone or has another size.
        """

    @abstractmethod
    def get_lineage(self, document: int) -> dict[str, str | int]:
        """Return the id of a document, its crawl file, its record offset and the xxh64 of its
        URL.
        """

    @abstractmethod
    def select_documents(self, column: SideColumn, *values: str | int) -> list[int]:
        """Return the numbers of the documents with one of these values in a side column. Reads
        the whole column.
        """

    def require_tokenizer(self, fingerprint: str) -> None:
        """Raise DataError unless the tokens were made by the tokenizer with this fingerprint."""
        if fingerprint != self.manifest.tokenizer_fingerprint:
            raise DataError(
                f"the tokens in {self.folder} were made by tokenizer "
                f"{self.manifest.tokenizer_fingerprint}, not by {fingerprint}, so their ids have "
                f"another meaning. Use {self.folder / 'tokenizer'}, or run llmsys prepare CONFIG "
                "to encode the documents again."
            )


@dataclass(frozen=True)
class TokenFileTable:
    """The columns of an index: one row per token file, in order."""

    batch: pa.RecordBatch

    def get_column(self, name: str) -> Integers:
        """Return a column of numbers: rows, tokens, text_bytes or size, (files,) int64."""
        column: Integers = self.batch.column(name).to_numpy()
        return column

    def get_entry(self, number: int) -> TokenFile:
        """Return the entry of one file."""
        row: dict[str, Any] = {
            name: self.batch.column(name)[number].as_py() for name in INDEX_SCHEMA.names
        }
        return TokenFile(
            **row | {"digest": row["digest"].hex(), "page_root": row["page_root"].hex()}
        )


def read_token_index(folder: Path, index: TokenIndex) -> TokenFileTable:
    """Read the index of a split.

    Args:
        folder: The dataset folder.
        index: The entry of the index in the manifest.

    Returns:
        Its columns.

    Raises:
        DataError: The file is missing, or is not the one of this manifest.
    """
    path = folder / "tokens" / index.name
    try:
        data = RECEIVED.get(path) or path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing, but the manifest lists it. {REMAKE}") from None
    if (found := xxhash.xxh3_128_hexdigest(data)) != index.digest:
        raise DataError(
            f"{path}: its digest is {found}, expected from the manifest: {index.digest}: "
            f"{DAMAGED} {NEXT_STEP}"
        )
    arrow = open_arrow(path, pa.py_buffer(data))
    require_arrow_version(TOKEN_INDEX, arrow.schema.metadata, path)
    return TokenFileTable(arrow.get_batch(0))


def iter_token_files(folder: Path, splits: Iterable[Split]) -> Iterator[TokenFile]:
    """Yield the entries of all token files of some splits.

    Args:
        folder: The dataset folder.
        splits: Splits of its manifest.

    Yields:
        Entries, in manifest order.

    Raises:
        DataError: An index is missing or damaged.
    """
    for split in splits:
        if split.index is None:
            yield from split.files
        else:
            table = read_token_index(folder, split.index)
            yield from (table.get_entry(number) for number in range(split.index.files))
