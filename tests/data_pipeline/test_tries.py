"""Laws of failing: a task is tried again after a longer and longer wait, and a hopeless input costs itself only."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.executors.event import Advanced, Done, Failed, Report
from data_pipeline.executors.inline import Inline
from data_pipeline.executors.tries import Again, run_with_tries
from data_pipeline.graph import Task, Workshop
from data_pipeline.journal import Record
from data_pipeline.quarantine import quarantined
from llmsys.config.executor import InlineExecutor
from llmsys.errors import DataError
from llmsys.lock import folder_lock


def fail_until(path: Path, success: int, report: Report) -> dict[str, Any]:
    """A storage that comes back at its `success`th try."""
    with open(path, "a") as file:
        file.write("x")
    report(1, 0)
    tries = len(path.read_text())
    if tries < success:
        raise ConnectionResetError("the storage is away")
    return {"tries": tries}


def refuse(report: Report) -> dict[str, Any]:
    raise DataError("mend this.")


def fill_the_disk(report: Report) -> dict[str, Any]:
    raise OSError(28, "No space left on device", "/data/x")


def test_failed_tasks_are_tried_again_with_longer_and_longer_waits(tmp_path: Path) -> None:
    jobs = [partial(fail_until, tmp_path / str(index), success) for index, success in enumerate([1, 9, 3, 4])]
    waits: list[float] = []
    config = InlineExecutor(tries=4, backoff_seconds=40)
    events = list(run_with_tries(Inline(), [*jobs, refuse, fill_the_disk], config, sleep=waits.append))
    assert {event.index: event.result["tries"] for event in events if isinstance(event, Done)} == {0: 1, 2: 3, 3: 4}
    assert waits == [40, 60, 60]
    assert sorted(event.index for event in events if isinstance(event, Again)) == [1, 1, 1, 2, 2, 3, 3, 3]
    assert {event.index: event.cause for event in events if isinstance(event, Failed)} == {
        1: "error",
        4: "mend",  # another try mends neither a message for a person
        5: "mend",  # nor a full disk, for which no input is to blame
    }
    assert [event.index for event in events if isinstance(event, Advanced)] == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 3]


def stage(folder: Path, *jobs: Any) -> list[Record]:
    """Do one stage whose tasks are inputs the dataset can do without."""
    tasks = [
        Task(f"stage/{index}", [], [], job, 1, without=lambda reason: {"skipped": reason})
        for index, job in enumerate(jobs)
    ]
    with folder_lock(folder) as lock:
        workshop = Workshop(folder, InlineExecutor(backoff_seconds=0), lock)
        try:
            return workshop.stage("stage", tasks, unit="file", code="")
        finally:
            workshop.close()


def test_an_input_that_fails_every_try_is_quarantined_and_the_next_run_tries_it_again(tmp_path: Path) -> None:
    good, bad = partial(fail_until, tmp_path / "good", 2), partial(fail_until, tmp_path / "bad", 4)
    first = stage(tmp_path, good, bad)
    assert [record.result for record in first] == [
        {"tries": 2},
        {"skipped": "quarantined after 3 tries: ConnectionResetError: the storage is away"},
    ]
    (entry,) = quarantined(tmp_path)
    assert (entry["task"], entry["tries"], entry["cause"]) == ("stage/1", 3, "error")
    assert "in fail_until" in entry["traceback"]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["tasks"], events[-1]["failed"], events[-1]["again"]) == (2, 0, 3)
    second = stage(tmp_path, good, bad)
    assert [record.result for record in second] == [{"tries": 2}, {"tries": 4}]  # the good one was not done again
    assert quarantined(tmp_path) == []


def test_what_a_person_must_mend_quarantines_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"2 of 2 tasks of stage stage failed, the first is stage/0: mend this\."):
        stage(tmp_path, refuse, fill_the_disk)
    assert quarantined(tmp_path) == []
