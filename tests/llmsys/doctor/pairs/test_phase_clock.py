"""The clock of a phase counts work, and waiting of all ranks; not what other programs take."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from llmsys.doctor.pairs import case_processes, phase_clock
from llmsys.doctor.pairs.case_processes import CaseRunner
from llmsys.doctor.pairs.cases import Limits
from llmsys.doctor.pairs.phase_clock import PhaseClock, count_interval


@pytest.mark.parametrize(
    ("worked", "counted"),
    [
        ([5.0], 5.0),  # a core of its own
        ([0.5, 0.2], 0.5),  # a tenth of a core: other programs have the rest
        ([0.0, 0.01], 5.0),  # all wait for a peer that is lost
        ([7.0], 5.0),  # threads, or compilers beside each other
        ([], 5.0),
    ],
)
def test_an_interval_counts_the_work_of_its_busiest_process_or_all_of_it(
    worked: list[float], counted: float
) -> None:
    assert count_interval(5.0, worked) == counted


def test_the_clock_reads_what_a_process_and_its_children_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = PhaseClock()
    pid = os.getpid()
    clock.advance([pid])
    before = sum(os.times()[:4])
    child = os.fork()
    if not child:
        while time.process_time() < 0.3:
            sum(range(10_000))
        os._exit(0)
    os.waitpid(child, 0)
    spent = sum(os.times()[:4]) - before
    now = 1_000.0
    counted = clock.seconds
    monkeypatch.setattr(phase_clock, "WAITING_SHARE", 0.0)
    assert clock.advance([pid]) - counted == pytest.approx(spent, abs=0.2)


def _wait_forever() -> None:
    signal.pause()


def test_ranks_that_all_wait_are_ended_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(case_processes, "LOOK_SECONDS", 0.05)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_wait_forever) for _ in range(2)]
    failure = CaseRunner(tmp_path, Limits())._wait(processes, tmp_path, "0", seconds=0.5)
    assert failure == "rank 0 did not end within 0.5 s of work, or of waiting"
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [-signal.SIGKILL] * 2
