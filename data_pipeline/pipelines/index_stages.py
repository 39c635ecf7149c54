"""Stages that write the deduplication index, with which later datasets are compared.

keep_documents (per file) ─ keep_ids ─ keep_url, keep_text, keep_near (per range) ─ name_index
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from data_pipeline.core.journal import TaskRecord
from data_pipeline.dedup.dedup_index import INDEX, INDEX_FILE, describe_index
from data_pipeline.dedup.keys import BUCKET_SCHEMA, ITEM_SCHEMA
from data_pipeline.graph.tasks import Task
from data_pipeline.pipelines.dataset_state import DatasetState, SignedFiles
from data_pipeline.pipelines.repeat_removal_stages import ComparisonStages
from data_pipeline.stages.find_equal_keys import KeyRange
from data_pipeline.stages.write_dedup_index import write_index, write_index_documents, write_index_ids, write_index_keys
from llmsys.config.deduplication import ExactKeyFilterConfig

# As many as a comparison task reads at once by default.
KEYS_PER_FILE = 2_000_000


def run_index_stages(plan: ComparisonStages, states: Sequence[tuple[DatasetState, SignedFiles]]) -> None:
    """Write the index of the documents that remain in each state."""
    path = f"{INDEX}/{INDEX_FILE}"
    rows: dict[str, int] = {}
    keys: dict[str, list[str]] = {}
    digests: dict[str, str] = {}
    for state_number, (state, signed) in enumerate(states):
        file = f"documents-{state_number}.arrow"
        kept, ids = _run_document_stages(plan, f"{INDEX}/{file}", state_number, state, signed)
        starts = np.cumsum([sum(rows.values()), *(record.result["rows"] for record in kept)]).tolist()
        rows[file], digests[file] = starts[-1] - starts[0], ids.digests[0]
        for relation in signed.relations:
            found = _run_key_stage(plan, relation, state, signed, kept, starts[:-1])
            keys[relation] = [Path(record.outputs[0].name).name for record in found]
            digests |= zip(keys[relation], (record.digests[0] for record in found), strict=True)
    content = describe_index(plan.name, rows, keys, digests, plan.config, plan.by_characters)
    # Last, so that an existing index.json names complete files.
    job = partial(write_index, content=content, output=plan.folder / path)
    plan.run_stage("name_index", [Task("name_index/all", [content], [path], job, 1)], "file")


def _run_document_stages(
    plan: ComparisonStages, output: str, state_number: int, state: DatasetState, signed: SignedFiles
) -> tuple[list[TaskRecord], TaskRecord]:
    """Write the remaining documents in crawl order. Return the records per file and the record of all ids."""
    tasks = []
    for number, (record, name) in enumerate(zip(signed.records, state.names, strict=True)):
        output_path = f"work/keep_documents_{state_number}/{name}.arrow"
        job = partial(
            write_index_documents,
            number=number,
            dropped=plan.get_output_paths(state.decisions),
            documents=plan.get_output_paths([record])[0],
            output=plan.folder / output_path,
        )
        depends_on = [record.digests[0], [decision.digests for decision in state.decisions], number]
        tasks.append(
            Task(f"keep_documents_{state_number}/{name}", depends_on, [output_path], job, record.result["rows"])
        )
    kept = plan.run_stage(f"keep_documents_{state_number}", tasks, "document")
    own = partial(write_index_ids, sources=plan.get_output_paths(kept), output=plan.folder / output)
    task = Task(f"keep_ids_{state_number}/all", [record.digests for record in kept], [output], own, len(kept))
    return kept, plan.run_stage(f"keep_ids_{state_number}", [task], "file")[0]


def _run_key_stage(
    plan: ComparisonStages,
    relation: str,
    state: DatasetState,
    signed: SignedFiles,
    kept: Sequence[TaskRecord],
    starts: Sequence[int],
) -> list[TaskRecord]:
    """Sort the keys of the remaining documents, one range per file."""
    output = 1 + list(signed.relations).index(relation)
    schema = BUCKET_SCHEMA if relation == "near" else ITEM_SCHEMA
    sources, dropped = plan.get_output_paths(signed.records, output), plan.get_output_paths(state.decisions)
    ranges = max(1, math.ceil(signed.count_keys(relation) / KEYS_PER_FILE))
    depends_on = [[record.digests[output] for record in signed.records], [record.digests for record in kept], starts]
    tasks = []
    for number in range(ranges):
        name = f"{relation}-{number:05d}-of-{ranges:05d}"
        path = f"{INDEX}/{name}.arrow"
        key_range = KeyRange(sources, schema, dropped, number, ranges, ExactKeyFilterConfig())
        job = partial(
            write_index_keys,
            key_range=key_range,
            kept=plan.get_output_paths(kept),
            starts=starts,
            output=plan.folder / path,
        )
        tasks.append(Task(f"keep_{relation}/{name}", [*depends_on, number, ranges], [path], job, 1))
    return plan.run_stage(f"keep_{relation}", tasks, "range")
