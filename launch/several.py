"""Running the commands of a run on its hosts, from one terminal: here, and over ssh where the host is another.

Prints what the ranks print. A wish to stop (SIGTERM, SIGUSR1) reaches the ranks of every host, which save and leave
with 75; Ctrl-C ends everything. What became of the hosts is told in one status and one message.
"""

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from launch.commands import Command, Start, bare
from launch.forward import FORWARDED, ask_ranks
from launch.orphan import child_environment
from launch.route import is_this_host
from launch.train import MENDABLE, STOPPED
from llmsys.errors import LaunchError

SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15")
"""With a terminal, so that ranks end when the connection does; without questions."""
SSH_FAILED = 255


def run_commands(start: Start, commands: Sequence[Command]) -> int:
    """Run every command to its end. Returns 0, or 75 when the run was asked to stop and has saved.

    Raises LaunchError with the hosts that failed; SystemExit carries the status of what a rank has said itself.
    """
    processes = {command.host or "": _start(start, command) for command in commands}
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and number in asked:
            raise SystemExit(128 + number)
        asked.append(number)
        _ask(start, number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        statuses = {host: process.wait() for host, process in processes.items()}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in processes.values():
            process.terminate()
    return outcome(statuses, start)


def outcome(statuses: dict[str, int], start: Start) -> int:
    """One status for all hosts. As long as `least` hosts ended well, the run has."""
    failed = {host: status for host, status in statuses.items() if status}
    if not failed:
        return 0
    ended = set(failed.values())
    if STOPPED in ended:
        return STOPPED
    if len(statuses) - len(failed) >= start.least and len(statuses) > 1:
        print(f"llmsys: the run ended on what was left; lost: {_said(failed)}", file=sys.stderr)
        return 0
    if MENDABLE in ended:
        raise SystemExit(MENDABLE)
    raise LaunchError(
        f"training stopped: {_said(failed)}. Nothing that was saved is lost: run the same command again and it "
        f"continues from the newest checkpoint in {start.folder.parent}."
    )


def _said(failed: dict[str, int]) -> str:
    lost = "could not be reached or kept by ssh"
    return ", ".join(
        f"{host or 'the launcher'} {lost if status == SSH_FAILED else f'ended with status {status}'}"
        for host, status in failed.items()
    )


def _start(start: Start, command: Command) -> subprocess.Popen[bytes]:
    line = command.line(start)
    if command.host is None or is_this_host(bare(command.host)):
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # launchers that know no SIGUSR1 must not die of it
        try:
            return subprocess.Popen(["bash", "-c", line], env=child_environment(), stdin=subprocess.DEVNULL)
        finally:
            signal.signal(signal.SIGUSR1, before)
    return subprocess.Popen([*SSH, command.host, line], stdin=subprocess.DEVNULL)


def _ask(start: Start, number: int) -> None:
    """Hand a signal to the ranks of every host; one rank that hears is enough, since they agree at each step."""
    config = str(start.folder / "config.yaml")
    ask_ranks(config, number)
    for host in start.hosts:
        if not is_this_host(bare(host.name)):
            words = shlex.join([sys.executable, "-m", "launch.forward", config, str(int(number))])
            setting = shlex.quote(str(start.folder / "environment.sh"))
            with suppress(OSError):
                subprocess.Popen([*SSH, host.name, f". {setting} && {words}"], stdin=subprocess.DEVNULL)
