"""A signal that asks a run to stop reaches its ranks, whatever launcher is in between.

torchrun's and DeepSpeed's own launchers end their ranks half a minute after a SIGTERM, saved or not. Here SIGTERM and
SIGUSR1 go straight to the ranks, which finish their step, save and leave with status 75; the launcher only sees them
leave. So does the SIGHUP of a terminal that is closed, unless it was ignored before (`nohup`). A second SIGTERM, a
while after the first, ends everything at once. `python -m launch.process.signal_forwarding CONFIG SIGNAL` asks the
ranks of one host, and where there is none what waits to start them; SIGKILL goes to the latter, with which ranks end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from llmsys.train.stop_request import HANGUP, HANGUP_ENDS, HANGUP_SAVES, redirect_dead_terminal

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
SECOND_SECONDS = 1.0
"""A SIGTERM that comes sooner is the same one: `timeout` and a shell's `kill` reach a process and its whole group."""
SCRIPT_NAME = "train.py"
KEEPER = "launch.launchers.restart_agent"
NETWORK = Path("/proc/self/ns/net")


def list_descendant_ranks(pid: int) -> list[psutil.Process]:
    """The ranks among a process and its descendants; those that cannot be looked at are left out."""
    try:
        process = psutil.Process(pid)
        return [one for one in (process, *process.children(recursive=True)) if _is_rank(one)]
    except psutil.NoSuchProcess:
        return []


def signal_ranks(config: str, number: int) -> int:
    """Send a signal to the ranks of this host that train on a config, whoever started them; returns how many.

    To what keeps them going (launch/launchers/restart_agent.py) where there are none, or where they are to end at once.
    """
    concerned = [
        one for one in psutil.process_iter() if config in _list_process_arguments(one) and _is_on_this_host(one)
    ]
    ranks, keepers = (
        [one for one in concerned if _is_rank(one)],
        [one for one in concerned if KEEPER in _list_process_arguments(one)],
    )
    for process in keepers if number == signal.SIGKILL or not ranks else ranks:
        with contextlib.suppress(psutil.Error):
            # A keeper that was started here ignores SIGHUP, see ignoring_own_signals.
            process.send_signal(signal.SIGUSR1 if number == signal.SIGHUP and not ranks else number)
    return len(ranks)


def signals_to_forward() -> tuple[signal.Signals, ...]:
    """Return the signals that ask the ranks to stop; SIGHUP is one where nobody wants it ignored, or to end all."""
    if os.environ.get(HANGUP) == HANGUP_ENDS or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return FORWARDED
    return (*FORWARDED, signal.SIGHUP)


@contextlib.contextmanager
def ignoring_own_signals() -> Iterator[dict[str, str]]:
    """While a launcher is started: ignore what it must not die of, since it knows no SIGUSR1 and no SIGHUP that saves.

    What is started inherits that. Yields what its environment must have, so that ranks know of a SIGHUP that saves.
    """
    saves = signal.SIGHUP in signals_to_forward()
    numbers = (signal.SIGUSR1, signal.SIGHUP) if saves else (signal.SIGUSR1,)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield {HANGUP: HANGUP_SAVES} if saves else {}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def relaying_to(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Send the signals that ask to stop on to one process while the block runs."""

    def relay(number: int, frame: FrameType | None) -> None:
        redirect_dead_terminal()
        process.send_signal(number)

    before = {number: signal.signal(number, relay) for number in signals_to_forward()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def forward_signals(top: int = 0) -> Iterator[list[int]]:
    """Forward signals of this process to the ranks below process `top` (0: this one) while the block runs.

    Yields the list of those that ranks were sent.
    """
    asked: list[int] = []
    first_at = time.monotonic()

    def handle_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        redirect_dead_terminal()
        ranks = list_descendant_ranks(top or os.getpid())
        is_second = number == signal.SIGTERM and number in asked
        if not ranks or (is_second and time.monotonic() - first_at >= SECOND_SECONDS):
            raise SystemExit(128 + number)  # what was started ends with us, see orphan.py
        if is_second:
            return
        first_at = time.monotonic() if number == signal.SIGTERM else first_at
        asked.append(number)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.send_signal(number)

    before = {number: signal.signal(number, handle_signal) for number in signals_to_forward()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_rank(process: psutil.Process) -> bool:
    """Whether it runs the script itself: launchers name it too, but after a module or a script of their own."""
    words = _list_process_arguments(process)
    return bool(words) and os.path.basename(words[0]) == SCRIPT_NAME


def _is_on_this_host(process: psutil.Process) -> bool:
    """Whether it has our network: a container or namespace beside us is another host."""
    with contextlib.suppress(OSError):
        return NETWORK.samefile(f"/proc/{process.pid}/ns/net")
    return not NETWORK.exists()


def _list_process_arguments(process: psutil.Process) -> list[str]:
    """What a process was started with after its interpreter, without options; nothing where it cannot be looked at."""
    try:
        return [word for word in process.cmdline()[1:] if not word.startswith("-")]
    except psutil.Error:
        return []


if __name__ == "__main__":
    print(f"{signal_ranks(sys.argv[1], int(sys.argv[2]))} ranks were asked")
