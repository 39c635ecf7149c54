"""Laws of failing: a task is tried again after a longer and longer wait, and a hopeless input
costs itself only.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.executor import InlineExecutorConfig
from llmsys.data_pipeline.core.task_record import TaskRecord
from llmsys.data_pipeline.executors.base import (
    InlineExecutor,
    Report,
    TaskDone,
    TaskFailed,
    TaskProgress,
)
from llmsys.data_pipeline.graph.quarantine import read_quarantine
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Task, TaskRetry, run_with_retries
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.stages.extract_text import extract_file
from llmsys.dataset.token_shards import load_manifest
from llmsys.errors import DataError
from llmsys.events import read_events
from llmsys.launch.main import main
from llmsys.storage.local_files import lock_folder
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl


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
    jobs = [
        partial(fail_until, tmp_path / str(index), success)
        for index, success in enumerate([1, 9, 3, 4])
    ]
    waits: list[float] = []
    config = InlineExecutorConfig(max_attempts=4, backoff_seconds=40)
    events = list(
        run_with_retries(
            InlineExecutor(), [*jobs, refuse, fill_the_disk], config, sleep=waits.append
        )
    )
    assert {
        event.index: event.result["tries"] for event in events if isinstance(event, TaskDone)
    } == {0: 1, 2: 3, 3: 4}
    assert waits == [40, 60, 60]
    assert sorted(event.index for event in events if isinstance(event, TaskRetry)) == [
        1,
        1,
        1,
        2,
        2,
        3,
        3,
        3,
    ]
    assert {event.index: event.cause for event in events if isinstance(event, TaskFailed)} == {
        1: "error",
        4: "mend",  # another try mends neither a message for a person
        5: "mend",  # nor a full disk, for which no input is to blame
    }
    assert [event.index for event in events if isinstance(event, TaskProgress)] == [
        0,
        1,
        2,
        3,
        1,
        2,
        3,
        1,
        2,
        3,
        1,
        3,
    ]


def stage(folder: Path, *jobs: Any) -> Sequence[TaskRecord]:
    """Do one stage whose tasks are inputs the dataset can do without."""
    tasks = [
        Task(f"stage/{index}", [], [], job, 1, fallback_result=lambda reason: {"instead": reason})
        for index, job in enumerate(jobs)
    ]
    with lock_folder(folder) as lock:
        runner = StageRunner(folder, InlineExecutorConfig(backoff_seconds=0), lock)
        try:
            return runner.run_stage("stage", tasks, unit="file", code="")
        finally:
            runner.close()


def test_an_input_that_fails_every_try_is_quarantined_and_the_next_run_tries_it_again(
    tmp_path: Path,
) -> None:
    good, bad = partial(fail_until, tmp_path / "good", 2), partial(fail_until, tmp_path / "bad", 4)
    first = stage(tmp_path, good, bad)
    assert [record.result for record in first] == [
        {"tries": 2},
        {"instead": "quarantined after 3 attempts: ConnectionResetError: the storage is away"},
    ]
    (entry,) = read_quarantine(tmp_path)
    assert (entry["task"], entry["attempts"], entry["cause"]) == ("stage/1", 3, "error")
    assert "in fail_until" in entry["traceback"]
    events = read_events(tmp_path / "events.jsonl")
    assert (events[-1]["tasks"], events[-1]["failed"], events[-1]["retries"]) == (2, 0, 3)
    second = stage(tmp_path, good, bad)
    # the good one was not done again
    assert [record.result for record in second] == [{"tries": 2}, {"tries": 4}]
    assert read_quarantine(tmp_path) == []


def test_what_a_person_must_mend_quarantines_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"2 of 2 tasks of stage stage failed, the first is stage/0: mend this\."
    ):
        stage(tmp_path, refuse, fill_the_disk)
    assert read_quarantine(tmp_path) == []


def test_a_poisoned_file_costs_itself_and_is_named_to_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=2, pages=3)
    config = tmp_path / "config.yaml"
    config.write_text(
        f"data: {{kind: crawl, folder: {tmp_path}/data, inputs: ['{crawl}/*'], documents: "
        "{num_shards: 1},\n  executor: {kind: inline, backoff_seconds: 0}}\n"
    )
    command = ["prepare", str(config), "--until", "documents"]
    with monkeypatch.context() as patch:
        patch.setattr("llmsys.data_pipeline.pipelines.document_pipeline.extract_file", poisoned)
        assert main(command) == 3
    reason = "quarantined after 3 attempts: ValueError: this page crashes the parser"
    assert (
        f"skipped 1: {reason} (first: {crawl}/crawl-1.warc.gz at byte 0)" in capsys.readouterr().out
    )
    assert "in quarantine: task extract/crawl-1.warc.gz-" in caplog.text
    manifest = load_manifest(tmp_path / "data")
    assert [(skip.reason, skip.count) for skip in manifest.read.skipped] == [(reason, 1)]
    assert manifest.funnel[0].dropped[0].test == reason
    assert main(["inspect", f"{tmp_path}/data", "--dropped", "rule=read"]) == 0
    shown = capsys.readouterr().out
    assert f"{crawl}/crawl-1.warc.gz at byte 0" in shown
    assert "raise ValueError(" in shown  # its traceback
    assert main([*command, "--json"]) == 0  # the next run tries it again
    assert json.loads(capsys.readouterr().out)["quarantined"] == []
    assert load_manifest(tmp_path / "data").read.records > manifest.read.records


def poisoned(report: Report, *, source: str, **parts: Any) -> dict[str, Any]:
    if "crawl-1" in source:
        raise ValueError("this page crashes the parser\nand says more")
    return extract_file(report, source=source, **parts)


def test_nothing_is_published_when_every_input_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=1, pages=3)
    executor = {"kind": "inline", "backoff_seconds": 0, "max_attempts": 1}
    monkeypatch.setattr(
        "llmsys.data_pipeline.pipelines.document_pipeline.extract_file",
        lambda report, **parts: 1 / 0,
    )
    with pytest.raises(
        DataError, match=r"every input was quarantined\. Read the tracebacks in quarantine/"
    ):
        prepare_dataset(build_tiny_config(tmp_path / "data", crawl, executor=executor))
    assert not (tmp_path / "data" / "manifest.json").exists()
