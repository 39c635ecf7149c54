"""The state of a dataset's files between judging and collecting: what is left, what was dropped, what is depends_on.

Reads journal records, gives what the next stage reads and depends on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.core.journal import TaskRecord
from data_pipeline.stages.collect import ShardSource
from llmsys.config.data import CrawlConfig
from llmsys.config.decontamination import NoDecontamination
from llmsys.config.pii import NoPiiReplacement


@dataclass(frozen=True)
class DatasetState:
    """What is left of the judged files.

    Attributes:
        names: of the files.
        kept: per file the record of whatever wrote its documents last; its first output holds them.
        dropped: records, one per file and stage, whose second output holds dropped documents.
        decisions: records whose first output says what is to be dropped of `kept` and is not yet.
        rules: the rules of these decisions, in their order.
    """

    names: Sequence[str]
    kept: Sequence[TaskRecord]
    dropped: Sequence[Sequence[TaskRecord]]
    decisions: Sequence[TaskRecord] = ()
    rules: Sequence[str] = ()

    def add_decisions(self, rule: str, records: Sequence[TaskRecord]) -> "DatasetState":
        """Return the same with more decisions."""
        return replace(self, decisions=[*self.decisions, *records], rules=[*self.rules, rule])

    def add_unread(self, read: Sequence[TaskRecord]) -> "DatasetState":
        """Return the same with what reading dropped before anything else did."""
        return replace(self, dropped=[read, *self.dropped])

    @property
    def rewritten_records(self) -> list[TaskRecord]:
        """The records of stages that rewrote files, whose results count what they dropped."""
        return [record for records in self.dropped[1:] for record in records]

    @property
    def digests(self) -> list[Any]:
        """What a task that reads all of it depends on."""
        files = [[record.digests[0] for record in self.kept], [record.digests for record in self.decisions]]
        return [files, [[record.digests[1] for record in records] for records in self.dropped]]

    def list_sources(self, folder: Path) -> list[ShardSource]:
        """Return what collecting reads."""
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
    """Files of documents and keys of one state, and what was signed."""

    records: Sequence[TaskRecord]
    relations: Sequence[str]

    def count_keys(self, relation: str) -> int:
        """Number of keys of a relation."""
        return sum(record.result["keys"][relation] for record in self.records)


def has_cleaning(data: CrawlConfig) -> bool:
    """Whether something is taken out of collected documents."""
    return not isinstance(data.decontaminate, NoDecontamination) or not isinstance(data.pii, NoPiiReplacement)


def get_collected_names(data: CrawlConfig, shard: int) -> list[str]:
    """Return where the collected documents of a shard lie, and the dropped ones."""
    name = f"part-{shard:05d}"
    if has_cleaning(data):
        return [f"work/collected/{name}.arrow", f"work/collected/{name}.dropped.arrow"]
    return [f"documents/{name}.arrow", f"dropped/{name}.arrow"]
