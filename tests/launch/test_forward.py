"""A wish to stop reaches the ranks below a launcher, and not the launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.forward import ask_ranks, forwarding, ranks_below
from tests.helpers.process import PATIENCE_SECONDS, wait_until

RANK = """
import pathlib, signal, sys, time
heard = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGUSR1, lambda *_: heard.write_text("SIGUSR1"))
heard.write_text("ready")
time.sleep(600)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-u', *sys.argv[1:]])"


@pytest.fixture
def launcher(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process that has started one rank, which has said so in `heard`."""
    (tmp_path / "train.py").write_text(RANK)
    words = [str(tmp_path / "train.py"), str(tmp_path / "heard")]
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, *words])
    heard = tmp_path / "heard"  # a signal between its creation and its content would be overwritten by "ready"
    wait_until(lambda: heard.exists() and heard.read_text() == "ready", "the rank did not start")
    yield process  # type: ignore[misc]
    for rank in ranks_below(process.pid):
        rank.kill()
    process.kill()
    process.wait()


def test_a_signal_goes_to_the_ranks_alone(launcher: subprocess.Popen[bytes], tmp_path: Path) -> None:
    [rank] = ranks_below(launcher.pid)
    assert rank.ppid() == launcher.pid
    with forwarding(launcher.pid):
        os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: (tmp_path / "heard").read_text() == "SIGUSR1", "the rank did not hear")
    assert launcher.poll() is None


def test_a_second_sigterm_ends_everything_and_so_does_one_before_there_are_ranks(
    launcher: subprocess.Popen[bytes],
) -> None:
    with forwarding(launcher.pid):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit, match="143"):
            os.kill(os.getpid(), signal.SIGTERM)
    launcher.wait(PATIENCE_SECONDS)
    with forwarding(launcher.pid), pytest.raises(SystemExit, match="143"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_what_waits_to_start_ranks_is_asked_where_there_are_none_and_where_all_is_to_end(
    launcher: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    config = str(tmp_path / "heard")
    words = [sys.executable, "-c", "import time; time.sleep(600)", "launch.restart", "train.py"]
    keeper, other = subprocess.Popen([*words, config]), subprocess.Popen([*words, "another"])
    assert ask_ranks(config, signal.SIGUSR1) == 1
    wait_until(lambda: (tmp_path / "heard").read_text() == "SIGUSR1", "the rank did not hear")
    assert keeper.poll() is None
    assert ask_ranks(config, signal.SIGKILL) == 1
    assert keeper.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    assert launcher.poll() is None
    assert ask_ranks("another", signal.SIGTERM) == 0
    assert other.wait(PATIENCE_SECONDS) == -signal.SIGTERM
