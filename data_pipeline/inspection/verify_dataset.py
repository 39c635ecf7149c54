"""A whole dataset folder against its manifest: every file hashed, every row counted, some documents decoded.

Gives an `InspectionResult`; reads everything and changes nothing. Progress is in bytes of files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data_pipeline.inspection.finding import DatasetFinding
from data_pipeline.inspection.token_samples import DocumentSample, verify_samples
from data_pipeline.inspection.verify_files import verify_document_file, verify_token_file
from llmsys.errors import DataError
from llmsys.manifest import DocumentFile, Manifest, Split, TokenFile, compute_dataset_fingerprint, load_manifest
from llmsys.progress import Progress
from llmsys.tokenizer import Tokenizer, load_tokenizer

ROOMS = ("documents", "dropped", "tokens")


@dataclass
class InspectionResult:
    """What was looked at, and what is wrong with it."""

    folder: Path
    manifest: Manifest
    files: int = 0
    bytes: int = 0
    samples: list[DocumentSample] = field(default_factory=list)
    findings: list[DatasetFinding] = field(default_factory=list)


def verify_dataset(folder: Path, samples: int) -> InspectionResult:
    """Check everything that the manifest names; DataError when there is no manifest that can be read.

    `samples` documents, chosen by the hashes of their ids, are encoded and decoded again.
    """
    inspection = InspectionResult(folder, load_manifest(folder))
    manifest, findings = inspection.manifest, inspection.findings
    findings += _verify_manifest(manifest)
    tokenizer = _load_dataset_tokenizer(folder, manifest, findings)
    findings += _find_unlisted_files(folder, manifest)
    end = tokenizer.eos_id if tokenizer is not None and not manifest.labels else None
    with Progress("inspect", sum(entry.size for _, entry in _iter_entries(manifest)), "B") as progress:
        for room, entry in _iter_entries(manifest):
            findings += _verify_entry(folder, room, entry, manifest.vocab_size or 0, end)
            inspection.files += 1
            inspection.bytes += entry.size
            progress.advance(entry.size, wrong=len(findings))
    if not findings and tokenizer is not None:  # in a file that is damaged a sample would say nothing more
        inspection.samples, wrong = verify_samples(folder, manifest, tokenizer, samples)
        findings += wrong
    return inspection


def _iter_entries(manifest: Manifest) -> Iterator[tuple[str, TokenFile | DocumentFile]]:
    for split in manifest.splits.values():
        for tokens in split.files:
            yield "tokens", tokens
    for room, listing in (
        ("documents", manifest.documents),
        ("dropped", manifest.dropped),
        ("documents", manifest.copies),
    ):
        for documents in listing.files:
            yield room, documents


def _verify_entry(
    folder: Path, room: str, entry: TokenFile | DocumentFile, vocab_size: int, end: int | None
) -> list[DatasetFinding]:
    path = folder / room / entry.name
    if not path.is_file():
        return [DatasetFinding(f"{room}/{entry.name}", "", "it is missing, but the manifest names it")]
    try:
        if isinstance(entry, TokenFile):
            return list(verify_token_file(path, entry, vocab_size, end))
        return list(verify_document_file(path, room, entry))
    except (DataError, OSError) as error:
        return [DatasetFinding(f"{room}/{entry.name}", "", f"it cannot be read: {error}")]


def _verify_manifest(manifest: Manifest) -> Iterator[DatasetFinding]:
    """Sums and the fingerprint of the manifest itself."""
    for name, split in manifest.splits.items():
        yield from _verify_split_sums(name, split)
    files = [entry for split in manifest.splits.values() for entry in split.files] or manifest.documents.files
    expected = compute_dataset_fingerprint(manifest.tokenizer_fingerprint, [entry.digest for entry in files])
    if manifest.fingerprint != expected:
        problem = f"it is {manifest.fingerprint}, and the files and tokenizer that it names have {expected}"
        yield DatasetFinding("manifest.json", "fingerprint", problem)


def _verify_split_sums(name: str, split: Split) -> Iterator[DatasetFinding]:
    sums = {
        "documents": (split.documents, sum(file.rows for file in split.files)),
        "tokens": (split.tokens, sum(file.tokens for file in split.files)),
        "bytes": (split.bytes, sum(file.text_bytes for file in split.files)),
    }
    for what, (said, found) in sums.items():
        if said != found:
            yield DatasetFinding(
                "manifest.json", f"splits.{name}", f"it says {said:,} {what}, and its files have {found:,}"
            )


def _load_dataset_tokenizer(folder: Path, manifest: Manifest, findings: list[DatasetFinding]) -> Tokenizer | None:
    """The dataset's tokenizer, when it is the one that the tokens were made by."""
    if manifest.tokenizer_fingerprint is None:
        return None
    try:
        tokenizer = load_tokenizer(folder / "tokenizer")
    except DataError as error:
        findings.append(DatasetFinding("tokenizer", "", str(error)))
        return None
    if tokenizer.fingerprint == manifest.tokenizer_fingerprint:
        return tokenizer
    problem = f"its fingerprint is {tokenizer.fingerprint}, the manifest says {manifest.tokenizer_fingerprint}"
    findings.append(DatasetFinding("tokenizer", "", problem))
    return None


def _find_unlisted_files(folder: Path, manifest: Manifest) -> Iterator[DatasetFinding]:
    """Files that a person could take for part of the dataset, and no reader would read."""
    named = {f"{room}/{entry.name}" for room, entry in _iter_entries(manifest)}
    for room in ROOMS if manifest.splits else ROOMS[:2]:
        for path in sorted((folder / room).glob("*")):
            if (name := f"{room}/{path.name}") not in named and not path.name.startswith("."):
                yield DatasetFinding(name, "", "the manifest does not name it")
