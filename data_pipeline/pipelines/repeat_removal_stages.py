"""The stages that take repeated parts out of documents: paragraphs, lines or sentences, and long strings.

    units ─ same_units ─ take_out                      anchors ─ repeated ─ windows ─ same_windows ─ take_out_strings

Each gives a new state of the files, to which everything that was decided before is already applied.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from data_pipeline.core.journal import TaskRecord
from data_pipeline.core.task import Task
from data_pipeline.dedup.keys import ITEM_SCHEMA, VALUE_SCHEMA
from data_pipeline.pipelines.dataset_state import DatasetState
from data_pipeline.stages.cut_repeats import SegmentCutter, TextCutter, cut_repeats_from_file, write_segment_keys
from data_pipeline.stages.find_equal_keys import KeyRange, write_repeat_positions, write_repeated_keys
from data_pipeline.stages.find_substrings import SubstringCutter, write_anchors, write_repeated_windows
from llmsys.config.deduplication import DeduplicationConfig, NoDeduplication, SubstringDedupConfig

THINNING_STAGES = (
    *("units", "same_units", "take_out"),
    *("anchors", "repeated", "windows", "same_windows", "take_out_strings"),
)


class ComparisonStages(Protocol):
    """What is needed of whoever plans the comparisons."""

    config: DeduplicationConfig
    by_characters: dict[str, bool]
    name: str
    folder: Path

    def run_stage(self, name: str, tasks: list[Task], unit: str) -> list[TaskRecord]:
        """Do the tasks of a stage."""

    def get_output_paths(self, records: Sequence[TaskRecord], output: int = 0) -> list[Path]:
        """Where an output of each record lies."""

    def compare_key_ranges(
        self, stage: str, keys: int, inputs: Sequence[Any], job_of: Callable[[int, int, Path], Callable[..., Any]]
    ) -> list[TaskRecord]:
        """Compare keys, one range of them per task."""

    def build_range_factory(
        self, records: Sequence[TaskRecord], output: int, schema: pa.Schema, dropped: Sequence[TaskRecord]
    ) -> Callable[..., KeyRange]:
        """Return what makes the ranges of the keys in an output of records."""


def remove_repeated_segments(plan: ComparisonStages, left: DatasetState) -> DatasetState:
    """Take out paragraphs, lines or sentences that occur earlier."""
    config = plan.config.repeated_segments
    assert not isinstance(config, NoDeduplication)
    units = _run_map_stage(
        plan, "units", left, partial(write_segment_keys, config=config), config.model_dump(mode="json")
    )
    places = _run_compare_stage(plan, "same_units", left, units, ITEM_SCHEMA, write_repeat_positions)
    return _run_cut_stage(plan, "take_out", left, places, SegmentCutter(config))


def remove_repeated_substrings(plan: ComparisonStages, left: DatasetState) -> DatasetState:
    """Take out long strings that occur earlier."""
    config = plan.config.substring
    assert isinstance(config, SubstringDedupConfig)
    length = config.min_characters
    anchors = _run_map_stage(plan, "anchors", left, partial(write_anchors, length=length), length)
    repeated = _run_compare_stage(plan, "repeated", left, anchors, VALUE_SCHEMA, write_repeated_keys)
    decides = [length, [record.digests for record in repeated]]
    job = partial(write_repeated_windows, length=length, repeated=plan.get_output_paths(repeated))
    windows = _run_map_stage(plan, "windows", left, job, decides)
    places = _run_compare_stage(plan, "same_windows", left, windows, ITEM_SCHEMA, write_repeat_positions)
    return _run_cut_stage(plan, "take_out_strings", left, places, SubstringCutter(config))


def _run_map_stage(
    plan: ComparisonStages, stage: str, left: DatasetState, job: Callable[..., Any], decides: Any
) -> list[TaskRecord]:
    """Write a file of keys for each file that is left."""
    tasks = []
    for number, (record, name) in enumerate(zip(left.kept, left.names, strict=True)):
        output = f"work/{stage}/{name}.arrow"
        where = {
            "source": plan.get_output_paths([record])[0],
            "number": number,
            "dropped": plan.get_output_paths(left.decisions),
        }
        own = partial(job, **where, output=plan.folder / output)
        inputs = [record.digests[0], [decision.digests for decision in left.decisions], number, decides]
        tasks.append(Task(f"{stage}/{name}", inputs, [output], own, _count_rows(record)))
    return plan.run_stage(stage, tasks, "document")


def _run_compare_stage(
    plan: ComparisonStages,
    stage: str,
    left: DatasetState,
    keys: Sequence[TaskRecord],
    schema: pa.Schema,
    job: Callable[..., Any],
) -> list[TaskRecord]:
    """Compare the keys of all files; the map before has left dropped rows out already."""
    make = plan.build_range_factory(keys, 0, schema, [])

    def build_job(number: int, ranges: int, output: Path) -> Callable[..., Any]:
        return partial(job, part=make(number=number, ranges=ranges), output=output)

    count = sum(record.result["keys"] for record in keys)
    return plan.compare_key_ranges(stage, count, [[record.digests for record in keys]], build_job)


def _run_cut_stage(
    plan: ComparisonStages, stage: str, left: DatasetState, places: Sequence[TaskRecord], edit: TextCutter
) -> DatasetState:
    """Apply every decision and every cut, and return the files as they are then."""
    config = plan.config.repeated_segments if isinstance(edit, SegmentCutter) else plan.config.substring
    part = [config.model_dump(mode="json"), list(left.rules), edit.rule]
    decided = [[record.digests for record in records] for records in (left.decisions, places)]
    tasks = []
    for number, (record, name) in enumerate(zip(left.kept, left.names, strict=True)):
        outputs = [f"work/{stage}/{name}.arrow", f"work/{stage}/{name}.dropped.arrow"]
        job = partial(
            cut_repeats_from_file,
            source=plan.get_output_paths([record])[0],
            number=number,
            decisions=plan.get_output_paths(left.decisions),
            rules=list(left.rules),
            places=plan.get_output_paths(places),
            edit=edit,
            kept=plan.folder / outputs[0],
            dropped=plan.folder / outputs[1],
            kept_batches=record.result["kept_batches"],
        )
        tasks.append(
            Task(f"{stage}/{name}", [record.digests[0], decided, number, part], outputs, job, _count_rows(record))
        )
    records = plan.run_stage(stage, tasks, "document")
    return DatasetState(left.names, records, [*left.dropped, records])


def _count_rows(record: TaskRecord) -> int:
    return sum(rows for _, rows in record.result["kept_batches"])
