"""State of a dataset's files between filtering and collecting: remaining documents, drops and pending decisions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.core.journal import TaskRecord
from data_pipeline.stages.collect import ShardSource
from llmsys.config.cleaning import NoPiiReplacement
from llmsys.config.data import CrawlConfig
from llmsys.config.decontamination import NoDecontamination


@dataclass(frozen=True)
class DatasetState:
    """Documents that remain of the filtered files.

    Attributes:
        names: Names of the files.
        kept: Per file, the record of the last stage that wrote its documents, as first output.
        dropped: Per stage, one record per file, whose second output holds dropped documents.
        decisions: Records whose first output lists rows of `kept` to drop. They are not applied yet.
        rules: Rules of these decisions, in order.
    """

    names: Sequence[str]
    kept: Sequence[TaskRecord]
    dropped: Sequence[Sequence[TaskRecord]]
    decisions: Sequence[TaskRecord] = ()
    rules: Sequence[str] = ()

    def add_decisions(self, rule: str, records: Sequence[TaskRecord]) -> "DatasetState":
        """Return this state with more decisions."""
        return replace(self, decisions=[*self.decisions, *records], rules=[*self.rules, rule])

    def add_unread(self, read: Sequence[TaskRecord]) -> "DatasetState":
        """Return this state with the unreadable places, which come before all other drops."""
        return replace(self, dropped=[read, *self.dropped])

    @property
    def rewritten_records(self) -> list[TaskRecord]:
        """Records of stages that rewrote files. Their results count what they dropped."""
        return [record for records in self.dropped[1:] for record in records]

    @property
    def digests(self) -> list[Any]:
        """Digests for the key of a task that reads all files."""
        files = [[record.digests[0] for record in self.kept], [record.digests for record in self.decisions]]
        return [files, [[record.digests[1] for record in records] for records in self.dropped]]

    def list_sources(self, folder: Path) -> list[ShardSource]:
        """Return the inputs of collecting."""
        return [
            ShardSource(
                kept=folder / record.outputs[0].name,
                kept_batches=record.result["kept_batches"],
                dropped=[(folder / gone.outputs[1].name, gone.result["dropped_batches"]) for gone in records],
            )
            for record, records in zip(self.kept, zip(*self.dropped, strict=True), strict=True)
        ]


@dataclass(frozen=True)
class SignedFiles:
    """Files of documents and keys of one state, and the relations they have keys for."""

    records: Sequence[TaskRecord]
    relations: Sequence[str]

    def count_keys(self, relation: str) -> int:
        """Return the number of keys of a relation."""
        return sum(record.result["keys"][relation] for record in self.records)


def has_cleaning(data: CrawlConfig) -> bool:
    """Return whether the config removes anything from collected documents."""
    return not isinstance(data.decontaminate, NoDecontamination) or not isinstance(data.pii, NoPiiReplacement)


def get_collected_names(data: CrawlConfig, shard: int) -> list[str]:
    """Return the output names of collecting a shard: documents and dropped documents."""
    name = f"part-{shard:05d}"
    if has_cleaning(data):
        return [f"work/collected/{name}.arrow", f"work/collected/{name}.dropped.arrow"]
    return [f"documents/{name}.arrow", f"dropped/{name}.arrow"]
