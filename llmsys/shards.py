"""The dataset on disk as its readers see it: token shards as memory-mapped numpy views, checked before they are used.

Reads manifest.json and tokens/ of a dataset folder; gives `open_tokens`, `verify` and, from `llmsys.shard_file` and
`llmsys.manifest`, all that the pipeline needs to write one. Promises: tokens are never copied; every record batch is
checked against the manifest the first time it is touched, and an error names the file and the batch.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from llmsys.errors import DataError
from llmsys.manifest import (
    DocumentFile,
    DocumentFiles,
    Manifest,
    Split,
    TokenFile,
    dataset_fingerprint,
    load_manifest,
    publish_bytes,
    write_manifest,
)
from llmsys.shard_file import (
    DAMAGED,
    NEXT_STEP,
    REMAKE,
    SIDE_COLUMNS,
    Integers,
    ShardWriter,
    Tokens,
    batch_lengths,
    batch_text_bytes,
    describe_document_file,
    describe_token_file,
    file_digest,
    frame_checksum,
    get_batch,
    lengths_checksum,
    lineage_checksum,
    map_file,
    open_arrow,
    read_batches,
    read_schema,
    token_dtype,
    token_schema,
)

__all__ = [
    "DocumentFile",
    "DocumentFiles",
    "Manifest",
    "ShardWriter",
    "Split",
    "TokenFile",
    "TokenShards",
    "dataset_fingerprint",
    "describe_document_file",
    "describe_token_file",
    "file_digest",
    "load_manifest",
    "open_tokens",
    "publish_bytes",
    "read_batches",
    "read_schema",
    "token_dtype",
    "token_schema",
    "verify",
    "write_manifest",
]


class _MappedFile:
    """One token file in memory maps, checked against its manifest entry: sizes now, each batch on first touch."""

    def __init__(self, path: Path, entry: TokenFile) -> None:
        if not path.exists():
            raise DataError(f"{path} is missing, but the manifest names it. {REMAKE}")
        if (size := path.stat().st_size) != entry.size:
            raise DataError(f"{path} has {size:,} bytes, its manifest says {entry.size:,}. {NEXT_STEP}")
        self.path, self.entry = path, entry
        data = map_file(path)
        if (found := frame_checksum(data, entry.batches)) != entry.frame_checksum:  # Arrow may crash on a bad header
            raise DataError(
                f"{path}, headers: their checksum is {found}, the manifest says {entry.frame_checksum}: "
                f"{DAMAGED} {NEXT_STEP}"
            )
        arrow = open_arrow(path, data)
        self.batches = [get_batch(path, arrow, index) for index in range(arrow.num_record_batches)]
        self.views = [self._views(index) for index in range(len(self.batches))]
        self.tokens_checked = [False] * len(self.batches)
        self.lineage_checked = [False] * len(self.batches)

    def _views(self, index: int) -> tuple[Tokens, Integers]:
        """Return values and offsets of one batch, the lengths checked: packing trusts them before it reads a token."""
        batch, expected = self.batches[index], self.entry.batches[index]
        column = batch.column("tokens")
        values, offsets = column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy()
        found = (batch.num_rows, len(values), lengths_checksum(batch))
        if found != (expected.rows, expected.tokens, expected.lengths_checksum):
            raise self._damage(index, "document lengths", found[2], expected.lengths_checksum)
        return values, offsets

    def _damage(self, index: int, part: str, found: str, expected: str) -> DataError:
        return DataError(
            f"{self.path}, record batch {index}: the checksum of its {part} is {found}, the manifest says {expected}: "
            f"{DAMAGED} {NEXT_STEP}"
        )

    def tokens(self, index: int, row: int) -> Tokens:
        values, offsets = self.views[index]
        if not self.tokens_checked[index]:
            expected = self.entry.batches[index].checksum
            if (found := xxhash.xxh64_hexdigest(values.data)) != expected:
                raise self._damage(index, "tokens", found, expected)
            self.tokens_checked[index] = True
        return values[offsets[row] : offsets[row + 1]]

    def lineage(self, index: int, row: int) -> dict[str, str | int]:
        batch = self.batches[index]
        if not self.lineage_checked[index]:
            expected = self.entry.batches[index].lineage_checksum
            if (found := lineage_checksum(batch)) != expected:
                raise self._damage(index, "lineage", found, expected)
            self.lineage_checked[index] = True
        return {name: batch.column(name)[row].as_py() for name in SIDE_COLUMNS}


class TokenShards:
    """The documents of one split as memory-mapped token views, numbered through all files in the manifest's order."""

    def __init__(self, folder: Path, split: str, manifest: Manifest) -> None:
        """Map every file of the split; DataError when one is missing, of another size, or its lengths are damaged."""
        self.folder, self.split, self.manifest = folder, split, manifest
        entries = manifest.splits[split].files  # type: ignore[index]
        self._files = [_MappedFile(folder / "tokens" / entry.name, entry) for entry in entries]
        self._places = [(file, index) for file in self._files for index in range(len(file.batches))]
        batches = [file.batches[index] for file, index in self._places]
        self._starts = np.cumsum([0, *(batch.num_rows for batch in batches)])
        self.lengths: Integers = np.concatenate([np.zeros(0, np.int64), *map(batch_lengths, batches)])
        self.text_bytes: Integers = np.concatenate([np.zeros(0, np.int64), *map(batch_text_bytes, batches)])

    @property
    def fingerprint(self) -> str:
        """The dataset's fingerprint: changes when any token or the tokenizer changes."""
        return self.manifest.fingerprint

    @property
    def documents(self) -> int:
        """Number of documents in the split."""
        return len(self.lengths)

    @cached_property
    def total_tokens(self) -> int:
        """Number of tokens in the split, the end-of-sequence ids among them."""
        return int(self.lengths.sum())

    @cached_property
    def total_text_bytes(self) -> int:
        """Number of UTF-8 bytes of text that the tokens of the split stand for."""
        return int(self.text_bytes.sum())

    def _place(self, document: int) -> tuple[_MappedFile, int, int]:
        if not 0 <= document < self.documents:
            raise IndexError(f"document {document} of split '{self.split}', which has {self.documents}")
        place = int(np.searchsorted(self._starts, document, side="right")) - 1
        file, index = self._places[place]
        return file, index, document - int(self._starts[place])

    def tokens(self, document: int) -> Tokens:
        """Return the tokens of one document, (T,) uint16 or uint32, as a read-only view of the mapped file."""
        file, index, row = self._place(document)
        return file.tokens(index, row)

    def lineage(self, document: int) -> dict[str, str | int]:
        """Return where a document came from: its id, crawl file, record offset and the xxh64 of its URL."""
        file, index, row = self._place(document)
        return file.lineage(index, row)

    def require_tokenizer(self, fingerprint: str) -> None:
        """Raise DataError unless the tokens were made by the tokenizer with this fingerprint."""
        if fingerprint != self.manifest.tokenizer_fingerprint:
            raise DataError(
                f"the tokens in {self.folder} were made by tokenizer {self.manifest.tokenizer_fingerprint}, "
                f"not by {fingerprint}: their ids mean other pieces. "
                f"Use {self.folder / 'tokenizer'}, or run llmsys prepare CONFIG to encode the documents again."
            )


def open_tokens(folder: Path | str, split: str) -> TokenShards:
    """Open the "train" or "heldout" tokens of a dataset folder; DataError with the next step when there are none."""
    folder = Path(folder)
    manifest = load_manifest(folder)
    if not manifest.splits:
        raise DataError(f"{folder} holds documents but no tokens yet. Run: llmsys prepare CONFIG")
    if split not in manifest.splits:
        raise DataError(f"{folder} has no split '{split}', it has {', '.join(manifest.splits)}. Use one of these.")
    if not manifest.splits[split].documents:
        raise DataError(
            f"split '{split}' of {folder} has no documents. "
            f"Set data.split.heldout_fraction so that both splits get some, or give more input in data.inputs."
        )
    return TokenShards(folder, split, manifest)


def verify(folder: Path | str) -> Manifest:
    """Recount and hash every file that the manifest names; DataError names the first that is not what it says."""
    folder = Path(folder)
    manifest = load_manifest(folder)
    for split in manifest.splits.values():
        for entry in split.files:
            path = folder / "tokens" / entry.name
            _require_digest(path, entry)
            if (found := describe_token_file(path)) != entry:
                fields = [name for name in TokenFile.model_fields if getattr(entry, name) != getattr(found, name)]
                raise DataError(f"{path} is not what its manifest says: {', '.join(fields)} differ. {NEXT_STEP}")
    for place, listing in (("documents", manifest.documents), ("dropped", manifest.dropped)):
        for document in listing.files:
            _require_digest(folder / place / document.name, document)
    return manifest


def _require_digest(path: Path, entry: TokenFile | DocumentFile) -> None:
    """Compare all bytes before Arrow parses any of them."""
    if not path.exists():
        raise DataError(f"{path} is missing, but the manifest names it. {REMAKE}")
    if (found := file_digest(path)) != entry.digest:
        raise DataError(f"{path}: its digest is {found}, the manifest says {entry.digest}: {DAMAGED} {NEXT_STEP}")
