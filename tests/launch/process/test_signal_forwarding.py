"""A wish to stop reaches the ranks below a launcher, and not the launcher."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsys.launch.process.signal_forwarding import (
    forward_signals,
    ignore_own_signals,
    list_descendant_ranks,
    signal_ranks,
)
from llmsys.train.stop_request import HANGUP, HANGUP_ENDS, PROFILE_SIGNAL
from tests.helpers.process import PATIENCE_SECONDS, wait_until

RANK = """
import pathlib, signal, sys, time
heard = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: heard.write_text("SIGTERM"))
signal.signal(signal.SIGUSR1, lambda *_: heard.write_text("SIGUSR1"))
signal.signal(signal.SIGUSR2, lambda *_: heard.write_text("SIGUSR2"))
heard.write_text("ready")
time.sleep(600)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-u', *sys.argv[1:]])"


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started one rank, which has said so in `heard`."""
    (tmp_path / "train.py").write_text(RANK)
    words = [str(tmp_path / "train.py"), str(tmp_path / "heard")]
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, *words])
    # a signal between its creation and its content would be overwritten by "ready"
    heard = tmp_path / "heard"
    wait_until(lambda: heard.exists() and heard.read_text() == "ready", "the rank did not start")
    yield process
    for rank in list_descendant_ranks(process.pid):
        rank.kill()
    process.kill()
    process.wait()


def test_a_signal_goes_to_the_ranks_alone(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    [rank] = list_descendant_ranks(launcher.pid)
    assert rank.ppid() == launcher.pid
    with forward_signals(launcher.pid):
        os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: (tmp_path / "heard").read_text() == "SIGUSR1", "the rank did not hear")
    assert launcher.poll() is None


def test_a_request_for_a_profile_is_passed_on_and_stops_nothing(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    with forward_signals(launcher.pid) as asked:
        os.kill(os.getpid(), PROFILE_SIGNAL)
        wait_until(lambda: (tmp_path / "heard").read_text() == "SIGUSR2", "the rank did not hear")
    assert asked == []
    with ignore_own_signals():
        os.kill(os.getpid(), PROFILE_SIGNAL)  # a launcher that knows it not would die


def test_a_second_sigterm_ends_everything_and_so_does_one_before_there_are_ranks(
    launcher: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmsys.launch.process.signal_forwarding.SECOND_SECONDS", 0.0)
    with forward_signals(launcher.pid):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit, match="143"):
            os.kill(os.getpid(), signal.SIGTERM)
    for rank in list_descendant_ranks(launcher.pid):
        rank.kill()
    launcher.wait(PATIENCE_SECONDS)
    with forward_signals(launcher.pid), pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_what_waits_to_start_ranks_is_asked_where_there_are_none_and_where_all_is_to_end(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    config = str(tmp_path / "heard")
    words = [
        sys.executable,
        "-c",
        "import time; time.sleep(600)",
        "llmsys.launch.launchers.restart_agent",
        "train.py",
    ]
    keeper, other = subprocess.Popen([*words, config]), subprocess.Popen([*words, "another"])
    assert signal_ranks(config, signal.SIGUSR1) == 1
    wait_until(lambda: (tmp_path / "heard").read_text() == "SIGUSR1", "the rank did not hear")
    assert keeper.poll() is None
    assert signal_ranks(config, signal.SIGKILL) == 1
    assert keeper.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert launcher.poll() is None
    assert signal_ranks("another", signal.SIGTERM) == 0
    assert other.wait(PATIENCE_SECONDS) == -signal.SIGTERM


def test_a_sigterm_that_comes_twice_at_once_is_one(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """As from `timeout`, which reaches a process and then its whole group."""
    with forward_signals(launcher.pid) as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked == [signal.SIGTERM]
    wait_until(lambda: (tmp_path / "heard").read_text() == "SIGTERM", "the rank did not hear")


STARTED = """
import os, signal, subprocess, sys
from llmsys.launch.process.signal_forwarding import get_signals_to_forward, ignore_own_signals
from llmsys.launch.launchers.torchrun import get_signals_to_handle
print(*(one.name for one in get_signals_to_forward()), "|", get_signals_to_handle())
look = (
    "import os, signal; "
    "print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, os.environ.get('LLMSYS_HANGUP'))"
)
with ignore_own_signals() as more:
    subprocess.run([sys.executable, "-c", look], env=os.environ | more)
"""


@pytest.mark.parametrize(
    ("ignored", "hangup", "said"),
    [
        ((), "", ["SIGTERM SIGUSR1 SIGHUP | SIGINT,SIGQUIT", "True save"]),
        ((signal.SIGHUP,), "", ["SIGTERM SIGUSR1 | SIGINT,SIGQUIT", "True None"]),
        (
            (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
            "",
            ["SIGTERM SIGUSR1 | SIGQUIT", "True None"],
        ),
        ((), HANGUP_ENDS, ["SIGTERM SIGUSR1 | SIGINT,SIGHUP,SIGQUIT", "False end"]),
    ],
    ids=["terminal", "nohup", "nohup in a script", "over ssh"],
)
def test_a_launcher_passes_a_hangup_on_and_leaves_what_was_ignored(
    ignored: tuple[signal.Signals, ...], hangup: str, said: list[str], repository: Path
) -> None:
    ignore = "".join(f"trap '' {number.name[3:]}; " for number in ignored)
    words = ["bash", "-c", f'{ignore}exec "$@"', "_", sys.executable, "-u", "-c", STARTED]
    environment = {name: value for name, value in os.environ.items() if name != HANGUP} | (
        {HANGUP: hangup} if hangup else {}
    )
    done = subprocess.run(words, env=environment, cwd=repository, capture_output=True, text=True)
    assert done.stdout.splitlines() == said, done.stderr
