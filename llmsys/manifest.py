"""What manifest.json of a dataset folder says: the only truth about which files are whole and what made them.

Reads and writes manifest.json; gives the `Manifest` model that the pipeline fills, the training reader trusts and the
report draws. Promises: it is published last and by rename, holds no clock and no path of the dataset folder itself, and
so has the same bytes for the same input and configuration, whatever the workers.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from llmsys.atomic_write import write_bytes_atomically
from llmsys.errors import DataError
from llmsys.spared_item import SparedItem
from llmsys.threshold_report import ThresholdReport

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
SplitName = Literal["train", "heldout", "train_source", "heldout_source"]
"""Documents or targets to train on and to evaluate; of pairs also their sources, row for row."""


class ManifestSection(BaseModel):
    """One mapping of the manifest: frozen, and strict about keys that this version does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TokenBatch(ManifestSection):
    """One Arrow record batch of a token file; each checksum is the xxh64 (hex) of what is read on its own.

    Its data lie in the bytes `begin` to `end` of the file.
    """

    rows: int
    tokens: int
    begin: int
    end: int
    checksum: str  # over the token ids
    lengths_checksum: str  # over tokens per document and text bytes per document, both int64
    lineage_checksum: str  # over the buffers of the side columns id, file, offset, url_hash


class TokenFile(ManifestSection):
    """One Arrow file of tokens; `digest` is the xxh3_128 (hex) of all its bytes, `text_bytes` counts UTF-8.

    `frame_checksum` is the xxh64 (hex) of the bytes outside the data of the batches: what Arrow itself must trust.
    """

    name: str
    rows: int
    tokens: int
    text_bytes: int
    size: int
    digest: str
    frame_checksum: str
    batches: tuple[TokenBatch, ...]


class DocumentFile(ManifestSection):
    """One Arrow file of documents, kept or dropped; `digest` is the xxh3_128 (hex) of all its bytes."""

    name: str
    rows: int
    size: int
    digest: str


class DocumentFiles(ManifestSection):
    """All files of one kind of documents."""

    files: tuple[DocumentFile, ...] = ()


class Split(ManifestSection):
    """The token files of one split and their sums; `bytes` counts the UTF-8 text that the tokens stand for."""

    documents: int
    tokens: int
    bytes: int
    files: tuple[TokenFile, ...]


class DropExample(ManifestSection):
    """One dropped document, so that a person can judge the rule that dropped it."""

    url: str
    value: float | str | None
    threshold: float | str | None
    reason: str
    excerpt: str


class DropCount(ManifestSection):
    """What one test of one rule dropped; at most three examples, those with the smallest document ids."""

    rule: str
    test: str
    documents: int
    bytes: int
    examples: tuple[DropExample, ...]


class FunnelStage(ManifestSection):
    """One stage of the funnel. Bytes are of HTML or given text before extraction, and of UTF-8 text after it.

    `changed` counts what was done to documents that stay: lines taken out, addresses replaced.
    """

    stage: str
    documents_in: int
    bytes_in: int
    documents_out: int
    bytes_out: int
    dropped: tuple[DropCount, ...] = ()
    changed: dict[str, int] = {}


class LanguageCount(ManifestSection):
    """Documents and text bytes in one language, counted on all extracted documents, before the language filter."""

    documents: int
    bytes: int


class LanguageUsage(ManifestSection):
    """The documents of one language as tokens; a word is what stands between white space of ASCII."""

    documents: int
    bytes: int
    words: int
    tokens: int
    unknown_tokens: int
    byte_tokens: int


class TokenizerUsage(ManifestSection):
    """How well the tokenizer fits the documents; dead pieces stand for text that is in none of them.

    `checked_documents` were encoded a second time by the tokenizer's library, and had the same ids. `by_library` is the
    rule by which the library was asked for every document; empty where it was not.
    """

    languages: dict[str, LanguageUsage]
    pieces: int
    dead_pieces: int
    dead_examples: tuple[str, ...]
    checked_documents: int
    by_library: str = ""


class ContaminatedDocument(ManifestSection):
    """One document in which an item of an evaluation set was found; the first n-gram that both hold is named."""

    item: str
    part: str
    ngram: str
    matches: int
    action: str
    url: str
    excerpt: str


class SetContamination(ManifestSection):
    """What was found of one evaluation set, with at most five examples, those with the smallest document ids.

    `too_short` counts parts with too few words to be looked for; `spared` names the hundred items of most documents.
    """

    items: int
    ngrams: int
    too_short: int
    items_found: int
    documents_dropped: int
    documents_cut: int
    examples: tuple[ContaminatedDocument, ...]
    items_spared: int = 0
    spared: tuple[SparedItem, ...] = ()


class DecontaminationSummary(ManifestSection):
    """What was found of evaluation sets by name; decontamination/ has a line for each document and item.

    `exempt_ngrams` were found in more documents than the config allows for an n-gram that decides.
    """

    sets: dict[str, SetContamination]
    exempt_ngrams: int


class Histogram(ManifestSection):
    """Characters per kept document: `counts[i]` documents have edges[i] <= characters < edges[i + 1]."""

    edges: tuple[int, ...]
    counts: tuple[int, ...]


class SkippedInput(ManifestSection):
    """Input that could not be read: `count` records for one reason, the first of them at `offset` of `file`."""

    file: str
    offset: int
    reason: str
    count: int


class ReadSummary(ManifestSection):
    """What was read: `html_bytes` of pages and texts, of which `given_text_bytes` came as text."""

    files: int
    records: int
    html_bytes: int
    given_text_bytes: int = 0
    skipped: tuple[SkippedInput, ...] = ()
    noted: tuple[SkippedInput, ...] = ()  # pages that were kept although something is wrong with them


class Manifest(ManifestSection):
    """The dataset as a whole. `splits` is empty while only documents (or documents and a tokenizer) are prepared."""

    schema_version: Literal[1] = 1
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
    copies: DocumentFiles = DocumentFiles()  # the same documents in other formats, in documents/ too
    funnel: tuple[FunnelStage, ...]
    languages: dict[str, LanguageCount]
    lengths: Histogram
    read: ReadSummary
    usage: TokenizerUsage | None = None  # of the tokenizer, when there are tokens
    decontamination: DecontaminationSummary | None = None  # when evaluation sets were looked for
    borders: tuple[ThresholdReport, ...] = ()  # the documents nearest to each threshold
    labels: tuple[str, ...] = ()  # of labelled texts: a target of one token n means label n
    checksum: str = ""  # xxh3_128 (hex) of the file with an empty one; empty again once it was compared


def compute_dataset_fingerprint(tokenizer_fingerprint: str | None, file_digests: Iterable[str]) -> str:
    """Return 32 hex digits that change when any data file or the tokenizer changes."""
    text = "\n".join([tokenizer_fingerprint or "", *file_digests])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def combine_fingerprints(fingerprints: Sequence[str]) -> str:
    """The fingerprint of several datasets in an order; of a single one, its own."""
    return fingerprints[0] if len(fingerprints) == 1 else compute_dataset_fingerprint(None, fingerprints)


def load_manifest(folder: Path | str) -> Manifest:
    """Read manifest.json of a dataset folder; DataError when it is missing, damaged or of another version."""
    path = Path(folder) / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist, and a dataset without its manifest is not finished (it is published last). "
            f"Prepare the dataset with: llmsys prepare CONFIG"
        ) from None
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DataError(
            f"{path} cannot be used: {where}: {first['msg']} (schema version {SCHEMA_VERSION} is expected). "
            f"Delete {path} and run llmsys prepare CONFIG again: what is whole is not made twice."
        ) from None
    if manifest.checksum and (found := _compute_checksum(text, manifest.checksum)) != manifest.checksum:
        raise DataError(
            f"{path} was damaged or changed after it was written: its checksum is {found}, and it says "
            f"{manifest.checksum}. Delete {path} and run llmsys prepare CONFIG again: what is whole is not made twice."
        )
    return manifest.model_copy(update={"checksum": ""})


def _compute_checksum(text: bytes, said: str) -> str:
    """The checksum of a manifest; it stands at the end of what it is the checksum of, and counts as empty."""
    begin, _, end = text.rpartition(said.encode())
    return xxhash.xxh3_128_hexdigest(begin + end)


def write_manifest(folder: Path | str, manifest: Manifest) -> Path:
    """Publish manifest.json by rename, after which the dataset is whole."""
    path = Path(folder) / MANIFEST_NAME
    checksum = xxhash.xxh3_128_hexdigest(_encode_manifest(manifest))
    write_bytes_atomically(path, _encode_manifest(manifest.model_copy(update={"checksum": checksum})))
    return path


def _encode_manifest(manifest: Manifest) -> bytes:
    return (manifest.model_dump_json(indent=1) + "\n").encode()
