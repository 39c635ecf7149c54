"""Running the commands of a run on its hosts, from one terminal: here, and over ssh where the host is another.

Prints what the ranks print. A wish to stop (SIGTERM, SIGUSR1, SIGHUP) reaches the ranks of every host, which save and
leave with 75; Ctrl-C ends everything. A host whose connection was lost is taken up again as soon as it answers. What
became of the hosts is told in one status and one message.
"""

import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from launch.hosts.network_interfaces import is_this_host
from launch.hosts.ssh import CONNECT_SECONDS, SSH_FAILED
from launch.launchers.host_commands import HostCommand, LaunchPlan, strip_user
from launch.process.parent_watch import build_child_environment
from launch.process.signal_forwarding import SECOND_SECONDS, ignoring_own_signals, signal_ranks, signals_to_forward
from launch.train import CRASHED, HUNG, LOST_PEER, MENDABLE, STOPPED, UNMET
from llmsys.errors import LostRankError
from llmsys.train.stop_request import HANGUP, HANGUP_ENDS, redirect_dead_terminal

SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
"""With a terminal, so that ranks end when the connection does; without questions."""
SILENCE_SECONDS, LEAST_SILENCES = 5, 3
"""How often ssh asks whether the host is there, and how often at least before it gives up."""
LOOK_SECONDS, AGAIN_SECONDS = 0.2, 5.0


@dataclass
class RemoteProcess:
    """A command that runs on a host. `lost_at`: since when ssh has failed to keep it there; None while it does."""

    command: HostCommand
    process: subprocess.Popen[bytes]
    start_time: float
    lost_at: float | None = None
    status: int | None = None


def run_commands(start: LaunchPlan, commands: Sequence[HostCommand]) -> int:
    """Run every command to its end. Returns 0, or 75 when the run was asked to stop and has saved.

    Raises LostRankError with the hosts that failed; SystemExit carries the status of what a rank has said itself.
    """
    places = [RemoteProcess(command, _start_process(start, command), time.monotonic()) for command in commands]
    asked: dict[int, float] = {}

    def handle_signal(number: int, frame: FrameType | None) -> None:
        redirect_dead_terminal()
        if number == signal.SIGTERM and number in asked:
            if time.monotonic() - asked[number] >= SECOND_SECONDS:
                raise SystemExit(128 + number)
            return
        asked[number] = time.monotonic()
        _signal_hosts(start, number)

    before = {number: signal.signal(number, handle_signal) for number in signals_to_forward()}
    try:
        while any(place.status is None for place in places):
            time.sleep(LOOK_SECONDS)
            for place in places:
                others = any(one.status is None for one in places if one is not place)
                _update_process(start, place, keep=others and not asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for place in places:
            place.process.terminate()
    return combine_statuses({place.command.host or "": place.status or 0 for place in places}, start)


def _update_process(start: LaunchPlan, place: RemoteProcess, *, keep: bool) -> None:
    """See whether a command has ended; with `keep`, start it again where only the connection to its host was lost."""
    if place.status is not None or (status := place.process.poll()) is None:
        return
    now = time.monotonic()
    if status == SSH_FAILED and place.command.lasting and keep:
        if place.lost_at is None or now - place.start_time > 2 * CONNECT_SECONDS:  # it had come through
            place.lost_at = now
            said = f"the connection to {place.command.host} is lost; trying for {start.patience_seconds} s (--patience)"
            print(f"llmsys: {said}", file=sys.stderr, flush=True)
        if now - place.lost_at <= start.patience_seconds:
            if now - place.start_time >= AGAIN_SECONDS:
                place.process, place.start_time = _start_process(start, place.command, again=True), now
            return
    place.status = status


def combine_statuses(statuses: dict[str, int], start: LaunchPlan) -> int:
    """One status for all hosts. As long as `least` hosts ended well, the run has."""
    failed = {host: status for host, status in statuses.items() if status}
    if not failed:
        return 0
    ended = set(failed.values())
    if STOPPED in ended:
        return STOPPED
    if len(statuses) - len(failed) >= start.min_hosts and len(statuses) > 1:
        print(f"llmsys: the run ended on what was left; lost: {_describe_failures(failed)}", file=sys.stderr)
        return 0
    for status in (MENDABLE, CRASHED, HUNG):  # the rank has printed its own message
        if status in ended:
            raise SystemExit(status)
    if statuses.keys() == failed.keys() and ended == {LOST_PEER} and len(failed) == 1:
        raise SystemExit(LOST_PEER)
    raise LostRankError(
        f"training stopped: {_describe_failures(failed)}. Nothing that was saved is lost: run the same command "
        f"again and it "
        f"continues from the newest checkpoint in {start.folder.parent}."
    )


def _describe_failures(failed: dict[str, int]) -> str:
    meanings = {SSH_FAILED: "could not be reached or kept by ssh", UNMET: "did not meet the others"}
    return ", ".join(
        f"{host or 'the launcher'} {meanings.get(status, f'ended with status {status}')}"
        for host, status in failed.items()
    )


def _start_process(start: LaunchPlan, command: HostCommand, *, again: bool = False) -> subprocess.Popen[bytes]:
    """`again`: what an earlier connection has left there is ended first."""
    line = command.format_shell_line(start, in_place=True)
    if command.host is None or is_this_host(strip_user(command.host)):
        with ignoring_own_signals() as more:
            return subprocess.Popen(
                ["bash", "-c", line], env=build_child_environment() | more, stdin=subprocess.DEVNULL
            )
    line = f"export {HANGUP}={HANGUP_ENDS}; {line}"  # there, SIGHUP means that this connection is lost
    quiet: tuple[str, ...] = ()
    if again:
        quiet, line = ("-q",), f"{_format_signal_command(start, signal.SIGKILL)} >/dev/null; {line}"
    silences = max(LEAST_SILENCES, math.ceil(start.outage_seconds / SILENCE_SECONDS))
    alive = ("-o", f"ServerAliveInterval={SILENCE_SECONDS}", "-o", f"ServerAliveCountMax={silences}")
    return subprocess.Popen([*SSH, *quiet, *alive, command.host, line], stdin=subprocess.DEVNULL)


def _signal_hosts(start: LaunchPlan, number: int) -> None:
    """Hand a signal to the ranks of every host; one rank that hears is enough, since they agree at each step."""
    signal_ranks(str(start.folder / "config.yaml"), number)
    for host in start.hosts:
        if not is_this_host(strip_user(host.name)):
            with suppress(OSError):
                told = signal.SIGUSR1 if number == signal.SIGHUP else number  # there, SIGHUP ends ranks at once
                subprocess.Popen([*SSH, host.name, _format_signal_command(start, told)], stdin=subprocess.DEVNULL)


def _format_signal_command(start: LaunchPlan, number: int) -> str:
    """The line that hands a signal on, on a host."""
    setting = shlex.quote(str(start.folder / "environment.sh"))
    words = [
        sys.executable,
        "-m",
        "launch.process.signal_forwarding",
        str(start.folder / "config.yaml"),
        str(int(number)),
    ]
    return f". {setting} && {shlex.join(words)}"
