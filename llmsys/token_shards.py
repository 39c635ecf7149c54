"""Open the tokens of a dataset as memory-mapped numpy views.

Reads: manifest.json and tokens/ of a dataset folder. Writers import all that they need from here too.

Invariants:
- Tokens are never copied.
- Every record batch is checked against the manifest before its first use. An error names the file and the batch.
"""

from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.arrow_file import (
    DAMAGED,
    NEXT_STEP,
    REMAKE,
    ArrowFileWriter,
    Integers,
    Tokens,
    build_token_schema,
    choose_token_dtype,
    get_document_lengths,
    get_text_bytes,
    read_batches,
    read_schema,
)
from llmsys.atomic_write import write_bytes_atomically
from llmsys.errors import DataError
from llmsys.manifest import (
    DocumentFile,
    DocumentFiles,
    Manifest,
    Split,
    TokenFile,
    compute_dataset_fingerprint,
    load_manifest,
    write_manifest,
)
from llmsys.token_file import (
    MappedTokenFile,
    compute_file_digest,
    describe_document_file,
    describe_token_file,
)

__all__ = [
    "ArrowFileWriter",
    "DocumentFile",
    "DocumentFiles",
    "Manifest",
    "Split",
    "TokenFile",
    "TokenShards",
    "build_token_schema",
    "choose_token_dtype",
    "compute_dataset_fingerprint",
    "compute_file_digest",
    "describe_document_file",
    "describe_token_file",
    "load_manifest",
    "open_tokens",
    "read_batches",
    "read_schema",
    "verify_checksums",
    "write_bytes_atomically",
    "write_manifest",
]


SideColumn = Literal["id", "file", "url_hash"]
"""Columns that documents can be found by."""


class TokenShards:
    """The documents of one split as memory-mapped token views, numbered across all files in manifest order."""

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        """Map every file of the split; DataError when one is missing, of another size, or its lengths are damaged."""
        self.folder, self.split, self.manifest = folder, split, manifest
        entries = manifest.splits[split].files  # type: ignore[index]
        self._files = [MappedTokenFile(folder / "tokens" / entry.name, entry) for entry in entries]
        self._places = [(file, index) for file in self._files for index in range(len(file.batches))]
        batches = [file.batches[index] for file, index in self._places]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self._offsets = np.concatenate(
            [np.zeros(0, np.int32), *(file.views[index][1][:-1] for file, index in self._places)]
        )
        self.lengths: Integers = np.concatenate([np.zeros(0, np.int64), *map(get_document_lengths, batches)])
        self.text_bytes: Integers = np.concatenate([np.zeros(0, np.int64), *map(get_text_bytes, batches)])

    @property
    def fingerprint(self) -> str:
        """The dataset's fingerprint: changes when any token or the tokenizer changes."""
        return self.manifest.fingerprint

    @property
    def num_documents(self) -> int:
        """Number of documents in the split."""
        return len(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens in the split, the end-of-sequence ids among them."""
        return int(self.lengths.sum())

    @cached_property
    def num_text_bytes(self) -> int:
        """Number of UTF-8 bytes of text that the tokens of the split stand for."""
        return int(self.text_bytes.sum())

    def _locate_document(self, document: int) -> tuple[MappedTokenFile, int, int]:
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of split '{self.split}', which has {self.num_documents}")
        place = int(np.searchsorted(self._starts, document, side="right")) - 1
        file, index = self._places[place]
        return file, index, document - int(self._starts[place])

    def get_tokens(self, document: int) -> Tokens:
        """Return the tokens of one document, (T,) uint16 or uint32, as a read-only view of the mapped file."""
        file, index, row = self._locate_document(document)
        return file.get_document_tokens(index, row)

    def copy_spans(self, documents: Integers, begins: Integers, lengths: Integers, out: Integers) -> None:
        """Fill `out` with spans of documents, concatenated: `lengths[i]` tokens from `begins[i]` of each.

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
        for place, low, length in zip(places.tolist(), lows.tolist(), lengths.tolist(), strict=True):
            out[at : at + length] = values[place][low : low + length]
            at += length

    def get_lineage(self, document: int) -> dict[str, str | int]:
        """Return the id of a document, its crawl file, its record offset and the xxh64 of its URL."""
        file, index, row = self._locate_document(document)
        return file.get_lineage(index, row)

    def select_documents(self, column: SideColumn, *values: str | int) -> list[int]:
        """Return the numbers of the documents with one of these values in a side column. Reads the whole column."""
        found: list[int] = []
        for (file, index), start in zip(self._places, self._starts[:-1].tolist(), strict=True):
            cells = file.batches[index].column(column)
            same = pc.is_in(cells, pa.array(values, cells.type)).to_numpy(zero_copy_only=False)
            found += (np.flatnonzero(same) + start).tolist()
        return found

    def require_tokenizer(self, fingerprint: str) -> None:
        """Raise DataError unless the tokens were made by the tokenizer with this fingerprint."""
        if fingerprint != self.manifest.tokenizer_fingerprint:
            raise DataError(
                f"the tokens in {self.folder} were made by tokenizer {self.manifest.tokenizer_fingerprint}, "
                f"not by {fingerprint}, so their ids have another meaning. Use {self.folder / 'tokenizer'}, or "
                "run llmsys prepare CONFIG to encode the documents again."
            )


def open_tokens(folder: Path | str, split: str) -> TokenShards:
    """Open the tokens of one split of a dataset.

    Args:
        folder: The dataset folder.
        split: "train" or "heldout", or of pairs "train_source" or "heldout_source".

    Returns:
        The tokens as memory-mapped views.

    Raises:
        DataError: The dataset has no such tokens. The message gives the next step.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    if not manifest.splits:
        raise DataError(f"{folder} has documents but no tokens yet. Run: llmsys prepare CONFIG")
    if split not in manifest.splits:
        raise DataError(f"{folder} has no split '{split}', it has {', '.join(manifest.splits)}. Use one of these.")
    if not manifest.splits[split].documents:
        raise DataError(
            f"split '{split}' of {folder} has no documents. Set data.split.heldout_fraction so that both "
            "splits have documents, or give more input in data.inputs."
        )
    return TokenShards(folder, split, manifest)


def verify_checksums(folder: Path | str) -> Manifest:
    """Recount and hash every file of the manifest.

    Raises:
        DataError: A file differs from its entry. The message names the first one.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    for split in manifest.splits.values():
        for entry in split.files:
            path = folder / "tokens" / entry.name
            # before Arrow parses the file: it may crash on a bad header
            _require_digest(path, entry)
            if (found := describe_token_file(path)) != entry:
                fields = [name for name in TokenFile.model_fields if getattr(entry, name) != getattr(found, name)]
                raise DataError(f"{path} does not match its manifest: {', '.join(fields)} differ. {NEXT_STEP}")
    listings = (("documents", manifest.documents), ("dropped", manifest.dropped), ("documents", manifest.copies))
    for place, listing in listings:
        for document in listing.files:
            _require_digest(folder / place / document.name, document)
    return manifest


def _require_digest(path: Path, entry: TokenFile | DocumentFile) -> None:
    """Raise DataError unless the bytes of a file match its digest, before Arrow parses any of them."""
    if not path.exists():
        raise DataError(f"{path} is missing, but the manifest lists it. {REMAKE}")
    if (found := compute_file_digest(path)) != entry.digest:
        raise DataError(
            f"{path}: its digest is {found}, expected from the manifest: {entry.digest}: {DAMAGED} {NEXT_STEP}"
        )
