"""Laws of working ahead: who has done a job of a later stage does the next one, and nothing is
lost or done twice.
"""

import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.executor import ExecutorConfig, InlineExecutorConfig, LocalExecutorConfig
from llmsys.data_pipeline.core.earlier_results import EarlierResults
from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.core.task_record import (
    ChainedJob,
    FollowingJob,
    RecordedJob,
    StageArguments,
    StageJob,
    TaskRecord,
)
from llmsys.data_pipeline.executors.base import (
    EagerJobs,
    EagerTaskEvent,
    Event,
    InlineExecutor,
    Job,
    Report,
    TaskDone,
    TaskFailed,
    TaskProgress,
)
from llmsys.data_pipeline.executors.local import (
    MAX_WAITING_PER_WORKER,
    LocalExecutor,
    WorkerProcess,
)
from llmsys.data_pipeline.graph import tasks as module
from llmsys.data_pipeline.graph.quarantine import read_quarantine
from llmsys.data_pipeline.graph.stage_runner import StageProgress, StageRunner
from llmsys.data_pipeline.graph.tasks import EagerTasks, NextStage, Task, TaskRetry
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.events import read_events
from llmsys.progress import Progress
from llmsys.storage.folder_lock import lock_folder
from tests.helpers.failing_tasks import count, die_until, pass_gate, raise_failure, sleep_for_ever
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, list_blocks, make_crawl

NO_COPIES = {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}

# --- the executor alone ---


@contextmanager
def local_pool(workers: int) -> Iterator[LocalExecutor]:
    pool = LocalExecutor(workers)
    try:
        yield pool
    finally:
        pool.close()


def ends(
    pool: LocalExecutor, jobs: list[Job], hear: Callable[[Event], None], seconds: float = 0
) -> dict[Any, Event]:
    """How each job ended, by its number; those ahead by ("early", number). `hear` is told of the
    others as they end.
    """
    found: dict[Any, Event] = {}
    for event in pool.run_jobs(jobs, seconds):
        inner = event.event if isinstance(event, EagerTaskEvent) else event
        if isinstance(inner, TaskProgress):
            continue
        found[("early", inner.index) if isinstance(event, EagerTaskEvent) else inner.index] = inner
        if not isinstance(event, EagerTaskEvent):
            hear(inner)
    return found


def test_jobs_ahead_stay_with_the_worker_that_has_done_one_and_it_leaves_the_last_of_the_stage(
    tmp_path: Path,
) -> None:
    """The order is made certain by gates: a job ends when its gate is opened, as the test hears
    of another's end.
    """
    gates = {name: tmp_path / name for name in ("0", "1", "2", "3", "e0", "e1", "e2")}
    gates["0"].touch()  # so that the worker with the first job is free first
    gates["e2"].touch()
    with local_pool(2) as pool:
        assert pool.eager_jobs is not None
        ahead = pool.eager_jobs.next_jobs
        pids: dict[Any, int] = {}
        for event in pool.run_jobs([partial(pass_gate, gates[str(number)]) for number in range(4)]):
            early = isinstance(event, EagerTaskEvent)
            inner = event.event if isinstance(event, EagerTaskEvent) else event
            if not isinstance(inner, TaskDone):
                continue
            pids["early" if early else "stage", inner.index] = inner.result["pid"]
            match (early, inner.index):
                case (False, 0):
                    # for the worker that is idle now
                    ahead.append((0, partial(pass_gate, gates["e0"])))
                    gates["1"].touch()
                case (False, 1):
                    # waits for that one, though another is idle
                    ahead.append((1, partial(pass_gate, gates["e1"])))
                    gates["e0"].touch()
                case (True, 0):
                    gates["e1"].touch()
                # it is idle, and the last job waits for the other, which is at the last but one
                case (True, 1):
                    gates["2"].touch()
                case (False, 2):
                    ahead.append((2, partial(pass_gate, gates["e2"])))
                    gates["3"].touch()
    first, other = pids["stage", 0], pids["stage", 1]
    assert first != other
    assert pids == {
        ("stage", 0): first,
        ("stage", 1): other,
        ("early", 0): first,
        ("early", 1): first,
        ("early", 2): first,
        ("stage", 2): other,
        ("stage", 3): other,
    }


def test_another_worker_helps_when_too_much_waits(tmp_path: Path) -> None:
    """The stage's two jobs end together; one worker then is in an early job, which waits for
    what the other does.
    """
    with local_pool(2) as pool:
        assert pool.eager_jobs is not None
        jobs = [partial(pass_gate, tmp_path / "open")] * 2
        (tmp_path / "open").touch()
        helped = [
            partial(touch, tmp_path / f"e{number}")
            for number in range(1, MAX_WAITING_PER_WORKER + 2)
        ]
        early: list[Job] = [
            partial(pass_gate, tmp_path / f"e{MAX_WAITING_PER_WORKER + 1}"),
            *helped,
        ]

        def hear(event: Event) -> None:
            if event.index == 1:
                assert pool.eager_jobs is not None
                pool.eager_jobs.next_jobs.extend(enumerate(early))

        found = ends(pool, list(jobs), hear)
    assert {key for key in found if isinstance(key, tuple)} == {
        ("early", number) for number in range(MAX_WAITING_PER_WORKER + 2)
    }
    assert all(isinstance(event, TaskDone) for event in found.values())


def test_a_worker_with_nothing_else_to_do_takes_jobs_of_later_stages(tmp_path: Path) -> None:
    """One worker is in a job of the next stage that only ends with the one of the stage after
    it.
    """
    with local_pool(2) as pool:
        assert pool.eager_jobs is not None
        ahead = pool.eager_jobs

        def hear(event: Event) -> None:
            if event.index == 1:
                ahead.next_jobs.append((0, partial(pass_gate, tmp_path / "gate")))
                ahead.later_jobs.append((1, partial(touch, tmp_path / "gate")))

        found = ends(pool, [partial(count, 1)] * 2, hear)
    assert found.keys() == {0, 1, ("early", 0), ("early", 1)}


def touch(path: Path, report: Report) -> dict[str, Any]:
    path.touch()
    return {}


def test_a_job_ahead_that_fails_dies_or_hangs_costs_itself_only(tmp_path: Path) -> None:
    early: list[Job] = [
        raise_failure,
        partial(die_until, tmp_path / "a", 9),
        partial(sleep_for_ever, tmp_path / "b"),
        partial(count, 3),
    ]
    with local_pool(2) as pool:

        def hear(event: Event) -> None:
            if event.index == 0:
                assert pool.eager_jobs is not None
                pool.eager_jobs.next_jobs.extend(enumerate(early))

        assert pool.eager_jobs is not None
        pool.eager_jobs.seconds = 5.0
        found = ends(pool, [partial(count, 1)] * 6, hear)
    causes = {key: event.cause for key, event in found.items() if isinstance(event, TaskFailed)}
    assert causes == {("early", 0): "error", ("early", 1): "lost", ("early", 2): "slow"}
    # what is left when no worker is, its own stage does
    assert len(found) + len(pool.eager_jobs or ()) == 10
    assert all(isinstance(found[number], TaskDone) for number in range(6))


def test_one_worker_does_one_stage_after_the_other() -> None:
    assert LocalExecutor(1).eager_jobs is None


class Early:
    """Tasks of the stage `extract` that start early, each with its progress; none where not
    given.
    """

    def __init__(self, open_tasks: dict[str, int], amounts: Sequence[float] = ()) -> None:
        self.open = open_tasks
        self.amounts = amounts

    def get_progress_amount(self, number: int) -> float:
        return self.amounts[number] if self.amounts else 0.0

    def get_stage(self, number: int) -> str:
        return "extract"


def test_progress_counts_what_was_dropped_ahead_and_takes_back_what_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Progress("stage", 10, "B") as progress:
        meter = StageProgress(progress, "stage", [10.0], Early({}))
        shown: list[tuple[float, Any]] = []
        monkeypatch.setattr(
            progress, "advance", lambda amount, **details: shown.append((amount, details))
        )
        failed = TaskFailed(0, "lost", "", "lost")
        for event in (
            EagerTaskEvent(TaskProgress(0, 5, 3)),
            EagerTaskEvent(failed),
            EagerTaskEvent(TaskProgress(0, 5, 2)),
            EagerTaskEvent(TaskDone(0, {})),
        ):
            meter.show_event(event)
        meter.show_event(TaskRetry(0, failed))
        meter.show_event(TaskDone(0, {}))
    assert [amount for amount, _ in shown] == [0, 0, 0, 0, 10]
    assert [details.get("dropped", 0) for _, details in shown] == [3, 0, 2, 2, 2]
    assert not meter._drops | meter._amounts


def test_progress_of_split_inputs_counts_the_blocks_that_are_extracted_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Progress("stage", 20, "B") as progress:
        meter = StageProgress(progress, "split_inputs", [10.0], Early({}, [0.0, 6.0]))
        shown: list[float] = []
        monkeypatch.setattr(progress, "advance", lambda amount, **details: shown.append(amount))
        for event in (
            TaskDone(0, {}),
            EagerTaskEvent(TaskProgress(1, 5, 0)),
            EagerTaskEvent(TaskDone(1, {})),
        ):
            meter.show_event(event)
        meter.show_event(EagerTaskEvent(TaskProgress(0, 5, 0)))
        meter.update_display(4.0, 0)
    assert shown == [10, 5, 1, 0, 4]


def write_part(report: Report) -> dict[str, Any]:
    report(3, 0)
    return {}


def filter_silently(report: Report, *, source: Path) -> dict[str, Any]:
    return {}


def test_when_all_is_counted_the_line_names_the_stage_that_a_worker_has_come_to(
    tmp_path: Path,
) -> None:
    (tmp_path / "extracted").touch()
    job = StageJob(filter_silently, StageArguments(), {}, tmp_path, {})
    extract = RecordedJob(write_part, tmp_path, ("extracted",))
    seen = list[str]()
    with local_pool(1) as pool, Progress("extract", 10, "B") as progress:
        display = StageProgress(progress, "extract", [10.0], Early({}))
        progress.describe_remainder = display.describe_remainder
        chain = ChainedJob(extract, (FollowingJob("filter", job, ()),))
        for event in pool.run_jobs([chain]):
            display.show_event(event)
            seen.append(progress.format_line())
    assert isinstance(event, TaskDone)
    assert None not in event.result["following"]
    # 3 bytes were reported, and the rest of the block counts when its filter begins
    assert seen[-2].startswith("extract: 10 B of 10 B, still running: filter (1 task)")
    assert seen[-1].startswith("extract: 10 B of 10 B (100%)")


def test_the_line_counts_tasks_of_later_stages_that_wait_or_run() -> None:
    with Progress("split_inputs", 20, "B") as progress:
        display = StageProgress(
            progress, "split_inputs", [10.0, 10.0], Early({"extract": 3, "signatures": 0}, [5.0])
        )
        failed = TaskFailed(1, "lost", "", "lost")
        assert display.describe_remainder() == "split_inputs (2 tasks), extract (3 tasks)"
        display.show_event(TaskProgress(1, 0, 0, "filter"))
        display.show_event(EagerTaskEvent(TaskProgress(0, 0, 0, "filter")))
        assert display.describe_remainder() == (
            "split_inputs (1 task), extract (2 tasks), filter (2 tasks)"
        )
        assert progress.done == 15
        display.show_event(TaskRetry(1, failed))
        assert progress.done == 5
        assert display.describe_remainder() == (
            "split_inputs (2 tasks), extract (2 tasks), filter (1 task)"
        )
        display.show_event(TaskDone(0, {}))
        display.show_event(failed)
        assert display.describe_remainder() == "extract (2 tasks), filter (1 task)"


# --- the graph ---


def double(source: Path, output: Path, report: Report) -> dict[str, Any]:
    text = source.read_text() if source.exists() else "a"
    output.write_text(text * 2)
    return {"length": len(text) * 2}


def fail_first(path: Path, job: Job, report: Report) -> dict[str, Any]:
    with path.open("a") as file:
        file.write("x")
    if len(path.read_text()) == 1:
        raise ValueError("at first")
    return job(report)


class Chain:
    """Three stages of four tasks: each doubles what the one before it made."""

    def __init__(
        self,
        folder: Path,
        executor: ExecutorConfig,
        wrapped: Callable[[str, Job], Job] | None = None,
    ):
        self.folder, self.executor, self.wrapped = (
            folder,
            executor,
            wrapped or (lambda name, job: job),
        )

    def task(self, stage: str, before: str, inputs: list[Any], number: int) -> Task:
        name, output = f"{stage}/{number}", f"{stage}-{number}"
        job = partial(double, self.folder / f"{before}-{number}", self.folder / output)
        return Task(
            name,
            inputs,
            [output],
            self.wrapped(name, job),
            1,
            fallback_result=lambda reason: {"length": 0},
        )

    def run(self) -> tuple[list[Sequence[TaskRecord]], StageRunner]:
        """The records of each stage, and the runner that made them."""

        def next_stage(stage: str, before: str, then: NextStage | None = None) -> NextStage:
            def tasks(number: str, record: TaskRecord) -> list[Task]:
                return [self.task(stage, before, record.digests, int(number))]

            return NextStage(stage, stage, tasks, then)

        with lock_folder(self.folder) as lock:
            runner = StageRunner(self.folder, self.executor, lock)
            try:
                tasks = [self.task("one", "none", [], number) for number in range(4)]
                then = next_stage("two", "one", next_stage("three", "two"))
                stages = [runner.run_stage("one", tasks, unit="file", code="one", next_stage=then)]
                for stage, before in (("two", "one"), ("three", "two")):
                    tasks = [
                        self.task(stage, before, record.digests, n)
                        for n, record in enumerate(stages[-1])
                    ]
                    stages.append(runner.run_stage(stage, tasks, unit="file", code=stage))
            finally:
                runner.close()
        return stages, runner

    def events(self) -> list[tuple[str, int, int]]:
        """Stage, tasks and tasks done ahead of each stage that had something to do."""
        lines = read_events(self.folder / "events.jsonl")
        return [(event["stage"], event["tasks"], event["eager"]) for event in lines]


def test_stages_find_what_was_made_ahead_and_the_next_run_finds_everything(tmp_path: Path) -> None:
    (tmp_path / "ahead").mkdir()
    (tmp_path / "plain").mkdir()
    chain = Chain(tmp_path / "ahead", LocalExecutorConfig(workers=2))
    stages, runner = chain.run()
    assert (runner.num_run, runner.num_reused) == (12, 0)
    assert chain.events() == [("one", 4, 8)]
    plain = Chain(tmp_path / "plain", InlineExecutorConfig())
    expected, _ = plain.run()
    assert plain.events() == [("one", 4, 0), ("two", 4, 0), ("three", 4, 0)]
    assert [[r.result for r in records] for records in stages] == [
        [r.result for r in records] for records in expected
    ]
    assert [[r.digests for r in records] for records in stages] == [
        [r.digests for r in stage] for stage in expected
    ]
    _, again = chain.run()
    assert (again.num_run, again.num_reused) == (0, 12)


def test_what_failed_ahead_has_all_its_tries_in_its_own_stage(tmp_path: Path) -> None:
    def wrapped(name: str, job: Job) -> Job:
        replaced: dict[str, Job] = {
            "two/1": partial(fail_first, tmp_path / "tries", job),
            "three/2": raise_failure,
        }
        return replaced.get(name, job)

    folder = tmp_path / "chain"
    folder.mkdir()
    chain = Chain(
        folder, LocalExecutorConfig(workers=2, max_attempts=2, backoff_seconds=0), wrapped
    )
    stages, runner = chain.run()
    assert [record.result["length"] for record in stages[1]] == [4] * 4
    assert [record.result["length"] for record in stages[2]] == [8, 8, 0, 8]
    assert chain.events() == [("one", 4, 5), ("two", 1, 0), ("three", 2, 0)]
    assert runner.num_run == 11
    assert [(entry["task"], entry["attempts"]) for entry in read_quarantine(folder)] == [
        ("three/2", 2)
    ]


def test_one_task_may_enable_many_of_which_few_wait_at_a_time_and_their_own_successors_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As split_inputs enables the blocks of a file, of which there may be millions."""
    monkeypatch.setattr(module, "MAX_QUEUED", 3)
    executor, order = InlineExecutor(), list[str]()
    queues = EagerJobs()

    def build(stage: str, item: str) -> Task:
        return Task(f"{stage}/{item}", [], [], partial(note, order, f"{stage}/{item}"), 1)

    signatures = NextStage("signatures", "", lambda name, record: [build("signatures", name)])
    extract = NextStage(
        "extract",
        "",
        lambda name, record: (build("extract", f"{name}.{n}") for n in range(5)),
        signatures,
    )
    journal = Journal(tmp_path)
    eager = EagerTasks(journal, EarlierResults(journal, 0), extract, queues, 7.0)
    assert queues.seconds == 7.0
    record = TaskRecord.from_result("", (), {})
    eager.journal.insert_record(
        "extract/a.1", replace(record, key=build("extract", "a.1").compute_key("")), False, None
    )
    for name in "ab":
        eager.submit_next(build("split_inputs", name), record, {}, 0)
    most = 0
    while queues:
        most = max(most, len(queues))
        number, job = (queues.later_jobs or queues.next_jobs).popleft()
        for event in executor.run_jobs([job]):
            eager.record_early_result(EagerTaskEvent(replace(event, index=number)))
    assert most == 3
    assert eager.done == {"extract": 9, "signatures": 10}
    both = [
        f"{stage}/{name}.{n}"
        for stage in ("extract", "signatures")
        for name in "ab"
        for n in range(5)
    ]
    assert sorted(order) == sorted({*both} - {"extract/a.1"})
    places = {name: place for place, name in enumerate(order)}
    assert all(places[f"signatures/b.{n}"] - places[f"extract/b.{n}"] <= 3 for n in range(5))


def note(order: list[str], name: str, report: Report) -> dict[str, Any]:
    order.append(name)
    return {}


# --- the pipeline ---


@pytest.mark.parametrize(
    ("changes", "stages"),
    [({}, ["filter", "signatures"]), ({"deduplicate": NO_COPIES}, ["filter"])],
)
def test_a_preparation_filters_and_computes_signatures_early_and_makes_the_same_bytes(
    changes: dict[str, Any], stages: list[str], tmp_path: Path
) -> None:
    crawl = make_crawl(tmp_path / "crawl", pages=10)
    for name, executor in (
        ("plain", {"kind": "inline", "block_bytes": 2_000}),
        ("ahead", {"kind": "local", "workers": 2, "block_bytes": 2_000}),
    ):
        prepare_dataset(build_tiny_config(tmp_path / name, crawl, executor=executor, **changes))
    assert hash_files(tmp_path / "ahead") == hash_files(tmp_path / "plain")
    lines = read_events(tmp_path / "ahead" / "events.jsonl")
    events = {event["stage"]: event for event in lines if event["event"] == "stage"}
    blocks = list_blocks(tmp_path / "ahead")
    assert len(blocks) > events["split_inputs"]["tasks"]
    assert events["split_inputs"]["eager"] == (1 + len(stages)) * len(blocks)
    assert not {"extract", *stages} & events.keys()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_never_reaches_a_worker_that_is_still_importing() -> None:
    """Blocked from its first instruction, or it would print a traceback over the message of the
    command.
    """
    worker = WorkerProcess(None)
    try:
        masks = re.findall(
            r"SigBlk:\s*(\w+)", Path(f"/proc/{worker.process.pid}/status").read_text()
        )
        assert int(masks[0], 16) >> (signal.SIGINT - 1) & 1
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        worker.kill()
