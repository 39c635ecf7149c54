"""Laws of log lines, the event file and progress."""

import contextlib
import fcntl
import io
import json
import logging
import os
import struct
import termios
from multiprocessing import get_context
from pathlib import Path

import pytest

from llmsys.errors import DataError, FormatError
from llmsys.events import EventWriter, iter_events, read_events, read_latest_events
from llmsys.log import configure_logging, get_logger
from llmsys.progress import Progress, format_duration

HEAD = b'{"event":"format","format_version":2}\n'


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    kept = logging.getLogger().handlers[:], logging.getLogger().level
    yield
    logging.getLogger().handlers[:], logging.getLogger().level = kept


# --- Events ---


def test_an_event_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "events.jsonl"
    with EventWriter(path) as writer:
        writer.write(
            "step",
            step=1,
            loss=2.5,
            text="ü </script> \n \u2028",
            path=Path("a/b"),
            load=[[0.5, 0.5]],
        )
    (event,) = read_events(path)
    assert path.read_bytes().count(b"\n") == 2  # the first line has the version of the format
    assert event.pop("time") == pytest.approx(1.7e9, rel=0.5)
    assert event == {
        "event": "step",
        "step": 1,
        "loss": 2.5,
        "text": "ü </script> \n \u2028",
        "path": "a/b",
        "load": [[0.5, 0.5]],
    }


def test_numbers_that_are_not_finite_are_null_so_that_every_line_is_strict_json(tmp_path):
    with EventWriter(tmp_path / "e") as writer:
        writer.write("step", loss=float("nan"), norms=[float("inf"), 1.0])
    event = json.loads((tmp_path / "e").read_text().splitlines()[1], parse_constant=pytest.fail)
    assert (event["loss"], event["norms"]) == (None, [None, 1.0])


def test_a_value_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with (
        EventWriter(tmp_path / "e") as writer,
        pytest.raises(TypeError, match="takes only JSON values, not object"),
    ):
        writer.write("step", what=object())
    assert read_events(tmp_path / "e") == []


def _write_many(path, name, count):
    with EventWriter(path) as writer:
        for number in range(count):
            writer.write(name, number=number, padding="x" * 500)


def test_several_processes_may_append_to_one_file(tmp_path):
    path = tmp_path / "events.jsonl"
    context = get_context("fork")
    processes = [context.Process(target=_write_many, args=(path, name, 200)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    events = read_events(path)
    for name in "abc":
        assert [event["number"] for event in events if event["event"] == name] == list(range(200))


@pytest.mark.parametrize("kept", range(1, 40))
def test_a_line_cut_anywhere_by_a_kill_costs_that_line_only(tmp_path, caplog, kept):
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.write("first")
        writer.write("second")
    head, first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(head + first + second[:kept])
    whole = kept >= len(second) - 1
    assert [event["event"] for event in read_events(path)] == ["first"] + ["second"] * whole
    assert caplog.text == ""  # a broken last line is what a kill leaves
    with EventWriter(path) as writer:  # the next writer does not glue its event to the broken line
        writer.write("third")
    assert [event["event"] for event in read_events(path)] == ["first"] + ["second"] * whole + [
        "third"
    ]
    assert ("skipped 1 invalid line(s)" in caplog.text) == (not whole)


def test_broken_lines_in_the_middle_are_counted(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.write_bytes(HEAD + b'{"event":"a"}\n\x00\xff\n[1]\n{"no":"event"}\n\n{"event":"b"}\n{"eve')
    assert [event["event"] for event in iter_events(path)] == ["a", "b"]
    assert "skipped 3 invalid line(s)" in caplog.text


@pytest.mark.parametrize(
    ("line", "version"), [(b'{"time":1,"event":"start"}', 1), (HEAD.replace(b"2", b"3"), 3)]
)
def test_events_of_another_version_are_refused_by_readers_and_writers(tmp_path, line, version):
    path = tmp_path / "events.jsonl"
    path.write_bytes(line.strip() + b"\n")
    for use in (read_events, EventWriter):
        with pytest.raises(
            FormatError,
            match=rf"events\.jsonl has events format {version}, written by .* reads format 2",
        ):
            use(path)
    assert path.read_bytes() == line.strip() + b"\n"


def test_a_damaged_first_line_costs_that_line_only(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.write_bytes(HEAD[:20] + b"\n" + b'{"event":"a"}\n')
    with EventWriter(path) as writer:
        writer.write("b")
    assert [event["event"] for event in read_events(path)] == ["a", "b"]
    assert "skipped 1 invalid line(s)" in caplog.text


def test_a_missing_event_file_says_what_writes_it(tmp_path):
    with pytest.raises(
        DataError, match=r"the event file does not exist\. `llmsys train CONFIG` writes it"
    ):
        read_events(tmp_path / "events.jsonl")


def test_after_a_crash_the_last_record_of_a_step_counts(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.write("start", resumed_from=None)
        for step in (1, 2, 3, 4):
            writer.write("step", step=step, run=1)
        writer.write("start", resumed_from=2)
        writer.write("step", step=3, run=2)
        writer.write("evaluation", step=3, run=2)
        writer.write("step", step=3, run=3)
    latest = read_latest_events(path)
    assert [(e["step"], e["run"]) for e in latest if e["event"] == "step"] == [
        (1, 1),
        (2, 1),
        (3, 3),
    ]
    assert [e["resumed_from"] for e in latest if e["event"] == "start"] == [None, 2]
    assert [e["run"] for e in latest if e["event"] == "evaluation"] == [2]


# --- Log lines ---


def _lines(monkeypatch, rank, world_size):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    stream = io.StringIO()
    configure_logging(stream=stream)
    configure_logging(stream=stream)  # a second call must not double the lines
    get_logger("llmsys.train.trainer").info("step %d", 1)
    get_logger("llmsys.train.trainer").warning("slow")
    get_logger("somebody.else").info("chatter")
    return stream.getvalue().splitlines()


def test_one_process_logs_without_a_prefix(monkeypatch):
    assert _lines(monkeypatch, 0, 1) == ["step 1", "warning: slow"]


def test_with_several_ranks_a_line_names_its_rank_and_only_rank_0_informs(monkeypatch):
    assert _lines(monkeypatch, 0, 2) == ["[rank 0] step 1", "warning: [rank 0] slow"]
    assert _lines(monkeypatch, 1, 2) == ["warning: [rank 1] slow"]


# --- Progress ---


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _progress(total, unit, seconds_per_step, steps, **options):
    stream, clock = io.StringIO(), _Clock()
    with Progress("extract", total, unit, stream=stream, clock=clock, **options) as progress:
        for done in range(steps):
            clock.now += seconds_per_step
            progress.advance(1, dropped=done)
    return stream.getvalue().splitlines()


def test_progress_prints_a_line_every_few_seconds_and_one_at_the_end():
    lines = _progress(12, "page", 1.0, 12)
    assert lines == [
        "extract: 5 of 12 pages (42%), 1 page/s, 7 s left, dropped=4",
        "extract: 10 of 12 pages (83%), 1 page/s, 2 s left, dropped=9",
        "extract: 12 of 12 pages (100%), 1 page/s, dropped=11, done after 12 s",
    ]


def test_progress_without_a_total_says_how_much_was_done():
    assert (
        _progress(None, "tok", 0.001, 2000)[-1]
        == "extract: 2k tok, 1k tok/s, dropped=1999, done after 2 s"
    )


def test_what_was_done_before_a_resume_does_not_count_for_the_rate():
    assert (
        _progress(100, "step", 1.0, 5, done=90)[0]
        == "extract: 95 of 100 steps (95%), 1 step/s, 5 s left, dropped=4"
    )


def test_bytes_are_scaled_to_megabytes():
    stream, clock = io.StringIO(), _Clock()
    with Progress("read", 50e6, "B", stream=stream, clock=clock) as progress:
        clock.now = 10
        progress.advance(20e6)
    assert stream.getvalue().splitlines()[0] == "read: 20 MB of 50 MB (40%), 2 MB/s, 15 s left"


def test_an_error_ends_progress_with_how_far_it_came():
    stream = io.StringIO()
    progress = Progress("read", 2, "file", stream=stream, clock=_Clock())
    with contextlib.suppress(ValueError), progress:
        progress.advance()
        int("broken")
    assert stream.getvalue() == "read: 1 of 2 files (50%), stopped after 0 s\n"


def test_what_still_runs_stands_where_the_line_would_say_100_percent():
    running = ["filter (2 tasks)"]
    stream = io.StringIO()
    progress = Progress("extract", 1_000, "page", stream=stream, clock=_Clock())
    progress.describe_remainder = lambda: ", ".join(running)
    with progress:
        progress.advance(994)
        assert progress.format_line() == "extract: 994 of 1k pages (99%)"
        progress.advance(2)
        assert progress.format_line() == (
            "extract: 996 of 1k pages, still running: filter (2 tasks)"
        )
        progress.advance(4)
        running.clear()
        assert progress.format_line() == "extract: 1k of 1k pages (100%)"
        running.append("filter (1 task)")
    assert stream.getvalue() == "extract: 1k of 1k pages (100%), done after 0 s\n"


def test_progress_is_silent_on_other_ranks(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert _progress(3, "page", 9.0, 3) == []


def _terminal(columns):
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return ours, theirs


def _shown(ours):
    """All that was written to a terminal that is closed now; one read may give a part of it."""
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that there is no more
        while more := os.read(ours, 65536):
            shown += more
    return shown.decode()


def test_a_terminal_that_does_not_know_its_width_gets_plain_lines():
    ours, theirs = _terminal(columns=0)
    with (
        os.fdopen(theirs, "w") as terminal,
        Progress("extract", 1, "page", stream=terminal, clock=_Clock()) as progress,
    ):
        progress.advance()
    assert _shown(ours) == "extract: 1 of 1 page (100%), done after 0 s\r\n"


def test_on_a_terminal_a_bar_is_drawn_and_log_lines_stay_whole():
    ours, theirs = _terminal(columns=100)
    with os.fdopen(theirs, "w") as terminal:
        configure_logging(stream=terminal)
        with Progress("extract", 4, "page", stream=terminal) as progress:
            progress.advance(2, dropped=1)
            get_logger("llmsys.x").info("a line of its own")
            progress.advance(2)
    shown = _shown(ours)
    assert "extract: 100%" in shown
    assert "dropped=1" in shown
    assert "a line of its own\r\n" in shown.replace("\x1b[A", "")


def test_a_bar_says_what_still_runs_and_100_percent_only_at_the_end():
    ours, theirs = _terminal(columns=100)
    with (
        os.fdopen(theirs, "w") as terminal,
        Progress("extract", 4, "page", stream=terminal) as progress,
    ):
        progress.describe_remainder = lambda: "filter (1 task)"
        progress.advance(3)
        progress.advance(1)
    shown = _shown(ours)
    before, between, after = shown.partition("extract: still running: filter (1 task) |")
    assert "100%" not in before + between
    assert "extract: 100%" in after


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (59.6, "1 min 00 s"),
        (125, "2 min 05 s"),
        (11_220, "3 h 07 min"),
        (187_200, "2 d 04 h"),
    ],
)
def test_durations_read_as_a_person_says_them(seconds, words):
    assert format_duration(seconds) == words
