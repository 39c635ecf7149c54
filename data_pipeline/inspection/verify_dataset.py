"""Verify a dataset folder against its manifest: hash every file, count every row, decode some
documents.

Reads every file and changes nothing. Progress is in bytes of files.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from llmsys.data_pipeline.inspection.token_samples import DocumentSample, verify_samples
from llmsys.data_pipeline.inspection.verify_files import (
    DatasetFinding,
    verify_document_file,
    verify_token_file,
)
from llmsys.data_pipeline.tokenize.tokenizer_files import load_dataset_tokenizer
from llmsys.dataset.manifest import (
    DocumentFile,
    Manifest,
    Split,
    TokenFile,
    compute_dataset_fingerprint,
    load_manifest,
)
from llmsys.dataset.token_file import get_page_table_path
from llmsys.dataset.token_split import iter_token_files
from llmsys.errors import DataError
from llmsys.progress import Progress
from llmsys.vocabulary.chat_tokens import count_stored_ids
from llmsys.vocabulary.tokenizer import Tokenizer

SUBFOLDERS = ("documents", "dropped", "tokens")


@dataclass
class InspectionResult:
    """The inspected files, the samples and the findings."""

    folder: Path
    manifest: Manifest
    files: int = 0
    bytes: int = 0
    samples: list[DocumentSample] = field(default_factory=list)
    findings: list[DatasetFinding] = field(default_factory=list)


def verify_dataset(folder: Path, samples: int) -> InspectionResult:
    """Verify everything that the manifest names.

    Args:
        folder: the dataset folder.
        samples: number of documents to encode and decode again, chosen by the hashes of their ids.

    Returns:
        The result; a sound dataset has no findings.

    Raises:
        DataError: if there is no readable manifest.
    """
    inspection = InspectionResult(folder, load_manifest(folder))
    manifest, findings = inspection.manifest, inspection.findings
    entries = _list_entries(folder, manifest, findings)
    findings += _verify_manifest(manifest, entries)
    tokenizer = _load_dataset_tokenizer(folder, manifest, findings)
    findings += _find_unlisted_files(folder, manifest, entries)
    end = tokenizer.eos_id if tokenizer is not None and not manifest.labels else None
    vocab_size = manifest.vocab_size or 0
    if manifest.answers:
        vocab_size, end = count_stored_ids(vocab_size), 2 * vocab_size
    with Progress("inspect", sum(entry.size for _, entry in entries), "B") as progress:
        for subfolder, entry in entries:
            findings += _verify_entry(folder, subfolder, entry, vocab_size, end)
            inspection.files += 1
            inspection.bytes += entry.size
            progress.advance(entry.size, wrong=len(findings))
    if not findings and tokenizer is not None:  # samples of a damaged file add no information
        inspection.samples, wrong = verify_samples(folder, manifest, tokenizer, samples)
        findings += wrong
    return inspection


def _list_entries(
    folder: Path, manifest: Manifest, findings: list[DatasetFinding]
) -> list[tuple[str, TokenFile | DocumentFile]]:
    """Return (folder, entry) of every file that the manifest or an index lists. An unusable
    index is a finding.
    """
    entries: list[tuple[str, TokenFile | DocumentFile]] = []
    for split in manifest.splits.values():
        try:
            entries += [("tokens", entry) for entry in iter_token_files(folder, [split])]
        except DataError as error:
            assert split.index is not None
            findings.append(DatasetFinding(f"tokens/{split.index.name}", "", str(error)))
    for subfolder, listing in (
        ("documents", manifest.documents),
        ("dropped", manifest.dropped),
        ("documents", manifest.exports),
    ):
        entries += [(subfolder, entry) for entry in listing.files]
    return entries


def _verify_entry(
    folder: Path, subfolder: str, entry: TokenFile | DocumentFile, vocab_size: int, end: int | None
) -> list[DatasetFinding]:
    path = folder / subfolder / entry.name
    if not path.is_file():
        return [
            DatasetFinding(
                f"{subfolder}/{entry.name}", "", "it is missing, but the manifest lists it"
            )
        ]
    try:
        if isinstance(entry, TokenFile):
            return list(verify_token_file(path, entry, vocab_size, end))
        return list(verify_document_file(path, subfolder, entry))
    except (DataError, OSError) as error:
        return [DatasetFinding(f"{subfolder}/{entry.name}", "", f"it cannot be read: {error}")]


def _verify_manifest(
    manifest: Manifest, entries: Sequence[tuple[str, TokenFile | DocumentFile]]
) -> Iterator[DatasetFinding]:
    """Yield wrong sums and a wrong fingerprint of the manifest itself."""
    tokens = [entry for _, entry in entries if isinstance(entry, TokenFile)]
    for name, split in manifest.splits.items():
        yield from _verify_split_sums(
            name, split, [file for file in tokens if file.name.startswith(f"{name}-")]
        )
    # A dataset without tokens is identified by its documents.
    files = tokens or manifest.documents.files
    expected = compute_dataset_fingerprint(
        manifest.tokenizer_fingerprint, [entry.digest for entry in files]
    )
    if manifest.fingerprint != expected:
        problem = (
            f"it is {manifest.fingerprint}, but the files and tokenizer that it lists have "
            f"{expected}"
        )
        yield DatasetFinding("manifest.json", "fingerprint", problem)


def _verify_split_sums(
    name: str, split: Split, files: Sequence[TokenFile]
) -> Iterator[DatasetFinding]:
    sums = {
        "documents": (split.documents, sum(file.rows for file in files)),
        "tokens": (split.tokens, sum(file.tokens for file in files)),
        "bytes": (split.bytes, sum(file.text_bytes for file in files)),
    }
    for unit, (listed, found) in sums.items():
        if listed != found:
            yield DatasetFinding(
                "manifest.json",
                f"splits.{name}",
                f"it lists {listed:,} {unit}, but its files have {found:,}",
            )


def _load_dataset_tokenizer(
    folder: Path, manifest: Manifest, findings: list[DatasetFinding]
) -> Tokenizer | None:
    """Return the dataset's tokenizer if it is the one that encoded the tokens."""
    if manifest.tokenizer_fingerprint is None:
        return None
    try:
        tokenizer = load_dataset_tokenizer(folder / "tokenizer")
    except DataError as error:
        findings.append(DatasetFinding("tokenizer", "", str(error)))
        return None
    if tokenizer.fingerprint == manifest.tokenizer_fingerprint:
        return tokenizer
    problem = (
        f"its fingerprint is {tokenizer.fingerprint}, expected from the manifest: "
        f"{manifest.tokenizer_fingerprint}"
    )
    findings.append(DatasetFinding("tokenizer", "", problem))
    return None


def _find_unlisted_files(
    folder: Path, manifest: Manifest, entries: Sequence[tuple[str, TokenFile | DocumentFile]]
) -> Iterator[DatasetFinding]:
    """Yield files that look like part of the dataset and that no reader would read."""
    named = {f"{subfolder}/{entry.name}" for subfolder, entry in entries}
    for _, entry in entries:
        if isinstance(entry, TokenFile) and entry.page_root:
            named.add(f"tokens/{get_page_table_path(Path(entry.name))}")
    named |= {
        f"tokens/{split.index.name}"
        for split in manifest.splits.values()
        if split.index is not None
    }
    for subfolder in SUBFOLDERS if manifest.splits else SUBFOLDERS[:2]:
        for path in sorted((folder / subfolder).glob("*")):
            if (name := f"{subfolder}/{path.name}") not in named and not path.name.startswith("."):
                yield DatasetFinding(name, "", "the manifest does not list it")
