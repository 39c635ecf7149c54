"""The rank that hangs is named within the timeout, with the stacks of every rank."""

import ctypes
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmsys.events import read_events
from llmsys.train.watchdog import (
    HUNG,
    Heartbeat,
    Watchdog,
    describe_hanging_ranks,
    is_any_at_work,
    is_hang_named,
)
from llmsys.train.work_meter import WORK_BYTES, WorkMeter
from tests.helpers.process import PATIENCE_SECONDS, wait_until
from tests.helpers.ranks import PRELOADED

TIMEOUT_SECONDS = 1.5


def build_heartbeat(rank: int, beats: int, age: float = 0.0, step: int = 5) -> Heartbeat:
    return Heartbeat(rank, "far-away", 1000 + rank, step, "saving", beats, age_seconds=age)


def test_silent_ranks_are_named_before_those_that_are_behind() -> None:
    [named] = describe_hanging_ranks(
        [build_heartbeat(0, 9), build_heartbeat(1, 7, age=40.0), build_heartbeat(2, 8)],
        3,
        silent_after_seconds=20.0,
    )
    assert named == (
        "rank 1 on far-away (process 1001) has been silent for 40 s, since saving of step 5; "
        "its process is unknown, on another host"
    )
    assert describe_hanging_ranks([build_heartbeat(0, 9)], 2, 20.0) == [
        "rank 1 has sent no heartbeat"
    ]


def test_the_rank_that_is_behind_is_named_and_equals_are_not() -> None:
    [named] = describe_hanging_ranks(
        [build_heartbeat(0, 9), build_heartbeat(1, 9), build_heartbeat(2, 8, step=4)], 3, 20.0
    )
    assert (
        named
        == "rank 2 on far-away (process 1002) is still in saving of step 4, while others are ahead"
    )
    assert describe_hanging_ranks([build_heartbeat(0, 9), build_heartbeat(1, 9)], 2, 20.0) == []


def test_the_stage_of_a_pipeline_that_others_wait_for_is_named_with_its_micro_batch() -> None:
    busy = replace(
        build_heartbeat(1, 9),
        phase="forward and backward",
        work="backward of micro-batch 3 in stage 2",
    )
    [named] = describe_hanging_ranks([build_heartbeat(0, 9), busy], 2, 20.0)
    assert named == (
        "rank 1 on far-away (process 1001) is still in forward and backward (backward of "
        "micro-batch 3 in stage 2) of step 5, while others wait"
    )
    [named] = describe_hanging_ranks(
        [build_heartbeat(0, 9), replace(busy, age_seconds=40.0)], 2, 20.0
    )
    assert (
        "silent for 40 s, since forward and backward (backward of micro-batch 3 in stage 2) of "
        "step 5; its"
    ) in named


def _get_context() -> Any:
    """Fresh processes that need not import torch again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _rank(rank: int, folder: str, keeps_lock: bool = False) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch.distributed as dist

    from llmsys.log import configure_logging

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    configure_logging(stream=open(f"{folder}/log-{rank}", "w"))  # noqa: SIM115
    watchdog = Watchdog(Path(folder), TIMEOUT_SECONDS)
    for step in range(1, 100_000):
        watchdog.report_phase(step, "all-reduce")
        dist.all_reduce(torch.ones(1))
        if keeps_lock and (rank, step) == (0, 3):
            ctypes.PyDLL(None).sleep(1000)
        Path(folder, f"step-{rank}").write_text(str(step))


@contextmanager
def start_two_ranks(folder: Path, keeps_lock: bool = False) -> Iterator[list[BaseProcess]]:
    context = _get_context()
    ranks = [
        context.Process(target=_rank, args=(rank, str(folder), keeps_lock), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        wait_until((folder / "step-0").exists, "the ranks did not start")
        yield ranks
    finally:
        for process in ranks:
            process.kill()


def read_stacks(folder: Path, rank: int) -> str:
    return (folder / "heartbeats" / f"rank-{rank:05d}.stacks").read_text()


def read_collectives(folder: Path, rank: int) -> list[dict[str, Any]]:
    trace = pickle.loads((folder / "heartbeats" / f"collectives-rank-{rank}").read_bytes())
    entries: list[dict[str, Any]] = trace["entries"]
    return entries


@pytest.mark.distributed
def test_a_stopped_rank_is_named_and_everyone_leaves_with_stacks(tmp_path: Path) -> None:
    with start_two_ranks(tmp_path) as ranks:
        os.kill(ranks[0].pid or 0, signal.SIGSTOP)
        wait_until((tmp_path / "heartbeats" / "named").exists, "nobody was named")
        for process in ranks:
            process.join(PATIENCE_SECONDS)
        assert [process.exitcode for process in ranks] == [HUNG, HUNG]
    # Rank 0 holds the store of the group, and is the one that was stopped.
    said = (tmp_path / "log-1").read_text()
    assert (
        "no step has finished for 2 s (train.hang_timeout_seconds), in all-reduce of step" in said
    )
    assert f"rank 0 on {os.uname().nodename} (process {ranks[0].pid}) has been silent" in said
    assert "its process is stopped" in said
    assert "no step has finished" not in (tmp_path / "log-0").read_text()
    [event] = read_events(tmp_path / "events.jsonl")
    assert event["event"] == "hang"
    assert event["named"][0].startswith("rank 0")
    assert all("in _rank\n" in read_stacks(tmp_path, rank) for rank in range(2))
    command = (
        f"fr_trace --allow-incomplete-ranks --prefix collectives-rank- {tmp_path / 'heartbeats'}`"
    )
    assert command in said
    calls = [read_collectives(tmp_path, rank)[-1] for rank in range(2)]
    assert [call["profiling_name"] for call in calls] == ["gloo:all_reduce"] * 2
    assert calls[1]["input_sizes"] == [[1]]


@pytest.mark.distributed
def test_a_rank_in_which_no_python_can_run_is_named_and_writes_its_stacks(tmp_path: Path) -> None:
    with start_two_ranks(tmp_path, keeps_lock=True) as ranks:
        ranks[1].join(PATIENCE_SECONDS)
        assert ranks[1].exitcode == HUNG
        assert "rank 0 on" in (tmp_path / "log-1").read_text()
        wait_until(
            lambda: "in _rank\n" in read_stacks(tmp_path, 0), "the stuck rank wrote no stacks"
        )
    assert "in _rank\n" in read_stacks(tmp_path, 1)


@pytest.mark.distributed
def test_a_run_that_was_suspended_whole_goes_on(tmp_path: Path) -> None:
    with start_two_ranks(tmp_path) as ranks:
        for process in ranks:
            os.kill(process.pid or 0, signal.SIGSTOP)
        time.sleep(2 * TIMEOUT_SECONDS)
        step = int((tmp_path / "step-0").read_text() or 0)
        for process in ranks:
            os.kill(process.pid or 0, signal.SIGCONT)
        wait_until(
            lambda: int((tmp_path / "step-0").read_text() or 0) > step + 1, "the run did not go on"
        )
        assert not (tmp_path / "heartbeats" / "named").exists()
        assert [process.exitcode for process in ranks] == [None, None]


def _start_slowly(rank: int, folder: str, hangs: bool) -> None:
    """Rank 0 builds for three time-outs, and then hangs if it is to; rank 1 waits for it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch.distributed as dist

    from llmsys.log import configure_logging

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2
    )
    configure_logging(stream=open(f"{folder}/log-{rank}", "w"))  # noqa: SIM115
    watchdog = Watchdog(Path(folder), TIMEOUT_SECONDS)
    watchdog.report_phase(0, "building the model")
    if rank == 0:
        until = time.monotonic() + 3 * TIMEOUT_SECONDS
        while time.monotonic() < until:
            sum(range(1000))
        Path(folder, "built").touch()
        if hangs:
            time.sleep(1000)
    dist.all_reduce(torch.ones(1))
    watchdog.report_phase(1, "forward and backward")
    watchdog.close()
    # A process that ends while gloo's threads run may be aborted: "terminate called without an
    # active exception".
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("hangs", [False, True])
def test_a_start_may_be_slow_while_a_rank_is_at_work_and_a_hang_in_it_is_named(
    tmp_path: Path, hangs: bool
) -> None:
    context = _get_context()
    ranks = [
        context.Process(target=_start_slowly, args=(rank, str(tmp_path), hangs), daemon=True)
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_SECONDS)
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("log-*")))
    codes = [process.exitcode for process in ranks]
    assert (tmp_path / "built").exists(), (codes, said)
    if hangs:
        # a busy machine may let the other fail in its collective before it has left
        assert HUNG in codes, said
        assert 0 not in codes, said
    else:
        assert codes == [0, 0], said
    assert (
        said.count(
            "no step has finished for 2 s (train.hang_timeout_seconds), in building the model"
        )
        == hangs
    )


def test_work_is_computing_reading_and_what_children_compute(tmp_path: Path) -> None:
    meter = WorkMeter(work_seconds=0.2)
    time.sleep(0.3)
    assert meter.measure_idle_seconds() >= 0.3
    until = time.process_time() + 0.3
    while time.process_time() < until:
        # what the calling thread does is not counted
        thread = threading.Thread(target=sum, args=(range(100_000),))
        thread.start()
        thread.join()
    assert meter.measure_idle_seconds() == 0.0
    (tmp_path / "large").write_bytes(bytes(2 * WORK_BYTES))
    assert meter.measure_idle_seconds() == 0.0
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait_until(
            lambda: psutil.Process(child.pid).cpu_times().user > 0.3, "the child does not compute"
        )
        assert meter.measure_idle_seconds() == 0.0
    finally:
        child.kill()
        child.wait()
    meter.measure_idle_seconds()
    time.sleep(0.2)
    assert meter.measure_idle_seconds() >= 0.2


def test_other_processes_are_not_looked_at_while_this_one_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read of each, for which a computing thread gives the lock of the interpreter away, takes
    seconds where there are hundreds, and a beat that comes late is taken for a hang.
    """
    meter = WorkMeter(work_seconds=0.2)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("other processes were looked at")

    monkeypatch.setattr(psutil.Process, "children", fail)
    until = time.process_time() + 0.3
    while time.process_time() < until:
        thread = threading.Thread(target=sum, args=(range(100_000),))
        thread.start()
        thread.join()
    assert meter.measure_idle_seconds() == 0.0
    with pytest.raises(AssertionError, match="looked at"):
        meter.measure_idle_seconds()


def test_a_start_lasts_no_longer_when_a_rank_is_stopped_or_gone() -> None:
    at_work = build_heartbeat(0, 1)
    assert is_any_at_work([at_work], 10, 10)
    assert not is_any_at_work([replace(at_work, idle_seconds=11)], 10, 10)
    assert not is_any_at_work([replace(at_work, idle_seconds=6, age_seconds=5)], 10, 10)
    assert not is_any_at_work([at_work, build_heartbeat(1, 1, age=11)], 10, 10)


def test_the_beats_of_a_phase_after_the_first_have_no_more_than_the_timeout(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, 1000)
    try:
        watchdog.report_phase(1, "forward and backward")
        assert watchdog._may_take_longer()
        watchdog.report_phase(2, "forward and backward")
        assert not watchdog._may_take_longer()
    finally:
        watchdog.close()


def test_a_hang_that_was_named_in_an_earlier_start_is_not_this_ones(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats" / "named").touch()
    assert is_hang_named(tmp_path, time.time() - 60)
    assert not is_hang_named(tmp_path, time.time() + 60)
