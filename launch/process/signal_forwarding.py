"""Forward a signal that asks a run to stop to its ranks, through any launcher.

torchrun's and DeepSpeed's own launchers end their ranks 30 s after a SIGTERM, saved or not. Here
SIGTERM and SIGUSR1 go straight to the ranks, which finish their step, save and exit with status 75;
the launcher only sees them exit.

- SIGUSR2, which asks for a profile of the next step, is passed on as well; it stops nothing.
- SIGHUP of a closed terminal is forwarded too, unless it was ignored before (`nohup`).
- A second SIGTERM, a second or more after the first, ends everything at once.
- `python -m llmsys.launch.process.signal_forwarding CONFIG SIGNAL` signals the ranks of one host.
  Where there is no rank, and for SIGKILL, it signals the restart agent instead, whose end also ends
  its ranks.
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

from llmsys.launch.process.standby import IDLE_NAME
from llmsys.train.stop_request import (
    HANGUP,
    HANGUP_ENDS,
    HANGUP_SAVES,
    PROFILE_SIGNAL,
    redirect_dead_terminal,
)

FORWARDED = (signal.SIGTERM, signal.SIGUSR1)
# A SIGTERM that comes sooner is the same one: `timeout` and a shell's `kill` reach a process and
# its whole group.
SECOND_SECONDS = 1.0
SCRIPT_NAME = "train.py"
RESTART_AGENT = "llmsys.launch.launchers.restart_agent"
NETWORK = Path("/proc/self/ns/net")


def list_descendant_ranks(pid: int) -> list[psutil.Process]:
    """Return the ranks among a process and its descendants.

    Args:
        pid: Process id of the ancestor.

    Returns:
        The processes that run launch/train.py. A process that cannot be inspected is left out.
    """
    try:
        process = psutil.Process(pid)
        return [one for one in (process, *process.children(recursive=True)) if _is_rank(one)]
    except psutil.NoSuchProcess:
        return []


def signal_ranks(config: str, number: int) -> int:
    """Send a signal to the ranks of this host that train on a config, whoever started them.

    Where there are no ranks, and for SIGKILL, the signal goes to their restart agents.

    Args:
        config: Path of the config, as it is in the ranks' arguments.
        number: Signal number.

    Returns:
        The number of ranks found.
    """
    candidates = [
        one
        for one in psutil.process_iter()
        if config in _list_process_arguments(one) and _is_on_this_host(one)
    ]
    ranks, agents = (
        [one for one in candidates if _is_rank(one)],
        [one for one in candidates if RESTART_AGENT in _list_process_arguments(one)],
    )
    for process in agents if number == signal.SIGKILL or not ranks else ranks:
        with contextlib.suppress(psutil.Error):
            # An agent that was started here ignores SIGHUP, see ignore_own_signals.
            process.send_signal(signal.SIGUSR1 if number == signal.SIGHUP and not ranks else number)
    return len(ranks)


def get_signals_to_forward() -> tuple[signal.Signals, ...]:
    """Return the signals that ask ranks to stop.

    Returns:
        SIGTERM and SIGUSR1; SIGHUP too, unless it is ignored or set to end the ranks at once.
    """
    if os.environ.get(HANGUP) == HANGUP_ENDS or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return FORWARDED
    return (*FORWARDED, signal.SIGHUP)


@contextlib.contextmanager
def ignore_own_signals() -> Iterator[dict[str, str]]:
    """Ignore signals that a launcher must not die of while it is started: SIGUSR1, SIGUSR2, SIGHUP
    where it means save.

    Launchers know none of them. A process that is started inside the block inherits the ignored
    signals.

    Yields:
        Variables for its environment, by which ranks know that SIGHUP means save.
    """
    saves = signal.SIGHUP in get_signals_to_forward()
    numbers = (signal.SIGUSR1, PROFILE_SIGNAL, *([signal.SIGHUP] if saves else []))
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield {HANGUP: HANGUP_SAVES} if saves else {}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def relay_signals_to(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Relay the signals that ask to stop, or for a profile, to one process while the block runs.

    Args:
        process: the process that handles them.

    Yields:
        None.
    """

    def relay_signal(number: int, frame: FrameType | None) -> None:
        redirect_dead_terminal()
        process.send_signal(number)

    relayed = (*get_signals_to_forward(), PROFILE_SIGNAL)
    before = {number: signal.signal(number, relay_signal) for number in relayed}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def forward_signals(top: int = 0) -> Iterator[list[int]]:
    """Forward signals of this process to the ranks below another process while the block runs.

    Args:
        top: Process id of the ranks' ancestor; 0 means this process.

    Yields:
        A list that grows by each signal sent to ranks.
    """
    asked: list[int] = []
    first_at = time.monotonic()

    def handle_signal(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        redirect_dead_terminal()
        ranks = list_descendant_ranks(top or os.getpid())
        is_second = number == signal.SIGTERM and number in asked
        if not ranks or (is_second and time.monotonic() - first_at >= SECOND_SECONDS):
            raise SystemExit(128 + number)  # what was started ends with us, see parent_watch.py
        if is_second:
            return
        first_at = time.monotonic() if number == signal.SIGTERM else first_at
        asked.append(number)
        _send_signal(ranks, number)

    def request_profile(number: int, frame: FrameType | None) -> None:
        _send_signal(list_descendant_ranks(top or os.getpid()), number)

    before = {number: signal.signal(number, handle_signal) for number in get_signals_to_forward()}
    before[PROFILE_SIGNAL] = signal.signal(PROFILE_SIGNAL, request_profile)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_signal(ranks: list[psutil.Process], number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


def _is_rank(process: psutil.Process) -> bool:
    """Return whether the process runs launch/train.py itself. Launchers name it too, but after
    their own script.
    """
    words = _list_process_arguments(process)
    return bool(words) and os.path.basename(words[0]) == SCRIPT_NAME and not _is_idle(process)


def _is_idle(process: psutil.Process) -> bool:
    """Return whether the process is a standby that waits for a restart."""
    with contextlib.suppress(psutil.Error):
        return process.name() == IDLE_NAME
    return True


def _is_on_this_host(process: psutil.Process) -> bool:
    """Return whether the process has our network namespace. Another container or namespace
    counts as another host.
    """
    with contextlib.suppress(OSError):
        return NETWORK.samefile(f"/proc/{process.pid}/ns/net")
    return not NETWORK.exists()


def _list_process_arguments(process: psutil.Process) -> list[str]:
    """Return a process's arguments after its interpreter, without options; [] where it cannot be
    inspected.
    """
    try:
        return [word for word in process.cmdline()[1:] if not word.startswith("-")]
    except psutil.Error:
        return []


if __name__ == "__main__":
    print(f"{signal_ranks(sys.argv[1], int(sys.argv[2]))} ranks were signalled")
