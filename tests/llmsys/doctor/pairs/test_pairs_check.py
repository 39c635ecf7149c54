"""A case, its comparison with the plain process, and the shrinking of one that fails."""

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.doctor.pairs import case_rank
from llmsys.doctor.pairs.case_processes import CaseResult, CaseRunner
from llmsys.doctor.pairs.cases import Limits, PairCase, build_default_assignment
from llmsys.doctor.pairs.check import write_datasets
from llmsys.doctor.pairs.comparison import (
    FP32,
    NORM,
    Difference,
    find_action_difference,
    find_difference,
)
from llmsys.doctor.pairs.events import Action, Entry
from llmsys.doctor.pairs.shrink import find_smallest_case

LIMITS = Limits(processes=4)


def build_case(seed: int = 1, **labels: str) -> PairCase:
    chosen = {name.replace("_", " "): label for name, label in labels.items()}
    return PairCase(tuple((build_default_assignment() | chosen).items()), seed)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CaseRunner:
    root = tmp_path_factory.mktemp("pairs")
    write_datasets(root)
    return CaseRunner(root, LIMITS)


@pytest.mark.distributed
def test_every_event_in_one_run_agrees_with_the_plain_process(runner: CaseRunner) -> None:
    events = {
        "evaluate",
        "save",
        "evaluate_and_save",
        "skip",
        "overflow",
        "rewind",
        "signal",
        "branch",
    }
    labels: dict[str, Any] = {"kill": "2 tensor", "experts": "all", "ema": "on"} | dict.fromkeys(
        events, "yes"
    )
    case = build_case(**labels)
    assert runner.run_case(case).problem == ""


@pytest.mark.distributed
@pytest.mark.parametrize("labels", [
    {"attention": "python", "feed-forward": "python", "layer types": "sliding", "shard": "2"},
    {"objective": "classification", "sources": "images", "engine": "ddp", "shard": "2"},
])  # fmt: skip
def test_own_blocks_and_images_agree_with_the_plain_process(
    labels: dict[str, str], runner: CaseRunner
) -> None:
    chosen = build_default_assignment() | labels | {"kill": "2 zero-1", "evaluate": "yes"}
    assert runner.run_case(PairCase(tuple(chosen.items()), 1)).problem == ""


@pytest.mark.distributed
def test_a_rank_that_raises_fails_its_case_with_the_error(
    runner: CaseRunner, tmp_path: Path
) -> None:
    # A folder without the datasets.
    result = CaseRunner(tmp_path, LIMITS).run_case(build_case())
    assert not result.has_passed
    assert "manifest.json does not exist" in result.failure


def crash_second_rank() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.distributed
def test_a_native_crash_is_named_before_the_errors_of_its_peers(runner: CaseRunner) -> None:
    crashed = CaseRunner(runner.root, LIMITS, prepare=crash_second_rank)
    failure = crashed.run_case(build_case(shard="2")).failure
    assert failure.startswith("rank 1 ended with SIGSEGV\nFatal Python error: Segmentation fault")
    assert "crash_second_rank" in failure


def test_a_refused_case_is_no_failure(tmp_path: Path) -> None:
    result = CaseRunner(tmp_path, LIMITS).run_case(build_case(engine="ddp", pipeline="2"))
    assert result.refusal.startswith("engine.kind: torch with data_parallel=ddp runs no stages")
    assert not result.failure


def test_a_failing_case_shrinks_to_the_choices_that_make_it_fail() -> None:
    tried = []

    def run_case(case: PairCase) -> CaseResult:
        tried.append(case)
        labels = case.labels
        fails = labels["pipeline"] == "2" and labels["ema"] == "on"
        return CaseResult(case, failure="wrong" if fails else "")

    failed = run_case(
        build_case(
            pipeline="2",
            ema="on",
            norm="layernorm",
            position="alibi",
            clipping="none",
            save="yes",
            tied="yes",
        )
    )
    smallest = find_smallest_case(failed, run_case)
    assert smallest.case.list_choices() == {"pipeline": "2", "ema": "on"}
    assert smallest.failure == "wrong"
    assert len(tried) < 20


def test_a_shrunk_case_is_never_one_that_is_refused() -> None:
    def run_case(case: PairCase) -> CaseResult:
        if case.labels["position"] == "rope" and case.labels["attention"] == "lsh":
            return CaseResult(case, refusal="position.kind: rope is no position of lsh")
        return CaseResult(case, failure="wrong" if case.labels["attention"] == "lsh" else "")

    smallest = find_smallest_case(
        run_case(build_case(attention="lsh", position="learned", ema="on")), run_case
    )
    assert smallest.case.list_choices() == {"attention": "lsh", "position": "learned"}


def test_the_first_number_that_differs_is_named_with_its_band() -> None:
    entry = Entry(Action("train", 3), loss=2.0, norm=1.0)
    found = find_difference(5, entry, 2.0, 1.01, {}, FP32)
    assert (
        str(found)
        == "train step 3: the gradient norm is 1, plainly 1.01 (apart by 9.9e-03, allowed 1e-05)"
    )


def test_a_loss_that_is_no_number_is_a_difference() -> None:
    entry = Entry(Action("train", 1), loss=float("nan"), norm=1.0)
    found = find_difference(0, entry, 2.0, 1.0, {}, FP32)
    assert found is not None
    assert found.what == "the loss"


def test_a_run_that_does_another_thing_is_a_difference() -> None:
    found = find_action_difference(
        [Action("train", 1), Action("save", 1)], [Action("train", 1), Action("train", 2)]
    )
    assert str(found).startswith("save step 1: the action; train step 2 was expected")


def test_what_rounding_grows_into_at_the_end_is_compared_by_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that differs at its end is run again and looked at after each step."""
    asked: list[tuple[str, list[Path], str]] = []
    apart = Difference(3, "train step 4", NORM, 5.5, 4.9, 0.1, 0.03)

    def run_and_compare(
        self: CaseRunner, case: PairCase, folder: Path, phases: Any, compare: Any, arguments: Any
    ) -> CaseResult:
        runs = [phase.config.run.folder for phase in phases]
        assert case.labels == arguments[0]
        asked.append((compare.__name__, runs, case.labels["inspection"]))
        return CaseResult(case, apart if len(asked) == 1 else None)

    monkeypatch.setattr(CaseRunner, "_run_and_compare", run_and_compare)
    runner = CaseRunner(tmp_path, LIMITS)
    case = build_case(inspection="the end", kill="2 fsdp")
    assert runner.run_case(case).has_passed
    [(first, runs, whole), (second, watched, steps)] = asked
    assert (first, whole) == ("compare_case", "the end")
    assert (second, steps) == ("compare_watched_case", "each step")
    assert watched == [run.parent / "watched" / run.name for run in runs]
    # a run that is looked at after each step is not run again
    asked.clear()
    assert runner.run_case(build_case(kill="2 fsdp")).difference == apart
    assert len(asked) == 1


def test_a_difference_stays_unless_the_watched_run_agrees_and_has_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = Difference(1, "train step 1", NORM, 5.5, 4.9, 0.1, 0.03)
    torch.save(apart, tmp_path / "difference.pt")
    state = {"weight": torch.tensor([1.0, -0.0])}
    run = [Entry(Action("train", 1), 2.0, 3.0), Entry(Action("save", 1), tensors=state)]
    watched = [replace(run[0], tensors={"weight": torch.ones(2)}), run[1]]
    entries = {"run": run, "watched": watched}
    monkeypatch.setattr(case_rank, "load_entries", lambda folder, phases: entries[phases])
    found: list[Difference | None] = [None]
    monkeypatch.setattr(case_rank, "find_case_difference", lambda *_: found[0])

    def find() -> Difference | None:
        return case_rank.find_watched_difference(tmp_path, {}, "run", "watched")  # type: ignore[arg-type]

    assert find() is None
    own = replace(apart, place=0)
    found[0] = own
    assert find() == own
    found[0] = None
    for other in (
        [replace(run[0], norm=3.0000000001), run[1]],
        [replace(run[0], loss=float("nan")), run[1]],
        [run[0], replace(run[1], tensors={"weight": torch.tensor([1.0, 1e-30])})],
        [run[0], replace(run[1], tensors={})],
        [run[0]],
    ):
        entries["watched"] = other
        assert find() == apart


def test_no_two_threads_read_the_status_of_a_process_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """multiprocessing polls the processes of all threads as it starts one."""
    reading = threading.Lock()
    together: list[int] = []
    read_signed = forkserver.read_signed

    def read_slowly(descriptor: int) -> Any:
        if not reading.acquire(blocking=False):
            together.append(descriptor)
            return read_signed(descriptor)
        try:
            time.sleep(0.02)
            return read_signed(descriptor)
        finally:
            reading.release()

    monkeypatch.setattr(forkserver, "read_signed", read_slowly)
    runner = CaseRunner(tmp_path, LIMITS)
    context = multiprocessing.get_context("forkserver")

    def run_processes(thread: int) -> list[str]:
        return [
            runner._wait([context.Process(target=os.getpid) for _ in range(2)], tmp_path, "none")
            for _ in range(5)
        ]

    with ThreadPoolExecutor(4) as threads:
        failures = list(threads.map(run_processes, range(4)))
    assert failures == [[""] * 5] * 4
    assert not together
