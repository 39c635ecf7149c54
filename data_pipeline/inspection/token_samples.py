"""Compare the tokens of sampled documents with their texts and lineage.

Reads documents/ and tokens/. The sample is the documents with the smallest hashes of their ids, so
it is the same for everybody. The two sides of a pair are compared with the two token files.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmsys.data_pipeline.core.document_schema import hash_positions
from llmsys.data_pipeline.inspection.verify_files import DatasetFinding
from llmsys.dataset.manifest import Manifest
from llmsys.dataset.token_shards import TokenShards, open_tokens, read_batches
from llmsys.vocabulary.tokenizer import Tokenizer

Row = dict[str, Any]


@dataclass(frozen=True)
class DocumentSample:
    """One sampled document: its index among the tokens, its lineage, and its decoded text.

    Attributes:
        same_text: whether the decoded text equals the document's. A tokenizer that normalizes text
            returns another one.
    """

    split: str
    document: int
    tokens: int
    id: str
    file: str
    offset: int
    url: str
    text: str
    same_text: bool


def verify_samples(
    folder: Path, manifest: Manifest, tokenizer: Tokenizer, count: int
) -> tuple[list[DocumentSample], list[DatasetFinding]]:
    """Encode and decode a sample of documents and compare them with their tokens and texts.

    Args:
        folder: The dataset folder.
        manifest: Its manifest.
        tokenizer: Its tokenizer.
        count: Documents in the sample.

    Returns:
        The sample, and a finding for each document whose ids differ.
    """
    rows: dict[str, Row] = {row["id"]: row for row in _read_sample_rows(folder, manifest, count)}
    samples: list[DocumentSample] = []
    findings: list[DatasetFinding] = []
    found: set[str] = set()
    for split in manifest.splits:
        if not manifest.splits[split].documents:
            continue
        shards = open_tokens(folder, split)
        for number in _find_document_indices(shards, list(rows)):
            row = rows[str(shards.get_lineage(number)["id"])]
            found.add(row["id"])
            tokens = shards.get_tokens(number).tolist()
            samples.append(
                _build_sample(
                    shards,
                    split,
                    number,
                    row,
                    _decode_tokens(tokens, split, tokenizer, manifest.labels),
                )
            )
            problems = _compare_sample(
                tokens[:-1], samples[-1], row, tokenizer, bool(manifest.labels)
            )
            findings += [
                DatasetFinding(f"tokens ({name})", f"document {row['id']}", problem)
                for name, problem in problems
            ]
    # of pairs, long ones may be left out
    if not manifest.labels and "train_source" not in manifest.splits:
        findings += [
            DatasetFinding("tokens", f"document {name}", "it is in documents/ but in no token file")
            for name in rows
            if name not in found
        ]
    return samples, findings


def _read_sample_rows(folder: Path, manifest: Manifest, count: int) -> list[Row]:
    """Return the rows of the documents with the smallest hashes, without reading the texts of
    the others.
    """
    smallest: list[tuple[int, str, int, int]] = []
    for entry in manifest.documents.files:
        for index, batch in enumerate(read_batches(folder / "documents" / entry.name)):
            hashes = hash_positions(batch.column("id").to_pylist(), "inspect", 0).tolist()
            here = [(key, entry.name, index, row) for row, key in enumerate(hashes)]
            smallest = heapq.nsmallest(count, [*smallest, *here])
    rows = []
    for _, name, index, row in smallest:
        batch = next(read_batches(folder / "documents" / name, [index]))
        rows += batch.slice(row, 1).to_pylist()
    return rows


def _find_document_indices(shards: TokenShards, ids: Sequence[str]) -> list[int]:
    return shards.select_documents("id", *ids) if ids else []


def _decode_tokens(
    tokens: list[int], split: str, tokenizer: Tokenizer, labels: Sequence[str]
) -> str:
    """Return the text of tokens; the target of a labelled text is its label."""
    if labels and not split.endswith("_source"):
        return labels[tokens[0]]
    return tokenizer.decode(tokens)


def _build_sample(
    shards: TokenShards, split: str, number: int, row: Row, text: str
) -> DocumentSample:
    lineage = shards.get_lineage(number)
    tokens = shards.get_tokens(number)
    return DocumentSample(
        split=split,
        document=number,
        tokens=len(tokens),
        id=str(lineage["id"]),
        file=str(lineage["file"]),
        offset=int(lineage["offset"]),
        url=str(row.get("url") or ""),
        text=text,
        same_text=text == _get_expected_text(row, split),
    )


def _compare_sample(
    tokens: list[int], sample: DocumentSample, row: Row, tokenizer: Tokenizer, labelled: bool
) -> Iterator[tuple[str, str]]:
    """Yield (split, problem) where the tokens of a document do not match its text, or its
    lineage is wrong.
    """
    source = sample.split.endswith("_source")
    expected = tokenizer.encode(_get_expected_text(row, sample.split))
    if source:  # the source of a pair may have been cut at its limit
        expected = expected[: len(tokens)]
    if tokens != expected and not (labelled and not source):  # the target of a label is its number
        index = next(
            (at for at, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b),
            len(tokens),
        )
        yield sample.split, f"from token {index:,} on its ids differ from the encoding of its text"
    place_of_row = row["file"], row["offset"] if "offset" in row else row["line"]
    if (sample.file, sample.offset) != place_of_row:
        theirs = " at ".join(map(str, place_of_row))
        yield (
            sample.split,
            f"its lineage is {sample.file} at {sample.offset}, but that of its document is "
            f"{theirs}",
        )


def _get_expected_text(row: Row, split: str) -> str:
    column = "text" if "text" in row else "source" if split.endswith("_source") else "target"
    return str(row[column])
