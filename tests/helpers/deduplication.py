"""Documents laid out as judged files, and what deduplication leaves of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from llmsys.config.data import CrawlConfig
from llmsys.config.executor import InlineExecutorConfig
from llmsys.data_pipeline.core.document_schema import (
    DROPPED_SCHEMA,
    add_fields_column,
    build_document_schema,
)
from llmsys.data_pipeline.core.input_fields import FIELDS
from llmsys.data_pipeline.core.task_record import TaskOutput, TaskRecord
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.pipelines.dataset_state import DatasetState
from llmsys.data_pipeline.pipelines.deduplication_stages import DeduplicationStages
from llmsys.data_pipeline.stages.collect import collect_shard
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches
from llmsys.storage.folder_lock import lock_folder

Document = dict[str, Any]


def build_document(name: str, text: str, **fields: Any) -> Document:
    """A judged document with an id and a text."""
    return {
        "id": name,
        "text": text,
        "url": f"https://x.org/{name}",
        "date": "",
        "file": "f",
        "offset": 0,
        **fields,
    }


def _apply_rules(folder: Path, rows: Sequence[Document], batch: int) -> TaskRecord:
    """Write a judged file and return the record of the task that might have written it."""
    schema = build_document_schema([])
    if any(FIELDS in row for row in rows):
        schema = add_fields_column(schema)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ArrowFileWriter(folder, schema, "zstd") as writer:
        counts = []
        for start in range(0, len(rows), batch):
            part = rows[start : start + batch]
            writer.write(pa.RecordBatch.from_pylist(part, schema))
            counts.append([0, len(part)])
    dropped = folder.with_suffix(".dropped.arrow")
    with ArrowFileWriter(dropped, DROPPED_SCHEMA, "zstd"):
        pass
    outputs = [TaskOutput(f"work/{path.name}", 0, 0, str(path)) for path in (folder, dropped)]
    result = {"kept_batches": counts, "dropped_batches": []}
    return TaskRecord.from_result("k", outputs, result)


def deduplicate_documents(
    folder: Path,
    documents: Sequence[Document],
    deduplicate: dict[str, Any],
    files: int = 1,
    batch: int = 7,
) -> tuple[list[Document], list[Document]]:
    """Return the documents that stay, and the dropped ones, when they lie in this order in so
    many files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = CrawlConfig.model_validate(
        {"name": folder.name, "folder": folder, "deduplicate": deduplicate}
    )
    records = [
        _apply_rules(folder / "work" / f"{n}.arrow", documents[n::files], batch)
        for n in range(files)
    ]
    with lock_folder(folder) as lock:
        runner = StageRunner(folder, InlineExecutorConfig(), lock)

        def stage(name: str, tasks: Sequence[Task], unit: str) -> Sequence[TaskRecord]:
            return runner.run_stage(name, tasks, unit=unit, code="")

        left = DeduplicationStages(data, runner, stage).run_comparisons(
            records, [str(number) for number in range(files)]
        )
        runner.close()
    return _collect_documents(folder, left)


def _collect_documents(folder: Path, left: DatasetState) -> tuple[list[Document], list[Document]]:
    outputs = folder / "kept.arrow", folder / "gone.arrow"
    collect_shard(
        lambda amount, dropped: None,
        shard=0,
        sources=left.write_sources(folder, 1)[0],
        decisions=[folder / record.outputs[0].name for record in left.select_decisions(0)],
        rules=left.rules,
        documents=outputs[0],
        dropped=outputs[1],
        batch_bytes=1 << 20,
    )
    kept, gone = (
        [row for batch in read_batches(path) for row in batch.to_pylist()] for path in outputs
    )
    return kept, gone
