"""Open the tokens of a dataset.

Reads: manifest.json and tokens/ of a dataset folder. Writers import all that they need from here
too.

Invariants:
- Every token is checked against the manifest before its first use. An error names the file and the
  part.
"""

from pathlib import Path

from llmsys.dataset.manifest import (
    DocumentFile,
    DocumentFiles,
    Manifest,
    Split,
    TokenFile,
    compute_dataset_fingerprint,
    load_manifest,
    write_manifest,
)
from llmsys.dataset.manifest_section import TokenIndex
from llmsys.dataset.token_file import (
    compute_file_digest,
    describe_document_file,
    describe_token_file,
    write_page_table,
    write_token_index,
)
from llmsys.dataset.token_split import TokenShards, iter_token_files
from llmsys.errors import DataError
from llmsys.storage.arrow_file import (
    DAMAGED,
    NEXT_STEP,
    REMAKE,
    ArrowFileWriter,
    build_token_schema,
    choose_token_dtype,
    read_batches,
    read_schema,
)
from llmsys.storage.local_files import format_folder, write_bytes_atomically

__all__ = [
    "ArrowFileWriter",
    "DocumentFile",
    "DocumentFiles",
    "Manifest",
    "Split",
    "TokenFile",
    "TokenIndex",
    "TokenShards",
    "build_token_schema",
    "choose_token_dtype",
    "compute_dataset_fingerprint",
    "compute_file_digest",
    "describe_document_file",
    "describe_token_file",
    "iter_token_files",
    "load_manifest",
    "open_tokens",
    "read_batches",
    "read_schema",
    "verify_checksums",
    "write_bytes_atomically",
    "write_manifest",
    "write_page_table",
    "write_token_index",
]


def open_tokens(folder: Path | str, split: str) -> TokenShards:
    """Open the tokens of one split of a dataset.

    Args:
        folder: The dataset folder.
        split: "train" or "heldout", or of pairs "train_source" or "heldout_source".

    Returns:
        The documents of the split; `PagedTokenShards` where its files have page tables.

    Raises:
        DataError: The dataset has no such tokens. The message gives the next step.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    if not manifest.splits:
        raise DataError(
            f"{format_folder(folder)} has documents but no tokens yet. Run: llmsys prepare CONFIG"
        )
    if split not in manifest.splits:
        listed = ", ".join(manifest.splits)
        raise DataError(
            f"{format_folder(folder)} has no split '{split}', it has {listed}. Use one of these."
        )
    if not manifest.splits[split].documents:
        raise DataError(
            f"split '{split}' of {format_folder(folder)} has no documents. Set "
            "data.split.heldout_fraction so that both splits have documents, or give more input "
            "in data.inputs."
        )
    if manifest.splits[split].index is not None:
        # Imported here: writers of datasets read no tokens.
        from llmsys.dataset.paged_token_shards import PagedTokenShards

        return PagedTokenShards(folder, split, manifest)
    from llmsys.dataset.mapped_token_shards import MappedTokenShards
    from llmsys.dataset.remote_dataset import fetch_token_files

    fetch_token_files(folder, [entry.name for entry in manifest.splits[split].files])
    return MappedTokenShards(folder, split, manifest)


def verify_checksums(folder: Path | str) -> Manifest:
    """Recount and hash every file of the manifest.

    Raises:
        DataError: A file differs from its entry. The message names the first one.
    """
    folder = Path(folder)
    manifest = load_manifest(folder)
    for entry in iter_token_files(folder, manifest.splits.values()):
        path = folder / "tokens" / entry.name
        # before Arrow parses the file: it may crash on a bad header
        _require_digest(path, entry)
        if not entry.page_root and (found := describe_token_file(path)) != entry:
            fields = [
                name
                for name in TokenFile.model_fields
                if getattr(entry, name) != getattr(found, name)
            ]
            raise DataError(
                f"{path} does not match its manifest: {', '.join(fields)} differ. {NEXT_STEP}"
            )
    listings = (
        ("documents", manifest.documents),
        ("dropped", manifest.dropped),
        ("documents", manifest.exports),
    )
    for place, listing in listings:
        for document in listing.files:
            _require_digest(folder / place / document.name, document)
    return manifest


def _require_digest(path: Path, entry: TokenFile | DocumentFile) -> None:
    """Raise DataError unless the bytes of a file match its digest, before Arrow parses any of
    them.
    """
    if not path.exists():
        raise DataError(f"{path} is missing, but the manifest lists it. {REMAKE}")
    if (found := compute_file_digest(path)) != entry.digest:
        raise DataError(
            f"{path}: its digest is {found}, expected from the manifest: {entry.digest}: "
            f"{DAMAGED} {NEXT_STEP}"
        )
