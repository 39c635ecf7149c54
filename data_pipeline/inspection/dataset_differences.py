"""Compare two datasets of the same crawl: which documents only one of them has, by the test that
dropped them from the other.

Reads documents/ and dropped/ of both dataset folders.

Invariants:
- Numbers are exact. Memory holds a part of the ids, whose size does not grow with the datasets.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from llmsys.data_pipeline.core.document_schema import count_text_bytes
from llmsys.dataset.manifest import DocumentFiles, load_manifest
from llmsys.errors import DataError
from llmsys.storage.arrow_file import read_columns, read_schema
from llmsys.storage.paths import format_folder

# Documents of both datasets whose ids are in memory at once.
PART_DOCUMENTS = 1 << 21
# The reason for documents that the other dataset has neither kept nor dropped.
NOT_READ = ("read", "", "")


@dataclass(frozen=True, order=True)
class MissedDocument:
    """A document that one dataset has and the other dropped.

    Attributes:
        id: Its id.
        url: Its address.
        reason: Why the other dropped it.
    """

    id: str
    url: str
    reason: str


@dataclass(frozen=True)
class MissedGroup:
    """Documents that one test dropped from the other dataset.

    Attributes:
        stage: Stage of the other dataset.
        rule: Its rule.
        test: The test of the rule.
        documents: Number of documents.
        bytes: UTF-8 bytes of their texts.
        examples: Those with the smallest ids.
    """

    stage: str
    rule: str
    test: str
    documents: int
    bytes: int
    examples: tuple[MissedDocument, ...]


@dataclass(frozen=True)
class DatasetSide:
    """The documents that one of two datasets has alone.

    Attributes:
        folder: The dataset.
        documents: Number of all its documents.
        groups: Documents that the other does not have, most documents first.
    """

    folder: str
    documents: int
    groups: tuple[MissedGroup, ...]

    @property
    def num_own(self) -> int:
        """Number of documents that the other does not have."""
        return sum(group.documents for group in self.groups)


@dataclass(frozen=True)
class DatasetDifferences:
    """The differences of two datasets.

    Attributes:
        both: Number of documents in both.
        changed: Number of these whose texts differ.
        sides: What the first and the second have alone.
    """

    both: int
    changed: int
    sides: tuple[DatasetSide, DatasetSide]


@dataclass
class _Group:
    documents: int = 0
    bytes: int = 0
    examples: list[MissedDocument] = field(default_factory=list)


_Reason = tuple[str, str, str]
# The size and the hash of the text of each document.
_Texts = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class _Dataset:
    """The files of a dataset."""

    folder: Path
    documents: Sequence[Path]
    dropped: Sequence[Path]
    rows: int

    def read_texts(self, part: int, parts: int) -> _Texts:
        """Return size and hash of the texts of a part of the documents."""
        found: _Texts = {}
        for batch in _iter_part(self.documents, {"id", "text"}, part, parts):
            texts = batch.column("text")
            sizes = count_text_bytes(texts).tolist()
            hashes = [xxhash.xxh3_64_intdigest((text or "").encode()) for text in texts.to_pylist()]
            ids = batch.column("id").to_pylist()
            found.update(zip(ids, zip(sizes, hashes, strict=True), strict=True))
        return found

    def find_reasons(
        self, wanted: Collection[str], part: int, parts: int
    ) -> dict[str, tuple[_Reason, str, str]]:
        """Return why documents were dropped, with their addresses."""
        found: dict[str, tuple[_Reason, str, str]] = {}
        names = ("id", "url", "stage", "rule", "test", "reason")
        for batch in _iter_part(self.dropped, set(names), part, parts):
            columns = (batch.column(name).to_pylist() for name in names)
            for name, url, stage, rule, test, reason in zip(*columns, strict=True):
                if name in wanted:
                    found[name] = ((stage or "", rule or "", test or ""), url or "", reason or "")
        return found


def compare_datasets(first: Path, second: Path, examples: int) -> DatasetDifferences:
    """Compare the documents of two datasets by their ids.

    Args:
        first: A dataset folder.
        second: Another one, of the same crawl.
        examples: Documents that are named for each reason.

    Returns:
        Numbers of documents in both, and in one of them by the reason of the other.

    Raises:
        DataError: A dataset has no documents, or no document or page is in both.
    """
    datasets = (_open_dataset(first), _open_dataset(second))
    parts = -(-sum(one.rows for one in datasets) // PART_DOCUMENTS)
    both = changed = 0
    groups: tuple[dict[_Reason, _Group], ...] = ({}, {})
    for part in range(parts):
        texts = [one.read_texts(part, parts) for one in datasets]
        shared = texts[0].keys() & texts[1].keys()
        both += len(shared)
        changed += sum(texts[0][name] != texts[1][name] for name in shared)
        for place, other in ((0, 1), (1, 0)):
            own = texts[place].keys() - shared
            reasons = datasets[other].find_reasons(own, part, parts)
            for name in own:
                reason, url, words = reasons.get(name, (NOT_READ, "", "not in its input"))
                group = groups[place].setdefault(reason, _Group())
                group.documents += 1
                group.bytes += texts[place][name][0]
                document = MissedDocument(name, url, words)
                group.examples = heapq.nsmallest(examples, [*group.examples, document])
    sides = [
        DatasetSide(format_folder(one.folder), one.rows, _sort_groups(own))
        for one, own in zip(datasets, groups, strict=True)
    ]
    if not both and all(set(own) <= {NOT_READ} for own in groups):
        raise DataError(
            f"{sides[0].folder} and {sides[1].folder} have no page in common, so nothing can be "
            "compared. Compare datasets of the same data.inputs."
        )
    return DatasetDifferences(both, changed, (sides[0], sides[1]))


def _open_dataset(folder: Path) -> _Dataset:
    manifest = load_manifest(folder)

    def list_paths(room: str, files: DocumentFiles) -> list[Path]:
        return [folder / room / file.name for file in files.files]

    documents = list_paths("documents", manifest.documents)
    if not documents or "text" not in read_schema(documents[0]).names:
        raise DataError(f"{format_folder(folder)} has no documents to compare.")
    rows = sum(file.rows for file in manifest.documents.files)
    return _Dataset(folder, documents, list_paths("dropped", manifest.dropped), rows)


def _iter_part(
    paths: Sequence[Path], wanted: set[str], part: int, parts: int
) -> Iterator[pa.RecordBatch]:
    """Yield the rows whose ids are in a part; rows without an id were no document."""
    for path in paths:
        for batch in read_columns(path, wanted.__contains__):
            chosen = [
                bool(name) and xxhash.xxh3_64_intdigest(name.encode()) % parts == part
                for name in batch.column("id").to_pylist()
            ]
            yield batch.filter(pa.array(np.array(chosen, np.bool_)))


def _sort_groups(groups: dict[_Reason, _Group]) -> tuple[MissedGroup, ...]:
    ordered = sorted(groups, key=lambda reason: (-groups[reason].documents, reason))
    return tuple(
        MissedGroup(
            *reason,
            documents=groups[reason].documents,
            bytes=groups[reason].bytes,
            examples=tuple(groups[reason].examples),
        )
        for reason in ordered
    )


def format_dataset_differences(found: DatasetDifferences) -> str:
    """Format the differences as text.

    Args:
        found: The differences.

    Returns:
        A summary, and for each dataset a table of the tests that dropped its documents from the
        other one.
    """
    first, second = found.sides
    lines = [
        f"{found.both:,} documents are in both, {found.changed:,} of them with another text; "
        f"{first.num_own:,} of {first.documents:,} are in {first.folder} only, "
        f"{second.num_own:,} of {second.documents:,} in {second.folder} only"
    ]
    for side, other in ((first, second), (second, first)):
        if not side.groups:
            continue
        lines += ["", f"in {side.folder} only; {other.folder} dropped them by"]
        titles = [_name_group(group) for group in side.groups]
        width = max(map(len, titles))
        for title, group in zip(titles, side.groups, strict=True):
            lines.append(f"  {title:<{width}} {group.documents:>10,} {group.bytes:>14,} bytes")
            lines += [
                f"    {document.url or document.id}: {document.reason}"
                for document in group.examples
            ]
    return "\n".join(lines)


def _name_group(group: MissedGroup) -> str:
    if (group.stage, group.rule, group.test) == NOT_READ:
        return "(not in its input)"
    return f"{group.rule or group.stage} ({group.test})" if group.test else group.rule
