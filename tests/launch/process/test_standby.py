"""A standby waits without being a rank, becomes the rank that its environment names, and ends
with its starter.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from llmsys.launch.launchers.restart_agent import Rendezvous, run_with_restarts
from llmsys.launch.launchers.torchrun import use_standby_ranks
from llmsys.launch.process.signal_forwarding import list_descendant_ranks
from llmsys.launch.process.standby import IDLE_NAME, StandbyRanks
from llmsys.launch.train import _wait_as_standby
from tests.helpers.paths import ROOT
from tests.helpers.process import PATIENCE_SECONDS, wait_until

# Like launch/train.py, whose name makes it a rank: it imports nothing, and writes what it was
# given.
RANK = """
import os, pathlib, sys, time
from llmsys.launch.process.standby import is_standby, wait_as_rank
folder = pathlib.Path(sys.argv[1])
if is_standby():
    wait_as_rank((folder / f"ready-{os.getpid()}").touch)
(folder / f"rank-{os.environ['RANK']}").write_text(repr(sorted(os.environ)) + sys.stdin.read())
while not (folder / "end").exists():
    time.sleep(0.02)
"""
# An agent of one host: it runs a rank, and loses it once.
AGENT = """
import os, pathlib, subprocess, sys, time
from llmsys.launch.process.standby import VARIABLE, wait_for_turn
folder = pathlib.Path(sys.argv[1])
if VARIABLE in os.environ:
    print(os.getpid(), file=(folder / "prepared").open("a"))
    wait_for_turn()
    (folder / "end").touch()
command = [sys.executable, str(folder / "train.py"), str(folder)]
rank = subprocess.Popen(command, env=os.environ | {"RANK": "0"})
while rank.poll() is None and not (folder / "prepared").exists():
    time.sleep(0.05)
rank.kill() if not (folder / "end").exists() else rank.wait()
print(os.getpid(), file=(folder / "agents").open("a"))
sys.exit(0 if (folder / "end").exists() else 3)
"""


@pytest.fixture
def standby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandbyRanks]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "train.py").write_text(RANK)
    made = StandbyRanks([sys.executable, "-u", str(tmp_path / "train.py"), str(tmp_path)], 2)
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "the standbys are not ready")
    yield made
    (tmp_path / "end").touch()
    for process in made.waiting:
        process.kill()
        process.wait()


def test_a_standby_is_no_rank_until_it_is_given_an_environment(
    tmp_path: Path, standby: StandbyRanks
) -> None:
    assert list_descendant_ranks(os.getpid()) == []
    first, second = standby.waiting
    first.send_signal(signal.SIGUSR2)  # asks ranks for a profile
    assert standby.take([*standby.command, "other"], {}) is None
    environment = {"RANK": "7", "PATH": "/bin"}
    assert standby.take(standby.command, environment) is first
    wait_until((tmp_path / "rank-7").exists, "the standby did not begin")
    # exactly these variables, and no input that it shares with its starter
    assert set(eval((tmp_path / "rank-7").read_text())) - {"LC_CTYPE"} == {"RANK", "PATH"}
    assert [one.pid for one in list_descendant_ranks(os.getpid())] == [first.pid]
    second.stdin.close()  # as when the starter is gone
    assert second.wait(PATIENCE_SECONDS) == 0
    assert standby.take(standby.command, environment) is None
    (tmp_path / "end").touch()
    assert first.wait(PATIENCE_SECONDS) == 0


def test_torchs_agent_takes_standbys_first_and_starts_new_processes_then(
    tmp_path: Path, standby: StandbyRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SubprocessHandler, "_popen", SubprocessHandler._popen)
    use_standby_ranks(standby)
    waiting = [process.pid for process in standby.waiting]
    handlers = [
        SubprocessHandler(
            standby.command[0], tuple(standby.command[1:]), {"RANK": rank}, None, None, 0, None
        )
        for rank in "012"
    ]
    wait_until(lambda: len(list(tmp_path.glob("rank-*"))) == 3, "not every rank began")
    pids = [handler.proc.pid for handler in handlers]
    assert pids[:2] == waiting
    assert pids[2] not in waiting
    handlers[0].close(signal.SIGKILL)  # by its process group
    assert handlers[0].proc.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    (tmp_path / "end").touch()
    assert [handler.proc.wait(PATIENCE_SECONDS) for handler in handlers[1:]] == [0, 0]


def test_a_restart_begins_with_the_agent_that_was_prepared_while_ranks_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name, seconds in (("SETTLE_SECONDS", 0.0), ("LOOK_SECONDS", 0.05)):
        monkeypatch.setattr(f"llmsys.launch.launchers.restart_agent.{name}", seconds)
    (tmp_path / "train.py").write_text(RANK)
    (tmp_path / "agent.py").write_text(AGENT)
    command = [sys.executable, str(tmp_path / "agent.py"), str(tmp_path)]
    assert run_with_restarts(command, Rendezvous("127.0.0.1", 1), 2, 100, has_standby=True) == 0
    first, second = (tmp_path / "agents").read_text().split()
    assert second == (tmp_path / "prepared").read_text().split()[0] != first


# the last one leaves the usual levels
@pytest.mark.parametrize(("rank", "lines"), [("1", 0), ("0", 1)])
def test_a_standby_logs_as_the_rank_that_it_became(
    rank: str, lines: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def become_rank(import_everything: object) -> float:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        return 8.04

    monkeypatch.setattr("llmsys.launch.train.wait_as_rank", become_rank)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    _wait_as_standby(["train/demo"])
    told = (
        "[rank 0] this restart began with processes that had imported torch: 8.0 s of imports "
        "saved\n"
    )
    assert capfd.readouterr().err == told * lines


def test_the_name_of_an_idle_standby_fits_the_kernel() -> None:
    assert len(IDLE_NAME) <= 15
