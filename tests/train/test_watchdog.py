"""The rank that hangs is named within the timeout, with the stacks of every rank."""

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from llmsys.train.watchdog import HUNG, Heartbeat, Watchdog, culprits
from tests.helpers.process import wait_until

TIMEOUT_SECONDS = 1.5


def beat(rank: int, beats: int, age: float = 0.0, step: int = 5) -> Heartbeat:
    return Heartbeat(rank, "far-away", 1000 + rank, step, "saving", beats, age_seconds=age)


def test_silent_ranks_are_named_before_those_that_are_behind() -> None:
    [named] = culprits([beat(0, 9), beat(1, 7, age=40.0), beat(2, 8)], 3, silent_after_seconds=20.0)
    assert named == (
        "rank 1 on far-away (process 1001) has been silent for 40 s, since saving of step 5; "
        "its process is unknown, on another host"
    )
    assert culprits([beat(0, 9)], 2, 20.0) == ["rank 1 was never heard of"]


def test_the_rank_that_is_behind_is_named_and_equals_are_not() -> None:
    [named] = culprits([beat(0, 9), beat(1, 9), beat(2, 8, step=4)], 3, 20.0)
    assert named == "rank 2 on far-away (process 1002) is still in saving of step 4, and others are further"
    assert culprits([beat(0, 9), beat(1, 9)], 2, 20.0) == []


def _rank(rank: int, folder: str) -> None:
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
        watchdog.beat(step, "all-reduce")
        dist.all_reduce(torch.ones(1))
        Path(folder, f"step-{rank}").write_text(str(step))


@pytest.mark.distributed
def test_a_stopped_rank_is_named_and_everyone_leaves_with_stacks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path)), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        wait_until((tmp_path / "step-0").exists, "the ranks did not start")
        os.kill(ranks[0].pid or 0, signal.SIGSTOP)
        wait_until(lambda: (tmp_path / "heartbeats" / "named").exists(), "nobody was named")
        for process in ranks:
            process.join(30)
        assert [process.exitcode for process in ranks] == [HUNG, HUNG]
    finally:
        for process in ranks:
            process.kill()
    # Rank 0 holds the store of the group, and is the one that was stopped.
    said = (tmp_path / "log-1").read_text()
    assert "no step was finished for 2 s (train.hang_timeout_seconds), in all-reduce of step" in said
    assert f"rank 0 on {os.uname().nodename} (process {ranks[0].pid}) has been silent" in said
    assert "its process is stopped" in said
    assert "no step was finished" not in (tmp_path / "log-0").read_text()
    [event] = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert event["event"] == "hang"
    assert event["named"][0].startswith("rank 0")
    for rank in range(2):
        assert "in _rank\n" in (tmp_path / "heartbeats" / f"rank-{rank:05d}.stacks").read_text()
