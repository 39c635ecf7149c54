"""The stages that take repeated parts out of documents: paragraphs, lines or sentences, and long strings.

    units ─ same_units ─ take_out                      anchors ─ repeated ─ windows ─ same_windows ─ take_out_strings

Each gives a new state of the files, to which everything that was decided before is already applied.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from data_pipeline.dedup.keys import ITEM_SCHEMA, VALUE_SCHEMA
from data_pipeline.journal import Record
from data_pipeline.left import Left
from data_pipeline.stages.same import Range, drop_places, repeated_values
from data_pipeline.stages.strings import StringEdit, anchor_file, window_file
from data_pipeline.stages.take_out import Edit, SpanEdit, take_out_file, unit_file
from data_pipeline.task import Task
from llmsys.config.deduplicate import DeduplicateConfig, KeepDuplicates, SubstringDuplicates

THINNING_STAGES = (
    *("units", "same_units", "take_out"),
    *("anchors", "repeated", "windows", "same_windows", "take_out_strings"),
)


class Comparisons(Protocol):
    """What is needed of whoever plans the comparisons."""

    config: DeduplicateConfig
    by_characters: dict[str, bool]
    name: str
    folder: Path

    def stage(self, name: str, tasks: list[Task], unit: str) -> list[Record]:
        """Do the tasks of a stage."""

    def paths(self, records: Sequence[Record], output: int = 0) -> list[Path]:
        """Where an output of each record lies."""

    def ranges(
        self, stage: str, keys: int, inputs: Sequence[Any], job_of: Callable[[int, int, Path], Callable[..., Any]]
    ) -> list[Record]:
        """Compare keys, one range of them per task."""

    def range_of(
        self, records: Sequence[Record], output: int, schema: pa.Schema, dropped: Sequence[Record]
    ) -> Callable[..., Range]:
        """Return what makes the ranges of the keys in an output of records."""


def take_out_spans(plan: Comparisons, left: Left) -> Left:
    """Take out paragraphs, lines or sentences that occur earlier."""
    config = plan.config.spans
    assert not isinstance(config, KeepDuplicates)
    units = _map(plan, "units", left, partial(unit_file, config=config), config.model_dump(mode="json"))
    places = _compare(plan, "same_units", left, units, ITEM_SCHEMA, drop_places)
    return _rewritten(plan, "take_out", left, places, SpanEdit(config))


def take_out_strings(plan: Comparisons, left: Left) -> Left:
    """Take out long strings that occur earlier."""
    config = plan.config.substring
    assert isinstance(config, SubstringDuplicates)
    length = config.min_characters
    anchors = _map(plan, "anchors", left, partial(anchor_file, length=length), length)
    repeated = _compare(plan, "repeated", left, anchors, VALUE_SCHEMA, repeated_values)
    decides = [length, [record.digests for record in repeated]]
    job = partial(window_file, length=length, repeated=plan.paths(repeated))
    windows = _map(plan, "windows", left, job, decides)
    places = _compare(plan, "same_windows", left, windows, ITEM_SCHEMA, drop_places)
    return _rewritten(plan, "take_out_strings", left, places, StringEdit(config))


def _map(plan: Comparisons, stage: str, left: Left, job: Callable[..., Any], decides: Any) -> list[Record]:
    """Write a file of keys for each file that is left."""
    tasks = []
    for number, (record, name) in enumerate(zip(left.kept, left.names, strict=True)):
        output = f"work/{stage}/{name}.arrow"
        where = {"source": plan.paths([record])[0], "number": number, "dropped": plan.paths(left.decisions)}
        own = partial(job, **where, output=plan.folder / output)
        inputs = [record.digests[0], [decision.digests for decision in left.decisions], number, decides]
        tasks.append(Task(f"{stage}/{name}", inputs, [output], own, _rows(record)))
    return plan.stage(stage, tasks, "document")


def _compare(
    plan: Comparisons, stage: str, left: Left, keys: Sequence[Record], schema: pa.Schema, job: Callable[..., Any]
) -> list[Record]:
    """Compare the keys of all files; the map before has left dropped rows out already."""
    make = plan.range_of(keys, 0, schema, [])

    def job_of(number: int, ranges: int, output: Path) -> Callable[..., Any]:
        return partial(job, part=make(number=number, ranges=ranges), output=output)

    count = sum(record.result["keys"] for record in keys)
    return plan.ranges(stage, count, [[record.digests for record in keys]], job_of)


def _rewritten(plan: Comparisons, stage: str, left: Left, places: Sequence[Record], edit: Edit) -> Left:
    """Apply every decision and every cut, and return the files as they are then."""
    config = plan.config.spans if isinstance(edit, SpanEdit) else plan.config.substring
    part = [config.model_dump(mode="json"), list(left.rules), edit.rule]
    decided = [[record.digests for record in records] for records in (left.decisions, places)]
    tasks = []
    for number, (record, name) in enumerate(zip(left.kept, left.names, strict=True)):
        outputs = [f"work/{stage}/{name}.arrow", f"work/{stage}/{name}.dropped.arrow"]
        job = partial(
            take_out_file,
            source=plan.paths([record])[0],
            number=number,
            decisions=plan.paths(left.decisions),
            rules=list(left.rules),
            places=plan.paths(places),
            edit=edit,
            kept=plan.folder / outputs[0],
            dropped=plan.folder / outputs[1],
            kept_batches=record.result["kept_batches"],
        )
        tasks.append(Task(f"{stage}/{name}", [record.digests[0], decided, number, part], outputs, job, _rows(record)))
    records = plan.stage(stage, tasks, "document")
    return Left(left.names, records, [*left.dropped, records])


def _rows(record: Record) -> int:
    return sum(rows for _, rows in record.result["kept_batches"])
