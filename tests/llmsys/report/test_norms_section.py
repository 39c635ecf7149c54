"""Norms by layer as heat maps: logarithms of what was measured, updates as a share of the
weights.
"""

from pathlib import Path
from typing import Any

import pytest

from llmsys.report.norms_section import MAX_RECORDS, build_norms_section
from llmsys.report.run_record import RunRecord


def build_record(steps: range) -> RunRecord:
    record = RunRecord(Path("run"), "run")
    for step in steps:
        norms: dict[str, Any] = {
            "activation": {"blocks.0": 10.0},
            "gradient": {"blocks.0": 0.01 * step, "embed": None},
            "update": {"blocks.0": 0.2, "embed": 0.0},
            "weight": {"blocks.0": 2.0, "embed": 4.0},
        }
        record.add_event({"event": "norms", "time": 1.0, "step": step, **norms})
    return record


def test_rows_are_layers_columns_steps_and_updates_are_relative() -> None:
    section = build_norms_section(build_record(range(1, 11, 9)))
    assert section is not None
    by_kind = {
        figure.anchor.removeprefix("plot-norms-"): figure.traces[0] for figure in section.figures
    }
    assert by_kind["gradient"]["x"] == [1, 10]
    assert by_kind["gradient"]["y"] == ["blocks.0", "embed"]
    assert by_kind["gradient"]["z"] == [[-2, -1], [None, None]]
    assert by_kind["update"]["z"] == [[-1, -1], [None, None]], (
        "0.2 of 2; a logarithm of 0 is left out"
    )
    assert by_kind["activation"]["text"] == [["10", "10"]]


def test_a_run_without_norms_has_no_section_and_a_long_one_a_bounded_one() -> None:
    assert build_norms_section(build_record(range(0))) is None
    section = build_norms_section(build_record(range(1, 3 * MAX_RECORDS)))
    assert section is not None
    steps = section.figures[0].traces[0]["x"]
    assert len(steps) <= MAX_RECORDS
    assert steps[-1] == 3 * MAX_RECORDS - 1


def test_an_event_without_its_fields_is_a_note_of_the_record_and_no_error() -> None:
    record = build_record(range(1, 2))
    with pytest.raises(KeyError):
        record.add_event({"event": "norms", "time": 1.0, "step": 2})
