"""Laws of llmsys.launch.launchers.restart_agent: losses are sat out as long as there is patience,
and no agent is waited for
in vain.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.run import RunConfig
from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.launchers.host_commands import HostCommand, build_torchrun_command
from llmsys.launch.launchers.launch_plan import build_launch_plan
from llmsys.launch.launchers.multi_host import run_commands
from llmsys.launch.launchers.restart_agent import Rendezvous, run_with_restarts
from llmsys.launch.launchers.restart_agent import main as restart_agent
from llmsys.launch.launchers.torchrun import main as torchrun
from llmsys.launch.train import LOST_PEER, MENDABLE, STOPPED, UNMET
from llmsys.parallel.port import find_free_port

COUNTED = """
import pathlib, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
statuses = [int(one) for one in sys.argv[2].split(",")]
sys.exit(statuses[min(len(starts.read_text()), len(statuses)) - 1])
"""
STUCK_ONCE = """
import pathlib, sys, time
first = pathlib.Path(sys.argv[1])
if not first.exists():
    first.touch()
    time.sleep(600)
"""
STOPPING = """
import os, pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path(sys.argv[1]).touch()
    os._exit(75)
signal.signal(signal.SIGUSR1, stop)
os.kill(int(sys.argv[2]), signal.SIGUSR1)
time.sleep(600)
"""
HERE = Rendezvous("127.0.0.1", 1)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Rendezvous:
    """A meeting place on another host, where nobody is."""
    monkeypatch.setattr(Rendezvous, "is_local", property(lambda self: False))
    return Rendezvous("127.0.0.1", find_free_port())


def counted(folder: Path, statuses: str) -> tuple[list[str], Path]:
    """An agent that ends with these statuses, one after the other, and where it counts its
    starts.
    """
    (folder / "counted.py").write_text(COUNTED)
    return [
        sys.executable,
        str(folder / "counted.py"),
        str(folder / "starts"),
        statuses,
    ], folder / "starts"


@pytest.mark.parametrize(
    ("statuses", "restarts", "starts", "status"),
    [
        (f"{LOST_PEER},0", 1, 2, 0),
        (f"{LOST_PEER}", 1, 2, LOST_PEER),
        (f"{UNMET},{LOST_PEER},0", 1, 3, 0),
        (f"{STOPPED}", 1, 1, STOPPED),
        (f"{MENDABLE}", 1, 1, MENDABLE),
    ],
    ids=[
        "lost once",
        "lost too often",
        "hosts that do not meet use up no restart",
        "stopped",
        "mendable",
    ],
)
def test_what_a_restart_mends_is_started_again(
    tmp_path: Path, statuses: str, restarts: int, starts: int, status: int
) -> None:
    command, counter = counted(tmp_path, statuses)
    assert run_with_restarts(command, HERE, restarts, 100) == status
    assert len(counter.read_text()) == starts


@pytest.mark.parametrize(
    ("statuses", "is_first", "starts"),
    [("1,1,0", False, 2), (f"1,{LOST_PEER},1,0", False, 4), ("1,1,0", True, 3)],
    ids=["leaves", "was not the cause each time", "holds the rendezvous"],
)
def test_a_host_whose_own_ranks_fail_again_leaves_its_place_to_a_spare(
    tmp_path: Path,
    elsewhere: Rendezvous,
    monkeypatch: pytest.MonkeyPatch,
    statuses: str,
    is_first: bool,
    starts: int,
) -> None:
    monkeypatch.setattr(Rendezvous, "is_local", property(lambda self: is_first))
    monkeypatch.setattr(Rendezvous, "is_open", lambda self: True)
    command, counter = counted(tmp_path, statuses)
    run_with_restarts(command, elsewhere, 5, 100, leave_after=2)
    assert len(counter.read_text()) == starts


def test_a_meeting_place_that_nobody_opens_is_named_when_the_patience_is_over(
    tmp_path: Path, elsewhere: Rendezvous, caplog: pytest.LogCaptureFixture
) -> None:
    command, counter = counted(tmp_path, "0")
    assert run_with_restarts(command, elsewhere, 3, 1) == LOST_PEER
    assert not counter.exists()
    assert (
        f"no rendezvous at {elsewhere} within 1 s (--patience). 127.0.0.1, the first host of the "
        f"run, does not answer at {elsewhere}. Checkpoints are intact: bring it back, or leave "
        "it out of nodes=" in caplog.text
    )


def test_an_agent_that_waits_for_ever_is_ended_with_the_patience(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert (
        run_with_restarts([sys.executable, "-c", "import time; time.sleep(600)"], HERE, 3, 1)
        == LOST_PEER
    )
    assert "no rendezvous" in caplog.text


def test_an_agent_whose_meeting_place_is_out_of_reach_is_started_anew(
    tmp_path: Path, elsewhere: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waits in a call without a time-out for a place that has gone; the second finds
    it.
    """
    monkeypatch.setattr("llmsys.launch.launchers.restart_agent.SHUT_SECONDS", 0.0)
    monkeypatch.setattr("llmsys.launch.launchers.restart_agent.LOOK_SECONDS", 0.2)
    first, gone = tmp_path / "first", []  # type: ignore[var-annotated]

    def is_open(self: Rendezvous) -> bool:
        """But for one knock, once the first agent is stuck."""
        if not first.exists() or gone:
            return True
        gone.append(self)
        return False

    monkeypatch.setattr(Rendezvous, "is_open", is_open)
    assert run_with_restarts([sys.executable, "-c", STUCK_ONCE, str(first)], elsewhere, 0, 100) == 0
    assert gone == [elsewhere]


def test_ranks_that_stopped_stay_stopped_though_their_agent_hangs_for_a_host_that_has_left(
    tmp_path: Path, elsewhere: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmsys.launch.launchers.restart_agent.SHUT_SECONDS", 0.0)
    monkeypatch.setattr("llmsys.launch.launchers.restart_agent.LOOK_SECONDS", 0.2)
    monkeypatch.setattr(Rendezvous, "is_open", lambda self: not (tmp_path / "asked").exists())
    (tmp_path / "train.py").write_text(STOPPING)
    rank = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "asked"), str(os.getpid())]
    agent = "import subprocess, sys, time; subprocess.run(sys.argv[1:]); time.sleep(600)"
    assert run_with_restarts([sys.executable, "-c", agent, *rank], elsewhere, 3, 100) == STOPPED


def test_every_option_of_a_host_reaches_its_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "llmsys.launch.launchers.restart_agent.run_with_restarts",
        lambda *words: given.append(words) or 0,
    )
    config = RunConfig.model_validate({"run": {"name": "toy"}})
    hosts, spares = [Host("10.9.8.1", 1), Host("10.9.8.2", 1)], [Host("10.9.8.3", 1)]
    plan = build_launch_plan(config, hosts, "torchrun", 0, 4, 90, spares, has_standby=True)
    words = list(build_torchrun_command(plan, spares[0]).arguments)
    assert restart_agent(words[3:]) == 0
    assert given == [
        (words[words.index(sys.executable, 1) :], Rendezvous("10.9.8.1", 29500), 4, 90.0, 2, True)
    ]


def test_torchruns_own_restarts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert torchrun(["--nnodes=1", "--max-restarts=2", "train.py"]) == MENDABLE
    assert (
        "`python -m llmsys.launch.launchers.restart_agent --meet FIRST:PORT --restarts 2 "
        "--patience SECONDS`"
    ) in capsys.readouterr().err


FAKE_SSH = """#!/bin/sh
for line in "$@"; do :; done
echo "$line" >> {folder}/lines
[ $(wc -l < {folder}/lines) -gt 1 ] || exit 255
touch {folder}/there
"""


@pytest.mark.parametrize("lasting", [True, False])
def test_a_host_whose_connection_was_lost_is_taken_up_again_after_what_was_left_there_is_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    lasting: bool,
) -> None:
    """For launchers that go on after a loss; with others the host is lost."""
    (tmp_path / "ssh").write_text(FAKE_SSH.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("llmsys.launch.launchers.multi_host.AGAIN_SECONDS", 0.1)
    config = RunConfig.model_validate({"run": {"folder": str(tmp_path / "run")}})
    start = build_launch_plan(config, [Host("127.0.0.1", 1)], "torchrun", 0, 3)
    start.folder.mkdir(parents=True)
    (start.folder / "environment.sh").touch()
    wait = f"until [ -e {tmp_path}/there ] || [ {int(lasting)} = 0 ]; do sleep 0.05; done"
    here = HostCommand("127.0.0.1", ("sh", "-c", wait), lasting)
    there = HostCommand("10.255.8.2", ("train",), lasting)
    if lasting:
        assert run_commands(start, [here, there]) == 0
        first, second = (tmp_path / "lines").read_text().splitlines()
        assert second.startswith(
            f". {start.folder}/environment.sh && {sys.executable} -m "
            "llmsys.launch.process.signal_forwarding "
        )
        assert second.endswith(f"config.yaml 9 >/dev/null; {first}")
        assert (
            "lost the connection to 10.255.8.2; reconnecting for up to 3600 s (--patience)"
            in capfd.readouterr().err
        )
    else:
        assert run_commands(start, [here, there]) == 0
        assert (
            "lost: 10.255.8.2 lost its ssh connection, or could not be reached"
            in capfd.readouterr().err
        )


GONE_SSH = """#!/bin/sh
for line in "$@"; do :; done
echo "$*" >> {folder}/calls
case "$*" in *10.255.8.3*) touch {folder}/there;; *) exit 255;; esac
"""


def test_a_spare_takes_the_place_of_a_host_that_cannot_be_reached_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ssh").write_text(GONE_SSH.format(folder=tmp_path))
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in (
        "multi_host.AGAIN_SECONDS",
        "multi_host.RECONNECT_SECONDS",
        "spare_hosts.TOGETHER_SECONDS",
    ):
        monkeypatch.setattr(f"llmsys.launch.launchers.{name}", 0.2)
    config = RunConfig.model_validate({"run": {"folder": str(tmp_path / "run")}})
    hosts, spares = (
        [Host("10.255.8.1", 1), Host("10.255.8.2", 1)],
        [Host("10.255.8.3", 1), Host("10.255.8.4", 1)],
    )
    start = build_launch_plan(config, hosts, "torchrun", 0, 3, 100, spares)
    start.folder.mkdir(parents=True)
    (start.folder / "environment.sh").touch()
    wait = f"until [ -e {tmp_path}/there ]; do sleep 0.05; done"
    commands = [
        HostCommand("127.0.0.1", ("sh", "-c", wait), True),
        HostCommand("10.255.8.2", ("train",), True),
    ]
    assert run_commands(start, commands) == 0
    told = capfd.readouterr().err
    assert "10.255.8.2; reconnecting for up to 0 s (then a spare takes its place)" in told
    assert (
        "10.255.8.2 lost its ssh connection, or could not be reached; 10.255.8.3 takes its place"
        in told
    )
    [begun] = [
        line for line in (tmp_path / "calls").read_text().splitlines() if "10.255.8.3" in line
    ]
    # the spare meets the others where the lost host did, and is known by its own address
    assert "--rdzv-endpoint=10.255.8.1:29500" in begun
    assert "--local-addr=10.255.8.3" in begun
    assert "--leave-after=2" in begun
    assert "10.255.8.4" not in (tmp_path / "calls").read_text()
