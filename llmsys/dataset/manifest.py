"""Read and write manifest.json, which lists the complete files of a dataset and how they were made.

Reads/Writes: manifest.json of a dataset folder.

Invariants:
- It is published last and by rename.
- It has no clock and no path of its folder: equal inputs and settings give equal bytes, for any
  number of workers.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from operator import not_
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import Field, ValidationError

from llmsys.dataset.manifest_section import MANIFEST_NAME as MANIFEST_NAME
from llmsys.dataset.manifest_section import (
    DecontaminationSummary,
    InputColumn,
    ManifestSection,
    SampledColumn,
    ThresholdReport,
    TokenBatch,
    TokenIndex,
)
from llmsys.errors import DataError
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.paths import find_folder_url, format_folder
from llmsys.storage.received_files import RECEIVED
from llmsys.storage.stored_formats import MANIFEST, require_version

# Documents or targets to train on and to evaluate; of pairs also their sources, row for row.
SplitName = Literal["train", "heldout", "train_source", "heldout_source"]


class TokenFile(ManifestSection):
    """One Arrow file of tokens; `digest` is the xxh3_128 (hex) of all its bytes, `text_bytes`
    counts UTF-8.

    A file with a page table has `page_root`, the xxh3_64 (hex) of the table's head
    (llmsys/dataset/token_file.py). Others have `batches` and `frame_checksum`, the xxh64 (hex) of
    the bytes outside the data of the batches.
    """

    name: str
    rows: int
    tokens: int
    text_bytes: int
    size: int
    digest: str
    frame_checksum: str = ""
    batches: tuple[TokenBatch, ...] = ()
    page_root: str = ""


class DocumentFile(ManifestSection):
    """One Arrow file of documents, kept or dropped; `digest` is the xxh3_128 (hex) of all its
    bytes.
    """

    name: str
    rows: int
    size: int
    digest: str


class DocumentFiles(ManifestSection):
    """All files of one kind of documents."""

    files: tuple[DocumentFile, ...] = ()


class Split(ManifestSection):
    """The token files of a split and their sums.

    The files are listed in `index`, or in `files` where there is none. `bytes` counts the UTF-8
    text that the tokens stand for.
    """

    documents: int
    tokens: int
    bytes: int
    files: tuple[TokenFile, ...] = ()
    index: TokenIndex | None = None

    @property
    def num_files(self) -> int:
        """Number of token files."""
        return len(self.files) if self.index is None else self.index.files


class DropExample(ManifestSection):
    """One dropped document, shown to judge the rule that dropped it."""

    url: str
    value: float | str | None
    threshold: float | str | None
    reason: str
    excerpt: str


class DropCount(ManifestSection):
    """The documents that one test of one rule dropped, with up to three examples: the smallest
    document ids.
    """

    rule: str
    test: str
    documents: int
    bytes: int
    examples: tuple[DropExample, ...]


class FunnelStage(ManifestSection):
    """One stage of the funnel. Bytes are of HTML or given text before extraction, and of UTF-8 text
    after it.

    `changed` counts the edits of kept documents: lines removed, addresses replaced.
    """

    stage: str
    documents_in: int
    bytes_in: int
    documents_out: int
    bytes_out: int
    dropped: tuple[DropCount, ...] = ()
    changed: dict[str, int] = Field(default_factory=dict)


class LanguageCount(ManifestSection):
    """Documents and text bytes in one language, counted on all extracted documents, before the
    language filter.
    """

    documents: int
    bytes: int


class LanguageUsage(ManifestSection):
    """The documents of one language as tokens. Words are separated by ASCII whitespace."""

    documents: int
    bytes: int
    words: int
    tokens: int
    unknown_tokens: int
    byte_tokens: int


class TokenizerUsage(ManifestSection):
    """The fit of the tokenizer to the documents. Dead pieces stand for text that no document has.

    `checked_documents` were encoded a second time by the tokenizer's library, and had the same ids.
    `by_library` is the rule by which the library encoded every document; empty when it did not.
    """

    languages: dict[str, LanguageUsage]
    pieces: int
    dead_pieces: int
    dead_examples: tuple[str, ...]
    checked_documents: int
    by_library: str = ""


class Histogram(ManifestSection):
    """Characters per kept document: `counts[i]` documents have edges[i] <= characters < edges[i
    + 1].
    """

    edges: tuple[int, ...]
    counts: tuple[int, ...]


class SkippedInput(ManifestSection):
    """Input that could not be read: `count` records for one reason, the first of them at
    `offset` of `file`.
    """

    file: str
    offset: int
    reason: str
    count: int


class ReadSummary(ManifestSection):
    """The input that was read: `html_bytes` of pages and texts, of which `given_text_bytes` came
    as text.
    """

    files: int
    records: int
    html_bytes: int
    given_text_bytes: int = 0
    skipped: tuple[SkippedInput, ...] = ()
    # pages that were kept although something is wrong with them
    noted: tuple[SkippedInput, ...] = ()


class Manifest(ManifestSection):
    """The manifest of a dataset. `splits` is empty until tokens are prepared."""

    format_version: Literal[2] = 2  # that of MANIFEST in llmsys/storage/stored_formats.py
    name: str
    fingerprint: str
    config: dict[str, Any]
    config_digest: str
    vocab_size: int | None
    token_dtype: Literal["uint16", "uint32"] | None
    tokenizer_fingerprint: str | None
    splits: dict[SplitName, Split]
    documents: DocumentFiles
    dropped: DocumentFiles
    # the same documents in other formats, in documents/ too
    exports: DocumentFiles = DocumentFiles()
    funnel: tuple[FunnelStage, ...]
    languages: dict[str, LanguageCount]
    lengths: Histogram
    read: ReadSummary
    usage: TokenizerUsage | None = None  # of the tokenizer, when there are tokens
    decontamination: DecontaminationSummary | None = None  # when evaluation sets were looked for
    thresholds: tuple[ThresholdReport, ...] = ()  # the documents nearest to each threshold
    labels: tuple[str, ...] = ()  # of labelled texts: a target of one token n means label n
    # tokens with a loss, of chats (llmsys/vocabulary/chat_tokens.py)
    answers: dict[SplitName, int] = Field(default_factory=dict)
    # columns from further fields of rows, and what did not fit in them
    input_columns: tuple[InputColumn, ...] = Field((), exclude_if=not_)
    column_notes: tuple[str, ...] = Field((), exclude_if=not_)
    # what data.sampling left of the training documents
    sampling: tuple[SampledColumn, ...] = Field((), exclude_if=not_)
    # xxh3_128 (hex) of the file with an empty one; empty again once it was compared
    checksum: str = ""


def compute_dataset_fingerprint(
    tokenizer_fingerprint: str | None, file_digests: Iterable[str]
) -> str:
    """Hash the tokenizer and the data files of a dataset.

    Args:
        tokenizer_fingerprint: The fingerprint of the tokenizer. None when there is none.
        file_digests: The digests of the data files, in manifest order.

    Returns:
        32 hex digits.
    """
    text = "\n".join([tokenizer_fingerprint or "", *file_digests])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def combine_fingerprints(fingerprints: Sequence[str]) -> str:
    """Combine the fingerprints of several datasets.

    Args:
        fingerprints: One per dataset. The order counts.

    Returns:
        32 hex digits. For a single dataset, its own fingerprint.
    """
    return (
        fingerprints[0]
        if len(fingerprints) == 1
        else compute_dataset_fingerprint(None, fingerprints)
    )


def load_manifest(folder: Path | str) -> Manifest:
    """Read manifest.json of a dataset folder and verify its checksum.

    Args:
        folder: The dataset folder.

    Returns:
        The manifest, with an empty `checksum`.

    Raises:
        DataError: The file is missing or damaged.
        FormatError: It has another format version.
    """
    path = Path(folder) / MANIFEST_NAME
    if (url := find_folder_url(path.parent)) is not None:
        from llmsys.dataset.remote_dataset import fetch_dataset  # most datasets are local

        fetch_dataset(path.parent, url)
    try:
        text = RECEIVED.get(path) or path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{format_folder(path)} does not exist, so the dataset is incomplete (its manifest is "
            "written last)"
            ". Run: llmsys prepare CONFIG"
        ) from None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        # Checked here and not before, because reading a large manifest twice takes time.
        _require_manifest_version(path, text)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DataError(
            f"{path} cannot be used: {where}: {first['msg']}. Delete {path} and run llmsys "
            "prepare CONFIG again; complete files are reused."
        ) from None
    if (
        manifest.checksum
        and (found := _compute_checksum(text, manifest.checksum)) != manifest.checksum
    ):
        raise DataError(
            f"{path} was damaged or changed after it was written: its checksum is {found}, "
            f"expected {manifest.checksum}. Delete {path} and run llmsys prepare CONFIG again; "
            "complete files are reused."
        )
    return manifest.model_copy(update={"checksum": ""})


def _require_manifest_version(path: Path, text: bytes) -> None:
    """Raise FormatError for the manifest of another version. A damaged one passes."""
    try:
        values = json.loads(text)
    except ValueError:
        return
    if isinstance(values, dict):
        require_version(MANIFEST, values, format_folder(path))


def _compute_checksum(text: bytes, checksum: str) -> str:
    """Return the checksum of a manifest, in which its own field counts as empty."""
    # The last field of the text.
    return xxhash.xxh3_128_hexdigest(b"".join(text.rpartition(checksum.encode())[::2]))


def write_manifest(folder: Path | str, manifest: Manifest) -> Path:
    """Publish manifest.json by rename, which completes the dataset.

    Args:
        folder: The dataset folder.
        manifest: The manifest. Its `checksum` is computed here.

    Returns:
        The path of the file.

    Raises:
        DataError: The file cannot be written.
    """
    path = Path(folder) / MANIFEST_NAME
    checksum = xxhash.xxh3_128_hexdigest(_encode_manifest(manifest))
    write_bytes_atomically(
        path, _encode_manifest(manifest.model_copy(update={"checksum": checksum}))
    )
    return path


def _encode_manifest(manifest: Manifest) -> bytes:
    return (manifest.model_dump_json(indent=1) + "\n").encode()
