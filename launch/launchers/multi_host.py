"""Run the commands of a launch on its hosts from one terminal, over ssh where the host is another.

Prints the output of the ranks. SIGTERM, SIGUSR1 and SIGHUP are forwarded to the ranks of every
host, which save and exit with 75. Ctrl-C ends everything. A host whose connection was lost is
connected again as soon as it answers. The statuses of the hosts are combined into one status and
one message. A spare takes the place of a host that has failed.
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

from llmsys.errors import LostRankError
from llmsys.launch.hosts.hostfile import Host
from llmsys.launch.hosts.network_interfaces import is_this_host
from llmsys.launch.hosts.ssh import CONNECT_SECONDS, SSH_FAILED
from llmsys.launch.launchers.host_commands import (
    HostCommand,
    LaunchPlan,
    build_torchrun_command,
    strip_user,
)
from llmsys.launch.launchers.spare_hosts import RECONNECT_SECONDS, Replacement
from llmsys.launch.process.parent_watch import build_child_environment
from llmsys.launch.process.signal_forwarding import (
    SECOND_SECONDS,
    get_signals_to_forward,
    ignore_own_signals,
    signal_ranks,
)
from llmsys.launch.train import CRASHED, HUNG, LOST_PEER, MENDABLE, STOPPED, UNMET
from llmsys.train.stop_request import HANGUP, HANGUP_ENDS, redirect_dead_terminal

# `-tt` allocates a terminal, so that ranks end when the connection does. BatchMode asks no
# questions.
SSH = ("ssh", "-tt", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}")
# ServerAliveInterval, and the lower bound of ServerAliveCountMax
SILENCE_SECONDS, LEAST_SILENCES = 5, 3
LOOK_SECONDS, AGAIN_SECONDS = 0.2, 5.0


@dataclass
class RemoteProcess:
    """A command that runs on a host.

    Attributes:
        lost_at: Time since when ssh has failed to connect; None while connected.
        status: Exit status; None while it runs.
    """

    command: HostCommand
    process: subprocess.Popen[bytes]
    start_time: float
    lost_at: float | None = None
    status: int | None = None


def run_commands(plan: LaunchPlan, commands: Sequence[HostCommand]) -> int:
    """Run every command to its end.

    Args:
        plan: The launch.
        commands: One command per host, or one for all.

    Returns:
        0, or 75 when the run was stopped and has saved a checkpoint.

    Raises:
        LostRankError: Hosts failed; the message names them.
        SystemExit: A rank has printed its own message; this carries its status.
    """
    processes = [_start_remote(plan, command) for command in commands]
    spares, replacement = list(plan.spares), Replacement(commands[0].host or "")
    asked: dict[int, float] = {}

    def handle_signal(number: int, frame: FrameType | None) -> None:
        redirect_dead_terminal()
        # one request may reach a process twice, by itself and by its group
        if number == signal.SIGTERM and number in asked:
            if time.monotonic() - asked[number] >= SECOND_SECONDS:
                raise SystemExit(128 + number)
            return
        asked[number] = time.monotonic()
        _signal_hosts(plan, number)

    before = {number: signal.signal(number, handle_signal) for number in get_signals_to_forward()}
    try:
        while any(remote.status is None for remote in processes):
            time.sleep(LOOK_SECONDS)
            for remote in processes:
                others = any(one.status is None for one in processes if one is not remote)
                # the first host, of the rendezvous, is not replaced: it gets all patience
                is_replaceable = bool(spares) and remote.command.host != replacement.first
                limit = RECONNECT_SECONDS if is_replaceable else plan.patience_seconds
                reconnect_seconds = min(limit, plan.patience_seconds)
                if _update_process(
                    plan, remote, reconnect_seconds if others and not asked else 0.0
                ):
                    replacement.add_failure(remote.command.host or "", remote.status or 0)
            if spares and not asked:
                _replace_hosts(plan, processes, replacement, spares)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for remote in processes:
            remote.process.terminate()
    return combine_statuses(
        {remote.command.host or "": remote.status or 0 for remote in processes}, plan
    )


def _replace_hosts(
    plan: LaunchPlan, processes: list[RemoteProcess], replacement: Replacement, spares: list[Host]
) -> None:
    """Start a spare instead of each host that has failed, as long as there are spares."""
    by_host = {remote.command.host or "": remote for remote in processes}
    ended = {host: remote.status for host, remote in by_host.items() if remote.status is not None}
    for host in replacement.list_due(ended, by_host.keys() - ended.keys()):
        if spares:
            spare = spares.pop(0)
            message = f"{_describe_failures({host: ended[host]})}; {spare.name} takes its place"
            print(f"llmsys: {message}", file=sys.stderr, flush=True)
            processes[processes.index(by_host[host])] = _start_remote(
                plan, build_torchrun_command(plan, spare)
            )


def _start_remote(plan: LaunchPlan, command: HostCommand) -> RemoteProcess:
    return RemoteProcess(command, _start_process(plan, command), time.monotonic())


def _update_process(plan: LaunchPlan, remote: RemoteProcess, reconnect_seconds: float) -> bool:
    """Poll a command; return whether it has just ended.

    Where only the connection to its host was lost, it is started again for `reconnect_seconds`.
    """
    if remote.status is not None or (status := remote.process.poll()) is None:
        return False
    now = time.monotonic()
    if status == SSH_FAILED and remote.command.lasting and reconnect_seconds:
        # an earlier attempt had connected
        if remote.lost_at is None or now - remote.start_time > 2 * CONNECT_SECONDS:
            remote.lost_at = now
            has_spare = reconnect_seconds < plan.patience_seconds
            then = "then a spare takes its place" if has_spare else "--patience"
            message = (
                f"lost the connection to {remote.command.host}; reconnecting for up to "
                f"{reconnect_seconds:.0f} s ({then})"
            )
            print(f"llmsys: {message}", file=sys.stderr, flush=True)
        if now - remote.lost_at <= reconnect_seconds:
            if now - remote.start_time >= AGAIN_SECONDS:
                remote.process, remote.start_time = (
                    _start_process(plan, remote.command, again=True),
                    now,
                )
            return False
    remote.status = status
    return True


def combine_statuses(statuses: dict[str, int], plan: LaunchPlan) -> int:
    """Return one status for all hosts. The run has succeeded when at least `min_hosts` hosts
    have.
    """
    failed = {host: status for host, status in statuses.items() if status}
    if not failed:
        return 0
    ended = set(failed.values())
    # ranks agree on a stop at a step, so one that saved and stopped speaks for all
    if STOPPED in ended:
        return STOPPED
    if len(statuses) - len(failed) >= plan.min_hosts and len(statuses) > 1:
        print(
            f"llmsys: the run finished on the remaining hosts; lost: {_describe_failures(failed)}",
            file=sys.stderr,
        )
        return 0
    for status in (MENDABLE, CRASHED, HUNG):  # the rank has printed its own message
        if status in ended:
            raise SystemExit(status)
    if statuses.keys() == failed.keys() and ended == {LOST_PEER} and len(failed) == 1:
        raise SystemExit(LOST_PEER)
    raise LostRankError(
        f"training stopped: {_describe_failures(failed)}. Checkpoints are intact: run the same "
        f"command again to continue from the newest one in {plan.folder.parent}."
    )


def _describe_failures(failed: dict[str, int]) -> str:
    meanings = {
        SSH_FAILED: "lost its ssh connection, or could not be reached",
        UNMET: "missed the rendezvous",
    }
    return ", ".join(
        f"{host or 'the launcher'} {meanings.get(status, f'ended with status {status}')}"
        for host, status in failed.items()
    )


def _start_process(
    plan: LaunchPlan, command: HostCommand, *, again: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command on its host. With `again`, first end the processes that an earlier
    connection left there.
    """
    line = command.format_shell_line(plan, in_place=True)
    if command.host is None or is_this_host(strip_user(command.host)):
        with ignore_own_signals() as more:
            return subprocess.Popen(
                ["bash", "-c", line], env=build_child_environment() | more, stdin=subprocess.DEVNULL
            )
    # there, SIGHUP means that this connection is lost
    line = f"export {HANGUP}={HANGUP_ENDS}; {line}"
    quiet: tuple[str, ...] = ()
    if again:
        quiet, line = ("-q",), f"{_format_signal_command(plan, signal.SIGKILL)} >/dev/null; {line}"
    # ssh gives up no sooner than the ranks themselves do
    silences = max(LEAST_SILENCES, math.ceil(plan.outage_seconds / SILENCE_SECONDS))
    alive = (
        "-o",
        f"ServerAliveInterval={SILENCE_SECONDS}",
        "-o",
        f"ServerAliveCountMax={silences}",
    )
    return subprocess.Popen([*SSH, *quiet, *alive, command.host, line], stdin=subprocess.DEVNULL)


def _signal_hosts(plan: LaunchPlan, number: int) -> None:
    """Send a signal to the ranks of every host. One rank that receives it is enough, since ranks
    agree at each step.
    """
    signal_ranks(str(plan.folder / "config.yaml"), number)
    for host in (*plan.hosts, *plan.spares):
        if not is_this_host(strip_user(host.name)):
            with suppress(OSError):
                # there, SIGHUP ends ranks at once
                forwarded = signal.SIGUSR1 if number == signal.SIGHUP else number
                subprocess.Popen(
                    [*SSH, host.name, _format_signal_command(plan, forwarded)],
                    stdin=subprocess.DEVNULL,
                )


def _format_signal_command(plan: LaunchPlan, number: int) -> str:
    """Return the shell line that sends a signal to the ranks of a host."""
    setting = shlex.quote(str(plan.folder / "environment.sh"))
    words = [
        sys.executable,
        "-m",
        "llmsys.launch.process.signal_forwarding",
        str(plan.folder / "config.yaml"),
        str(int(number)),
    ]
    return f". {setting} && {shlex.join(words)}"
