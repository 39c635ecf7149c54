"""A wish to stop: by signal, by the run's own limit, and in time before Slurm ends the job."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsys.train.stop_request import (
    HANGUP,
    HANGUP_ENDS,
    HANGUP_SAVES,
    RESERVE_SECONDS,
    SLURM_END,
    StopRequest,
)
from tests.helpers.process import PATIENCE_SECONDS, wait_until


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_the_own_limit_raises_the_wish_and_says_which() -> None:
    clock = Clock()
    wish = StopRequest(2.0, {}, clock)
    clock.now += 119
    assert wish.to_flag() == 0.0
    clock.now += 1
    assert wish.to_flag() == 1.0
    assert wish.reason == "train.time_limit_minutes=2 are over"


def test_slurms_end_is_met_with_room_for_three_saves() -> None:
    clock = Clock()
    wish = StopRequest(0.0, {SLURM_END: str(int(clock.now) + 3600)}, clock)
    wish.longest_save_seconds = 60.0
    clock.now += 3600 - RESERVE_SECONDS - 3 * 60 - 1
    assert wish.to_flag() == 0.0
    clock.now += 1
    assert wish.to_flag() == 1.0
    assert wish.reason == f"Slurm ends the job in {RESERVE_SECONDS + 180:.0f} s"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_raises_the_wish_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    wish, before = StopRequest(environment={}), signal.getsignal(number)
    with wish.handle_signals():
        os.kill(os.getpid(), number)
        assert wish.to_flag() == 1.0
    assert wish.reason == f"{number.name} came"
    assert signal.getsignal(number) is before


@pytest.fixture
def ignored_hangup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("ignored_hangup")
def test_a_hangup_that_was_ignored_stays_so_unless_a_launcher_ignored_it_on_the_way() -> None:
    for environment, raised in (
        ({}, 0.0),
        ({HANGUP: HANGUP_ENDS}, 0.0),
        ({HANGUP: HANGUP_SAVES}, 1.0),
    ):
        wish = StopRequest(environment=environment)
        with wish.handle_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert wish.to_flag() == raised


def test_a_hangup_ends_ranks_whose_connection_is_lost() -> None:
    before, wish = signal.getsignal(signal.SIGHUP), StopRequest(environment={HANGUP: HANGUP_ENDS})
    with wish.handle_signals():
        assert signal.getsignal(signal.SIGHUP) is before


IN_TERMINAL = """
import os, sys, time
from llmsys.train.stop_request import StopRequest
os.setsid()
import fcntl, termios
fcntl.ioctl(2, termios.TIOCSCTTY, 0)
wish = StopRequest(environment={})
with wish.handle_signals():
    open(sys.argv[1], "w").close()
    while not wish.to_flag():
        time.sleep(0.01)
print("saved", file=sys.stderr, flush=True)
open(sys.argv[1], "w").write(wish.reason)
"""


def test_a_run_whose_terminal_is_closed_may_still_write_and_saves(
    tmp_path: Path, repository: Path
) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-c", IN_TERMINAL, str(tmp_path / "told")]
    process = subprocess.Popen(words, cwd=repository, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    wait_until((tmp_path / "told").exists, "the run did not begin")
    os.close(ours)
    assert process.wait(PATIENCE_SECONDS) == 0
    assert (tmp_path / "told").read_text() == "SIGHUP came"
