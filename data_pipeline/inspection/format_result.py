"""Format the result of an inspection for people and for programs."""

from dataclasses import asdict
from typing import Any

from llmsys.data_pipeline.inspection.token_samples import DocumentSample
from llmsys.data_pipeline.inspection.verify_dataset import InspectionResult
from llmsys.data_pipeline.inspection.verify_files import format_findings
from llmsys.dataset.manifest import LanguageUsage, TokenizerUsage

SHOWN_SAMPLES, EXCERPT = 3, 160


def build_inspection_dict(inspection: InspectionResult) -> dict[str, Any]:
    """Convert the result of an inspection to JSON-serializable values.

    Args:
        inspection: the result.

    Returns:
        A dictionary with all counts, samples and findings.
    """
    manifest = inspection.manifest
    return {
        "folder": str(inspection.folder),
        "fingerprint": manifest.fingerprint,
        "whole": not inspection.findings,
        "files": inspection.files,
        "bytes": inspection.bytes,
        "splits": {
            name: {"documents": split.documents, "tokens": split.tokens, "bytes": split.bytes}
            for name, split in manifest.splits.items()
        },
        "documents": sum(file.rows for file in manifest.documents.files),
        "dropped": sum(file.rows for file in manifest.dropped.files),
        "usage": None if manifest.usage is None else manifest.usage.model_dump(),
        "samples": [asdict(sample) for sample in inspection.samples],
        "findings": [asdict(finding) for finding in inspection.findings],
    }


def format_inspection(inspection: InspectionResult) -> str:
    """Format the result of an inspection for the terminal.

    Args:
        inspection: the result.

    Returns:
        Lines with counts, the tokenizer's fit, some samples, and the findings.
    """
    manifest = inspection.manifest
    lines = [
        f"{inspection.folder}: {inspection.files} files, {inspection.bytes:,} bytes read and hashed"
    ]
    for name, split in manifest.splits.items():
        lines.append(
            f"  {name:<10} {split.documents:>12,} documents {split.tokens:>15,} tokens in "
            f"{split.num_files}"
        )
    for subfolder, listing in (("documents", manifest.documents), ("dropped", manifest.dropped)):
        lines.append(
            f"  {subfolder:<10} {sum(file.rows for file in listing.files):>12,} in "
            f"{len(listing.files)} files"
        )
    if manifest.usage is not None:
        lines += ["", *format_tokenizer_usage(manifest.usage)]
    if inspection.samples:
        lines += ["", *_format_samples(inspection.samples)]
    if inspection.findings:
        lines += [
            "",
            format_findings(inspection.findings),
            "",
            _format_next_step(len(inspection.findings)),
        ]
    else:
        lines += ["", f"everything matches the manifest (fingerprint {manifest.fingerprint})"]
    return "\n".join(lines)


def _format_samples(samples: list[DocumentSample]) -> list[str]:
    same = sum(sample.same_text for sample in samples)
    others = ""
    if same < len(samples):
        why = "the tokenizer normalizes text, or decodes U+2581 as a space"
        others = f", {len(samples) - same} another ({why})"
    head = (
        f"{len(samples)} documents encoded again with equal ids, and decoded; {same} decode to "
        "their text"
    )
    lines = [f"{head}{others}:"]
    for sample in samples[:SHOWN_SAMPLES]:
        origin = f"{sample.file} at {sample.offset}"
        lines.append(f"  {sample.split} {sample.document}: {sample.url or sample.id} ({origin})")
        lines.append(f"    {' '.join(sample.text[:EXCERPT].split())}")
    return lines


def format_tokenizer_usage(usage: TokenizerUsage) -> list[str]:
    """Format the tokenizer's fit by language as a table."""
    head = f"{'language':<10}{'documents':>11}{'bytes':>15}{'bytes/token':>13}{'words/token':>13}"
    rows = [_format_usage_row(name, language) for name, language in usage.languages.items()]
    return [
        f"{head}{'unknown':>10}{'as bytes':>10}",
        *rows,
        f"{usage.dead_pieces:,} of {usage.pieces:,} pieces occur in no document; "
        f"{usage.checked_documents:,} documents were also encoded by the library, with equal ids",
        *(
            [f"every document was encoded by the tokenizer's library: {usage.by_library}"]
            if usage.by_library
            else []
        ),
    ]


def _format_usage_row(name: str, usage: LanguageUsage) -> str:
    tokens = max(usage.tokens, 1)
    return (
        f"{name or '(none)':<10}{usage.documents:>11,}{usage.bytes:>15,}"
        f"{usage.bytes / tokens:>13.2f}{usage.words / tokens:>13.2f}"
        f"{usage.unknown_tokens / tokens:>10.2%}{usage.byte_tokens / tokens:>10.2%}"
    )


def _format_next_step(count: int) -> str:
    things = "1 thing is" if count == 1 else f"{count} things are"
    return (
        f"{things} wrong. Delete the files named, and run llmsys prepare CONFIG, which makes only "
        "missing files."
    )
