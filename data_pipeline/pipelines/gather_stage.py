"""The stage before collecting where there are thousands of input blocks: it gathers them by
groups.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.core.journal import compute_json_digest, compute_sequence_digest
from llmsys.data_pipeline.core.task_record import LIST_FOLDER, ItemRange, TaskRecord, write_rows
from llmsys.data_pipeline.dedup.keys import FILES_PER_GROUP
from llmsys.data_pipeline.executors.base import LazySequence
from llmsys.data_pipeline.graph.tasks import Stage, Task
from llmsys.data_pipeline.pipelines.dataset_state import DatasetState
from llmsys.data_pipeline.stages.collect import (
    SOURCE_SCHEMA,
    SourceList,
    build_source_row,
    gather_sources,
)


def run_gather_stage(
    data: CrawlConfig,
    stage: Stage,
    state: DatasetState,
    sources: SourceList,
    keeps_fields: bool,
) -> tuple[SourceList, Sequence[TaskRecord]]:
    """Gather the documents of each group of input blocks by document file, without duplicates.

    Args:
        data: The crawl section of a run.
        stage: Runs the tasks of one stage.
        state: The remaining documents and the pending decisions.
        sources: The input blocks.
        keeps_fields: Whether some block may have further fields.

    Returns:
        The sources of collecting, one per group, and the records, whose results count what was
        dropped.
    """
    folder = data.folder
    num_files = len(state.dropped) + 1
    settings = [data.documents.num_shards, data.documents.batch_bytes, list(state.rules)]
    # Not in the keys of crawls, which have no further fields.
    settings += ["fields"] if keeps_fields else []

    digests = []
    for first in range(0, len(sources), FILES_PER_GROUP):
        last = first + FILES_PER_GROUP
        files = [state.kept[first:last], *(records[first:last] for records in state.dropped)]
        digests.append(
            compute_json_digest(
                *(compute_sequence_digest(record.digests for record in each) for each in files)
            )
        )

    def build_task(group: int) -> Task:
        first = group * FILES_PER_GROUP
        last = min(first + FILES_PER_GROUP, len(sources))
        outputs = [
            f"work/gather.{name}.packs/{group:05d}"
            for name in ("kept", *map(str, range(num_files)))
        ]
        decisions = state.select_decisions(first)
        job = partial(
            gather_sources,
            sources=ItemRange(sources, first, last),
            first=first,
            decisions=[folder / record.outputs[0].name for record in decisions],
            rules=state.rules,
            kept=folder / outputs[0],
            dropped=[folder / name for name in outputs[1:]],
            shards=data.documents.num_shards,
            batch_bytes=data.documents.batch_bytes,
            keeps_fields=keeps_fields,
        )
        depends_on = [
            digests[group],
            [record.digests for record in decisions],
            settings,
        ]
        return Task(f"gather/{group:05d}", depends_on, outputs, job, last - first)

    records = stage("gather", LazySequence(len(digests), build_task), "file")
    return SourceList(
        folder,
        write_rows(folder / LIST_FOLDER / "gathered.arrow", SOURCE_SCHEMA, _iter_rows(records)),
    ), records


def _iter_rows(records: Sequence[TaskRecord]) -> Iterator[dict[str, Any]]:
    for record in records:
        kept, *dropped = [output.name for output in record.outputs]
        result = record.result
        yield build_source_row(
            kept, result["kept_batches"], list(zip(dropped, result["dropped_batches"], strict=True))
        )
