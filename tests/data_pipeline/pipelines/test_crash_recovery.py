"""Laws of dying: whatever is killed whenever, the same command ends with the same bytes."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmsys.config.executor import InlineExecutorConfig
from llmsys.data_pipeline.executors.base import Job, Report, TaskDone, TaskFailed, TaskProgress
from llmsys.data_pipeline.executors.local import LocalExecutor
from llmsys.data_pipeline.graph.stage_runner import StageRunner
from llmsys.data_pipeline.graph.tasks import Task
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import DataError
from llmsys.storage.local_files import lock_folder
from tests.helpers.failing_tasks import count, die_until, meet, raise_failure, sleep_for_ever
from tests.helpers.killed_preparations import kill_again_and_again, start
from tests.helpers.paths import ROOT
from tests.helpers.process import has_ended, wait_for_pid, wait_until
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, make_crawl


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_crawl(tmp_path_factory.mktemp("crawl"), pages=10)


@pytest.fixture(scope="module")
def undisturbed(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "data"
    prepare_dataset(build_tiny_config(folder, crawl))
    return folder


def test_a_preparation_killed_again_and_again_ends_with_the_same_bytes(
    crawl: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Five times, at random; `python -m tests.helpers.killed_preparations` does twenty for each
    kind of duplicate.
    """
    folder = tmp_path / "killed"
    assert kill_again_and_again(folder, crawl, undisturbed, kills=5, seed=0) >= 3
    assert hash_files(folder) == hash_files(undisturbed)


def test_a_worker_killed_in_the_middle_costs_nothing_but_time(
    crawl: Path, undisturbed: Path, tmp_path: Path
) -> None:
    process = start(tmp_path / "killed", crawl, workers=2)
    wait_until(lambda: (tmp_path / "killed" / "work").exists(), "the first stage began")
    workers = [
        child
        for child in psutil.Process(process.pid).children()
        if "spawn_main" in " ".join(child.cmdline())
    ]
    for worker in workers:
        worker.kill()
    assert workers
    assert process.wait() == 0
    assert hash_files(tmp_path / "killed") == hash_files(undisturbed)


# --- the executor alone ---


def test_a_busy_worker_dies_with_its_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.failing_tasks", str(tmp_path / "pid")]
    process = subprocess.Popen(command, cwd=ROOT)
    worker = wait_for_pid(tmp_path / "pid")
    process.kill()
    process.wait()
    wait_until(lambda: has_ended(worker), "the worker outlived its parent")


def test_a_worker_that_dies_or_hangs_fails_its_own_job_only(tmp_path: Path) -> None:
    """The limit counts from when a job is handed out, and a worker's start is in it: here both are
    up before, and the
    one that dies does so in the last job."""
    jobs: list[Job] = [
        partial(sleep_for_ever, tmp_path / "b"),
        raise_failure,
        partial(count, 3),
        partial(die_until, tmp_path / "a", 9),
    ]
    pool = LocalExecutor(workers=2)
    try:
        list(pool.run_jobs([partial(meet, tmp_path / "meeting", name, 2) for name in "ab"]))
        events = {
            event.index: event
            for event in pool.run_jobs(jobs, seconds=1.0)
            if not isinstance(event, TaskProgress)
        }
    finally:
        pool.close()
    assert events.pop(2) == TaskDone(2, {"counted": 3})
    failed = [event for _, event in sorted(events.items()) if isinstance(event, TaskFailed)]
    assert [event.cause for event in failed] == ["slow", "error", "lost"]
    assert failed[2].message.startswith(
        "its process was killed by signal 9 (SIGKILL). If the machine ran out of"
    )
    assert (
        failed[0].message
        == "took longer than 1 s, so its process was terminated (data.executor.task_seconds)."
    )
    assert failed[1].message == "ValueError: a bug"
    assert "in raise_failure" in failed[1].traceback
    assert has_ended(wait_for_pid(tmp_path / "b"))


def make_file(path: Path, report: Report) -> dict[str, Any]:
    if path.name == "b":
        raise DataError("b cannot be made. Do this.")
    path.write_bytes(b"made")
    return {}


def test_a_failed_task_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    def stage() -> None:
        with lock_folder(tmp_path) as lock:
            runner = StageRunner(tmp_path, InlineExecutorConfig(), lock)
            tasks = [
                Task(f"stage/{name}", [], [name], partial(make_file, tmp_path / name), 1)
                for name in "abc"
            ]
            try:
                runner.run_stage("stage", tasks, unit="file", code="")
            finally:
                runner.close()

    text = (
        r"1 of 3 tasks of stage stage failed, the first is stage/b: b cannot be made\. Do this\. "
        r"Results of the other"
    )
    with pytest.raises(DataError, match=text):
        stage()
    (tmp_path / "c").chmod(0o600)
    before = (tmp_path / "c").stat().st_mtime_ns
    with pytest.raises(DataError, match=text):
        stage()
    assert (tmp_path / "c").stat().st_mtime_ns == before
