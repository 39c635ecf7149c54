"""Laws of reading a run folder: the latest trajectory counts, and what is missing is said."""

import pytest

from llmsys.events import read_latest_events
from llmsys.report import run_record as run_module
from llmsys.report.run_record import ExpertLoadHistory, read_run
from llmsys.report.run_sections import build_run_numbers
from tests.helpers.example_run import run_events, write_run


def _steps(first, last, loss):
    return [
        {"event": "step", "step": s, "tokens": 10 * s, "loss": loss} for s in range(first, last + 1)
    ]


@pytest.mark.parametrize("last", [0, 8])
@pytest.mark.parametrize("resumed_from", [None, 4, 6])
def test_a_resumed_run_shows_the_trajectory_that_holds(tmp_path, resumed_from, last):
    start = {"event": "start", "resumed_from": None}
    lost = {"event": "evaluation", "step": 9, "loss": 1.0, "tokens": 90}
    again = _steps((resumed_from or 0) + 1, last, 2.0)
    events = [start, *_steps(1, 10, 1.0), lost, {**start, "resumed_from": resumed_from}, *again]
    record = read_run(write_run(tmp_path, events))
    assert list(record.curves.step) == list(range(1, max(last, resumed_from or 0) + 1))
    assert list(record.curves.columns["loss"]) == [1.0] * (resumed_from or 0) + [2.0] * len(again)
    assert record.evaluations == {}
    kept = [
        event for event in read_latest_events(tmp_path / "events.jsonl") if event["event"] == "step"
    ]
    assert [(e["step"], e["loss"]) for e in kept] == list(
        zip(record.curves.step, record.curves.columns["loss"], strict=True)
    )


def test_a_step_logged_again_without_a_start_replaces_the_first(tmp_path):
    record = read_run(write_run(tmp_path, [*_steps(1, 5, 1.0), *_steps(3, 4, 2.0)]))
    assert list(record.curves.columns["loss"]) == [1.0, 1.0, 2.0, 2.0]


def test_expert_loads_are_relative_to_even_and_bounded_with_first_and_last_kept():
    loads = ExpertLoadHistory()
    for step in range(1, 2_000):
        loads.append_event({"step": step, "tokens": step, "load": [[0.5, 0.25, 0.25, 0.0]] * 100})
    assert (loads.busiest[0], loads.busiest_mean[0], loads.idlest[0]) == (2.0, 2.0, 0.0)
    assert len(loads.step) == 1_999
    assert len(loads.whole) * 400 <= run_module.MAX_LOAD_NUMBERS
    assert {0, 1_998} <= set(loads.whole)
    loads.truncate_after(1_000)
    assert max(loads.whole) < len(loads.step) == 1_000


def test_events_with_broken_fields_are_counted_and_do_not_stop_the_rest(tmp_path):
    strange = [{"event": "experts", "step": 1, "load": 7}, {"event": "experts", "step": 2},
        {"event": "unheard of"},
               {"event": "step", "step": "three"}]  # fmt: skip
    record = read_run(write_run(tmp_path, [*_steps(1, 5, 1.0), *strange]))  # type: ignore[list-item]
    assert len(record.curves.step) == 5
    assert any(note.startswith("2 events in ") for note in record.notes)


def test_losses_that_are_not_finite_are_named(tmp_path):
    events = _steps(1, 5, 1.0)
    events[2]["loss"] = None
    assert any(
        "not finite in 1 logged steps (3)" in note
        for note in read_run(write_run(tmp_path, events)).notes
    )


@pytest.mark.parametrize(
    ("keep", "note"),
    [
        ([], "The event file is empty: the run has not started yet."),
        (["start"], "No step has been logged yet"),
        (["start", "step"], "No evaluation yet"),
        (["start", "step"], "No samples: no `samples` event"),
        (["start", "step", "evaluation"], "No expert load: no `experts` event was logged."),
    ],
)
def test_a_run_just_started_says_what_is_missing_and_why(tmp_path, keep, note):
    events = [event for event in run_events() if event["event"] in keep]
    assert any(one.startswith(note) for one in read_run(write_run(tmp_path, events)).notes)


def test_a_dense_model_is_named_as_the_reason_for_no_expert_load(tmp_path):
    write_run(tmp_path, run_events(layers=0))
    (tmp_path / "config.yaml").write_text("format_version: 2\nmodel: {hidden_size: 8, moe: null}\n")
    assert "No expert load: the model is dense." in read_run(tmp_path).notes


def test_files_that_are_missing_or_broken_become_notes(tmp_path):
    notes = read_run(tmp_path).notes
    assert [note.split(":")[0] for note in notes] == [
        "No configuration",
        "No environment",
        "No events",
    ]
    (tmp_path / "config.yaml").write_text("a: [1")
    (tmp_path / "environment.json").write_text("{")
    notes = read_run(tmp_path).notes
    assert "not readable as YAML" in notes[0]
    assert "is not JSON" in notes[1]


def test_a_finished_run_gives_its_key_numbers(tmp_path):
    numbers = {
        what: (value, remark)
        for what, value, remark in build_run_numbers(read_run(write_run(tmp_path)))
    }
    assert numbers["state"] == ("finished", "in 6 min 00 s")
    assert numbers["bits per byte"] == ("1.187", "xz 2.377, gzip 2.914 on 375,235 held-out bytes")
    assert numbers["parameters"] == ("10.2 M", "4.12 M active per token")
    assert numbers["tokens trained"] == ("6.55 M", "step 400")


def test_an_unfinished_run_says_how_far_it_is(tmp_path):
    events = [event for event in run_events() if event.get("step", 0) <= 100]
    assert build_run_numbers(read_run(write_run(tmp_path, events)))[0] == (
        "state",
        "unfinished",
        "25.0 % of 400 steps",
    )
