"""Stages that write the deduplication index, with which later datasets are compared.

index_documents (per file) ─ index_ids ─ index_url, index_exact, index_minhash (per range) ─ index
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa

from llmsys.config.deduplication import ExactKeyFilterConfig
from llmsys.data_pipeline.core.journal import compute_sequence_digest
from llmsys.data_pipeline.core.task_record import (
    LIST_FOLDER,
    FileRows,
    TaskRecord,
    write_file_list,
    write_rows,
)
from llmsys.data_pipeline.dedup.dedup_index import INDEX, INDEX_FILE, describe_index
from llmsys.data_pipeline.dedup.keys import BUCKET_SCHEMA, ITEM_SCHEMA
from llmsys.data_pipeline.executors.base import LazySequence
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.pipelines.dataset_state import DatasetState, SignedFiles
from llmsys.data_pipeline.pipelines.repeat_removal_stages import ComparisonStages
from llmsys.data_pipeline.stages.write_dedup_index import (
    write_index,
    write_index_documents,
    write_index_ids,
    write_index_keys,
)

# As many as a comparison task reads at once by default.
KEYS_PER_FILE = 2_000_000


def run_index_stages(
    plan: ComparisonStages, states: Sequence[tuple[DatasetState, SignedFiles]]
) -> None:
    """Write the index by which later datasets find the documents that remain in each state.

    Documents are numbered over all states. `index.json` is written last, so that one that exists
    names complete files.

    Args:
        plan: Runs the stages of a comparison.
        states: Each state of the documents with its signed files.
    """
    path = f"{INDEX}/{INDEX_FILE}"
    rows: dict[str, int] = {}
    keys: dict[str, list[str]] = {}
    digests: dict[str, str] = {}
    for state_number, (state, signed) in enumerate(states):
        file = f"documents-{state_number}.arrow"
        kept, ids = _run_document_stages(plan, f"{INDEX}/{file}", state_number, state, signed)
        first = sum(rows.values())
        counts = write_rows(
            plan.folder / LIST_FOLDER / f"index_documents_{state_number}.rows.arrow",
            pa.schema([("rows", pa.int64())]),
            ({"rows": record.result["rows"]} for record in kept),
        )
        rows[file] = int(counts.read_numbers("rows").sum())
        digests[file] = ids.digests[0]
        for relation in signed.relations:
            found = _run_key_stage(plan, relation, state, signed, kept, counts, first)
            keys[relation] = [Path(record.outputs[0].name).name for record in found]
            digests |= zip(keys[relation], (record.digests[0] for record in found), strict=True)
    content = describe_index(plan.name, rows, keys, digests, plan.config, plan.by_characters)
    # Last, so that an existing index.json names complete files.
    job = partial(write_index, content=content, output=plan.folder / path)
    plan.run_stage("index", [Task("index/all", [content], [path], job, 1)], "file")


def _run_document_stages(
    plan: ComparisonStages, output: str, state_number: int, state: DatasetState, signed: SignedFiles
) -> tuple[Sequence[TaskRecord], TaskRecord]:
    """Write the remaining documents in crawl order. Return the records per file and the record
    of all ids.
    """
    stage = f"index_documents_{state_number}"

    def build_task(number: int) -> Task:
        record = signed.records[number]
        name = state.names[number]
        decisions = state.select_decisions(number)
        output_path = f"work/{stage}.packs/{name}"
        job = partial(
            write_index_documents,
            number=number,
            dropped=plan.get_output_paths(decisions),
            documents=plan.get_output_paths([record])[0],
            output=plan.folder / output_path,
        )
        depends_on = [record.digests[0], [decision.digests for decision in decisions], number]
        return Task(f"{stage}/{name}", depends_on, [output_path], job, record.result["rows"])

    kept = plan.run_stage(stage, LazySequence(len(state.names), build_task), "document")
    sources = write_file_list(plan.folder, stage, (record.outputs[0].name for record in kept))
    own = partial(write_index_ids, sources=sources, output=plan.folder / output)
    digest = compute_sequence_digest(record.digests for record in kept)
    task = Task(f"index_ids_{state_number}/all", [digest], [output], own, len(kept))
    return kept, plan.run_stage(f"index_ids_{state_number}", [task], "file")[0]


def _run_key_stage(
    plan: ComparisonStages,
    relation: str,
    state: DatasetState,
    signed: SignedFiles,
    kept: Sequence[TaskRecord],
    counts: FileRows,
    first: int,
) -> Sequence[TaskRecord]:
    """Sort the keys of the remaining documents, one range per file."""
    output = 1 + list(signed.relations).index(relation)
    schema = BUCKET_SCHEMA if relation == "minhash" else ITEM_SCHEMA
    build_range = plan.build_range_factory(signed.keys[relation], schema, state)
    files = write_file_list(
        plan.folder, f"index_{relation}", (record.outputs[0].name for record in kept)
    )
    ranges = max(1, math.ceil(signed.num_keys[relation] / KEYS_PER_FILE))
    depends_on = [
        compute_sequence_digest(record.digests[output] for record in signed.records),
        compute_sequence_digest(record.digests for record in kept),
        first,
    ]

    def build_task(number: int) -> Task:
        name = f"{relation}-{number:05d}-of-{ranges:05d}"
        path = f"{INDEX}/{name}.arrow"
        job = partial(
            write_index_keys,
            key_range=replace(
                build_range(number=number, ranges=ranges), config=ExactKeyFilterConfig()
            ),
            kept=files,
            counts=counts,
            first=first,
            output=plan.folder / path,
        )
        return Task(f"index_{relation}/{name}", [*depends_on, number, ranges], [path], job, 1)

    return plan.run_stage(f"index_{relation}", LazySequence(ranges, build_task), "range")
