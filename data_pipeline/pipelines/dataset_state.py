"""State of a dataset's files between filtering and collecting: remaining documents, drops and
pending decisions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from llmsys.config.cleaning import NoPiiReplacement
from llmsys.config.data import CrawlConfig
from llmsys.config.decontamination import NoDecontamination
from llmsys.data_pipeline.core.journal import (
    SequenceDigest,
    compute_json_digest,
    compute_sequence_digest,
)
from llmsys.data_pipeline.core.task_record import LIST_FOLDER, FileList, TaskRecord, write_rows
from llmsys.data_pipeline.dedup import keys
from llmsys.data_pipeline.dedup.dedup_index import DocumentFiles
from llmsys.data_pipeline.stages.collect import SOURCE_SCHEMA, SourceList, build_source_row


@dataclass(frozen=True)
class DatasetState:
    """Documents that remain of the filtered files.

    Attributes:
        names: Names of the files.
        kept: Per file, the record of the last stage that wrote its documents, as first output.
        dropped: Per stage, one record per file, whose second output holds dropped documents.
        decisions: Per rule, the records whose first output lists rows of `kept` to drop: one per
            group of files if `is_grouped`. They are not applied yet.
        rules: Rules of these decisions, in order.
    """

    names: Sequence[str]
    kept: Sequence[TaskRecord]
    dropped: Sequence[Sequence[TaskRecord]]
    decisions: Sequence[Sequence[TaskRecord]] = ()
    rules: Sequence[str] = ()

    def add_decisions(self, rule: str, records: Sequence[TaskRecord]) -> "DatasetState":
        """Return this state with more decisions."""
        return replace(self, decisions=[*self.decisions, records], rules=[*self.rules, rule])

    def add_unread(self, read: Sequence[TaskRecord]) -> "DatasetState":
        """Return this state with the unreadable places, which come before all other drops."""
        return replace(self, dropped=[read, *self.dropped])

    @property
    def rewritten_records(self) -> Sequence[Sequence[TaskRecord]]:
        """Records of stages that rewrote files. Their results count what they dropped."""
        return self.dropped[1:]

    @cached_property
    def digest(self) -> str:
        """A digest of all files, for the key of a task that reads them."""
        kept = SequenceDigest()
        dropped = [SequenceDigest() for _ in self.dropped]
        # At once: filtered files are among both, and reading a record costs more than hashing it.
        for record, *gone in self._iter_records():
            kept.add(record.digests[0])
            for digest, each in zip(dropped, gone, strict=True):
                digest.add(each.digests[1])
        decided = [
            compute_sequence_digest(record.digests[0] for record in records)
            for records in self.decisions
        ]
        return compute_json_digest(
            kept.compute(), *decided, *(digest.compute() for digest in dropped), list(self.rules)
        )

    @property
    def is_grouped(self) -> bool:
        """Files are so many that keys, decisions and documents are gathered by groups of them."""
        return len(self.names) > keys.FILES_PER_GROUP

    def select_decisions(self, number: int) -> list[TaskRecord]:
        """Return the records of the pending decisions about one file."""
        return [
            record for records in self.decisions for record in self.select_records(records, number)
        ]

    def select_records(self, records: Sequence[TaskRecord], number: int) -> Sequence[TaskRecord]:
        """Return those records of a comparison that are about one file: that of its group, or
        all of them.
        """
        return (
            [records[number // keys.compute_group_size(len(self.names))]]
            if self.is_grouped
            else records
        )

    def write_sources(self, folder: Path, shards: int) -> tuple[SourceList, list[int]]:
        """Write the list of the inputs of collecting. Return it, and the number of documents of
        each document file.
        """
        rows = [0] * shards
        path = folder / LIST_FOLDER / "sources.arrow"
        listed = write_rows(path, SOURCE_SCHEMA, self._iter_sources(rows))
        return SourceList(folder, listed), rows

    def _iter_sources(self, rows: list[int]) -> Iterator[dict[str, Any]]:
        """Yield the inputs of collecting, and add their documents to `rows` by document file."""
        for record, *gone in self._iter_records():
            result = record.result
            for owner, count in result["kept_batches"]:
                rows[owner] += count
            yield build_source_row(
                record.outputs[0].name,
                result["kept_batches"],
                [
                    (
                        each.outputs[1].name,
                        (result if each is record else each.result)["dropped_batches"],
                    )
                    for each in gone
                ],
            )

    def _iter_records(self) -> Iterator[list[TaskRecord]]:
        """Yield the records of each file: of `kept`, then of every stage of `dropped`. A list that
        is among both is read once.
        """
        others = [records for records in self.dropped if records is not self.kept]
        for record, *gone in zip(self.kept, *others, strict=True):
            rest = iter(gone)
            yield [
                record,
                *(record if records is self.kept else next(rest) for records in self.dropped),
            ]


@dataclass(frozen=True)
class SignedFiles:
    """Files of documents and keys of one state, and the relations they have keys for.

    Attributes:
        records: Records of signing, one per file.
        relations: The relations, in the order of the outputs after the first.
        documents: The documents of all files.
        keys: Files of keys by relation, one per file or per group of files.
        num_keys: Number of keys by relation.
        digests: Digest of the documents and keys of all files by relation.
    """

    records: Sequence[TaskRecord]
    relations: Sequence[str]
    documents: DocumentFiles
    keys: Mapping[str, FileList]
    num_keys: Mapping[str, int]
    digests: Mapping[str, str]


def has_cleaning(data: CrawlConfig) -> bool:
    """Return whether the config removes anything from collected documents."""
    return not isinstance(data.decontaminate, NoDecontamination) or not isinstance(
        data.pii, NoPiiReplacement
    )


def get_collected_names(data: CrawlConfig, shard: int) -> list[str]:
    """Return the output names of collecting a shard: documents and dropped documents."""
    name = f"part-{shard:05d}"
    if has_cleaning(data):
        return [f"work/collected/{name}.arrow", f"work/collected/{name}.dropped.arrow"]
    return [f"documents/{name}.arrow", f"dropped/{name}.arrow"]
