"""Stages that remove repeats within documents: paragraphs, lines or sentences, and long strings.

    segments ─ repeated_segments ─ remove_segments
    anchors ─ repeated_anchors ─ windows ─ repeated_windows ─ remove_substrings

Each returns a new state of the files, to which all earlier decisions are applied.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from llmsys.config.deduplication import DeduplicationConfig, NoDeduplication, SubstringDedupConfig
from llmsys.data_pipeline.core.journal import compute_sequence_digest
from llmsys.data_pipeline.core.task_record import FileList, TaskRecord, write_file_list
from llmsys.data_pipeline.dedup.keys import ITEM_SCHEMA, VALUE_SCHEMA
from llmsys.data_pipeline.executors.base import LazySequence
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.pipelines.dataset_state import DatasetState
from llmsys.data_pipeline.stages.cut_repeats import (
    SegmentCutter,
    TextCutter,
    cut_repeats_from_file,
    write_segment_keys,
)
from llmsys.data_pipeline.stages.find_equal_keys import (
    KeyRange,
    write_repeat_positions,
    write_repeated_keys,
)
from llmsys.data_pipeline.stages.find_substrings import (
    SubstringCutter,
    write_anchors,
    write_repeated_windows,
)


class ComparisonStages(Protocol):
    """Interface of `DeduplicationStages` that these stages use."""

    config: DeduplicationConfig
    by_characters: dict[str, bool]
    name: str
    folder: Path

    def run_stage(self, name: str, tasks: Sequence[Task], unit: str) -> Sequence[TaskRecord]:
        """Run the tasks of a stage."""

    def get_output_paths(self, records: Sequence[TaskRecord], output: int = 0) -> list[Path]:
        """Return the path of an output of each record."""

    def compare_key_ranges(
        self,
        stage: str,
        keys: int,
        inputs: Sequence[Any],
        build_job: Callable[[int, int, Path], Callable[..., Any]],
    ) -> Sequence[TaskRecord]:
        """Run one task per range of keys."""

    def build_range_factory(
        self, keys: FileList, schema: pa.Schema, state: DatasetState
    ) -> Callable[..., KeyRange]:
        """Return a function that builds the ranges of keys, without the rows that pending
        decisions drop.
        """

    def group_files(
        self,
        files: FileList,
        state: DatasetState,
        records: Sequence[TaskRecord],
        output: int,
        schema: pa.Schema,
    ) -> FileList:
        """Return the files in an output of records. Gather thousands of them by groups."""

    def group_decisions(
        self, stage: str, state: DatasetState, records: Sequence[TaskRecord]
    ) -> Sequence[TaskRecord]:
        """Gather the decisions about each group of files."""


def remove_repeated_segments(plan: ComparisonStages, state: DatasetState) -> DatasetState:
    """Remove paragraphs, lines or sentences that occur earlier.

    Args:
        plan: Runs the stages of a comparison.
        state: The documents before.

    Returns:
        The documents after.
    """
    config = plan.config.repeated_segments
    assert not isinstance(config, NoDeduplication)
    segments = _run_map_stage(
        plan,
        "segments",
        state,
        partial(write_segment_keys, config=config),
        config.model_dump(mode="json"),
    )
    places = _run_compare_stage(
        plan, "repeated_segments", state, segments, ITEM_SCHEMA, write_repeat_positions
    )
    return _run_cut_stage(plan, "remove_segments", state, places, SegmentCutter(config))


def remove_repeated_substrings(plan: ComparisonStages, state: DatasetState) -> DatasetState:
    """Remove long strings that occur earlier.

    Args:
        plan: Runs the stages of a comparison.
        state: The documents before.

    Returns:
        The documents after.
    """
    config = plan.config.substring
    assert isinstance(config, SubstringDedupConfig)
    length = config.min_characters
    anchors = _run_map_stage(plan, "anchors", state, partial(write_anchors, length=length), length)
    repeated = _run_compare_stage(
        plan, "repeated_anchors", state, anchors, VALUE_SCHEMA, write_repeated_keys
    )
    # Two passes: only windows near a repeated anchor are hashed in full.
    windows = _run_map_stage(
        plan, "windows", state, partial(write_repeated_windows, length=length), length, repeated
    )
    places = _run_compare_stage(
        plan, "repeated_windows", state, windows, ITEM_SCHEMA, write_repeat_positions
    )
    return _run_cut_stage(plan, "remove_substrings", state, places, SubstringCutter(config))


def _run_map_stage(
    plan: ComparisonStages,
    stage: str,
    state: DatasetState,
    job: Callable[..., Any],
    depends_on: Any,
    repeated: Sequence[TaskRecord] | None = None,
) -> Sequence[TaskRecord]:
    """Write a file of keys per remaining file, of `repeated` keys if they are given."""

    def build_task(number: int) -> Task:
        record = state.kept[number]
        name = state.names[number]
        decisions = state.select_decisions(number)
        output = f"work/{stage}.packs/{name}"
        file_inputs: dict[str, Any] = {
            "source": plan.get_output_paths([record])[0],
            "number": number,
            "dropped": plan.get_output_paths(decisions),
        }
        inputs = [
            record.digests[0],
            [decision.digests for decision in decisions],
            number,
            depends_on,
        ]
        if repeated is not None:
            found = state.select_records(repeated, number)
            file_inputs["repeated"] = plan.get_output_paths(found)
            inputs.append([each.digests for each in found])
        file_job = partial(job, **file_inputs, output=plan.folder / output)
        return Task(f"{stage}/{name}", inputs, [output], file_job, _count_rows(record))

    return plan.run_stage(stage, LazySequence(len(state.names), build_task), "document")


def _run_compare_stage(
    plan: ComparisonStages,
    stage: str,
    state: DatasetState,
    keys: Sequence[TaskRecord],
    schema: pa.Schema,
    job: Callable[..., Any],
) -> Sequence[TaskRecord]:
    """Compare the keys of all files. The map stage has already left out dropped rows."""
    listed = write_file_list(
        plan.folder, f"{stage}.keys", (record.outputs[0].name for record in keys)
    )
    files = plan.group_files(listed, state, keys, 0, schema)
    build_range = plan.build_range_factory(files, schema, replace(state, decisions=(), rules=()))

    def build_job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
        return partial(job, key_range=build_range(number=number, ranges=ranges), output=output)

    count = sum(record.result["keys"] for record in keys)
    digest = compute_sequence_digest(record.digests for record in keys)
    return plan.group_decisions(
        stage, state, plan.compare_key_ranges(stage, count, [digest], build_job)
    )


def _run_cut_stage(
    plan: ComparisonStages,
    stage: str,
    state: DatasetState,
    places: Sequence[TaskRecord],
    cutter: TextCutter,
) -> DatasetState:
    """Apply all pending decisions and cuts. Return the new state."""
    config = (
        plan.config.repeated_segments
        if isinstance(cutter, SegmentCutter)
        else plan.config.substring
    )
    settings = [config.model_dump(mode="json"), list(state.rules), cutter.rule]

    def build_task(number: int) -> Task:
        record = state.kept[number]
        name = state.names[number]
        decisions = state.select_decisions(number)
        cuts = state.select_records(places, number)
        outputs = [f"work/{stage}.packs/{name}", f"work/{stage}.dropped.packs/{name}"]
        job = partial(
            cut_repeats_from_file,
            source=plan.get_output_paths([record])[0],
            number=number,
            decisions=plan.get_output_paths(decisions),
            rules=list(state.rules),
            places=plan.get_output_paths(cuts),
            cutter=cutter,
            kept=plan.folder / outputs[0],
            dropped=plan.folder / outputs[1],
            kept_batches=record.result["kept_batches"],
        )
        depends_on = [[each.digests for each in records] for records in (decisions, cuts)]
        inputs = [record.digests[0], depends_on, number, settings]
        return Task(f"{stage}/{name}", inputs, outputs, job, _count_rows(record))

    records = plan.run_stage(stage, LazySequence(len(state.names), build_task), "document")
    return DatasetState(state.names, records, [*state.dropped, records])


def _count_rows(record: TaskRecord) -> int:
    return sum(rows for _, rows in record.result["kept_batches"])
