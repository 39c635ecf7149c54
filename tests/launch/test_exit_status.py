"""`llmsys train` and `llmsys launch` end with the status of what ended the run, and one message."""

import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from llmsys.errors import LostRankError
from llmsys.launch.launchers.launch_plan import build_launch_plan
from llmsys.launch.launchers.local import find_signal
from llmsys.launch.launchers.multi_host import combine_statuses
from llmsys.launch.launchers.torchrun import _report_first_failure
from llmsys.launch.main import main
from llmsys.launch.train import (
    CRASHED,
    HUNG,
    LAUNCHER_REPORTS,
    LOST_PEER,
    MENDABLE,
    STOPPED,
    UNMET,
    _report_lost_peer,
    is_lost_peer,
)
from tests.helpers.launch_config import HOSTS, build_toy_config, write_toy_config

KILL = "import os, time; os.kill(os.getpid(), {}); time.sleep(60)"


def ending_with(status: int) -> list[str]:
    """A launcher that ends so; below zero, by a signal."""
    return [
        sys.executable,
        "-c",
        KILL.format(-status) if status < 0 else f"raise SystemExit({status})",
    ]


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        (CRASHED, CRASHED, ""),
        (MENDABLE, MENDABLE, ""),
        (LOST_PEER, LOST_PEER, ""),
        (HUNG, HUNG, ""),
        (UNMET, LOST_PEER, ""),
        (STOPPED, STOPPED, ""),
        (130, 130, ""),
        (
            -signal.SIGKILL,
            LOST_PEER,
            "training stopped: a process was killed by signal 9. Checkpoints are intact",
        ),
        (
            256 - signal.SIGSEGV,
            LOST_PEER,
            "training stopped: a process was killed by signal 11. Checkpoints are intact",
        ),
        (0, LOST_PEER, "training stopped: its launcher ended with status 0 before step"),
    ],
)
def test_train_ends_with_the_status_of_its_ranks_and_repeats_no_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ending: int,
    status: int,
    said: str,
) -> None:
    monkeypatch.setattr(
        "llmsys.launch.launchers.local.build_local_command", lambda *_: ending_with(ending)
    )
    monkeypatch.setattr("llmsys.launch.launchers.local.require_datasets", lambda *_: None)
    words = ["train", write_toy_config(tmp_path), "launch.processes=1"]
    try:
        found = main(words)
    except SystemExit as ended:
        found = int(str(ended.code))
    assert found == status
    errors = capsys.readouterr().err
    assert errors.startswith(f"llmsys: error: {said}") if said else errors == ""
    assert errors.count("\n") == bool(said)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        ({"a": 4, "b": 3}, HUNG),
        ({"a": 1, "b": 3}, CRASHED),
        ({"a": 2, "b": 4}, MENDABLE),
        ({"a": 3}, LOST_PEER),
    ],
)
def test_a_run_on_hosts_ends_with_its_cause_which_a_rank_has_named(
    tmp_path: Path, statuses: dict[str, int], status: int
) -> None:
    with pytest.raises(SystemExit, match=str(status)):
        combine_statuses(
            statuses, build_launch_plan(build_toy_config(tmp_path), HOSTS, "torchrun", 2, 3)
        )


def test_lost_hosts_are_one_message_and_status_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = build_launch_plan(build_toy_config(tmp_path), HOSTS, "torchrun", 2, 3)
    with pytest.raises(
        LostRankError,
        match="a ended with status 3, b lost its ssh connection, or could not be reached",
    ):
        combine_statuses({"a": 3, "b": 255}, start)
    monkeypatch.setattr(
        "llmsys.launch.launchers.multi_host.run_commands",
        lambda *_: combine_statuses({"a": 3, "b": UNMET}, start),
    )
    monkeypatch.setattr("llmsys.launch.launchers.launch_plan.require_hosts", lambda *_: None)
    assert main(["launch", write_toy_config(tmp_path), "nodes=10.9.8.1:2,10.9.8.2:2"]) == LOST_PEER
    assert capsys.readouterr().err.count("llmsys: error") == 1


@pytest.mark.parametrize(
    ("codes", "status", "message"),
    [
        ((HUNG, LOST_PEER), HUNG, ""),
        ((LOST_PEER, -9), LOST_PEER, "rank 1 (process 10) was killed by signal 9"),
        (
            (LOST_PEER, -15),
            LOST_PEER,
            "rank 0 lost contact with another rank: Broken pipe. Checkpoints are intact",
        ),
        ((1, 3), 1, ""),
    ],
)
def test_torchrun_gives_one_message_whichever_rank_ended_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    codes: tuple[int, ...],
    status: int,
    message: str,
) -> None:
    failures = []
    monkeypatch.setenv(LAUNCHER_REPORTS, "1")
    with caplog.at_level(logging.ERROR):
        for rank, code in enumerate(codes):
            file = tmp_path / f"rank-{rank}.json"
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
            if code == LOST_PEER:
                _report_lost_peer("Broken pipe")
            failures.append(
                (rank, ProcessFailure(local_rank=rank, pid=10, exitcode=code, error_file=str(file)))
            )
        assert _report_first_failure(failures) == status
    assert [record.message.startswith(message) for record in caplog.records] == [True] * bool(
        message
    )


def test_a_rank_under_another_launcher_logs_that_its_peer_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(LAUNCHER_REPORTS, raising=False)
    _report_lost_peer("Broken pipe")
    assert "lost contact with another rank: Broken pipe" in caplog.text


def test_ctrl_c_ends_torchrun_without_a_traceback(repository: Path) -> None:
    code = (
        "import signal\nfrom llmsys.launch.launchers.torchrun import SignalException, "
        "run_elastic_agent\ndef start(): raise SignalException('x', signal.SIGINT)\nraise "
        "SystemExit(run_elastic_agent(start))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=repository, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"), True),
        (
            RuntimeError(
                "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server "
                "shut down"
            ),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_an_error_of_the_store_or_a_collective_is_a_lost_peer_and_a_bug_is_not(
    error: Any, is_lost: bool
) -> None:
    assert is_lost_peer(error) == is_lost


def test_errors_of_the_network_of_torch_are_lost_peers() -> None:
    from torch.distributed import DistNetworkError, DistStoreError

    assert is_lost_peer(DistNetworkError("x"))
    assert is_lost_peer(DistStoreError("x"))


@pytest.mark.parametrize(
    ("status", "number"), [(0, 0), (4, 0), (75, 0), (-9, 9), (137, 9), (247, 9), (143, 15)]
)
def test_the_signal_of_an_exit_status_is_found(status: int, number: int) -> None:
    assert find_signal(status) == number
