"""Restart the ranks of one host after a loss: `python -m llmsys.launch.launchers.restart_agent
--meet HOST:PORT … COMMAND`.

COMMAND is torchrun (launch/launchers/torchrun.py) without its own restarts. Each attempt gets a new
agent process, because an agent that lost its rendezvous blocks in a call without a timeout. It also
gets a new rendezvous, because agents that count different attempts cannot join each other. Exit
codes 0 (done), 2 (user error) and 75 (stopped and saved) are final.
"""

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from llmsys.errors import LaunchError
from llmsys.launch.hosts.network_interfaces import is_this_host
from llmsys.launch.process.parent_watch import build_child_environment, die_with_parent
from llmsys.launch.process.signal_forwarding import forward_signals, list_descendant_ranks
from llmsys.launch.process.standby import VARIABLE as STANDBY
from llmsys.launch.train import LOST_PEER, MENDABLE, STOPPED, UNMET
from llmsys.log import configure_logging, get_logger

# a restart does not help: finished, user error, stopped after a save
FINAL = (0, MENDABLE, STOPPED)
LOOK_SECONDS = 2.0
KNOCK_SECONDS = 5.0
# An agent without ranks does not recover once its rendezvous has been unreachable for this long.
SHUT_SECONDS = 20.0
LONGEST_PAUSE_SECONDS = 30.0
SAY_SECONDS = 10.0
# Imports of a standby wait until the ranks have made theirs.
SETTLE_SECONDS = 20.0

log = get_logger("llmsys.launch.launchers.restart_agent")


@dataclass(frozen=True)
class Rendezvous:
    """The port of the first host where the agents of all hosts meet. The first host's agent
    opens it.
    """

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """True where this host holds the rendezvous."""
        with suppress(LaunchError):
            return is_this_host(self.host)
        return False

    def is_open(self) -> bool:
        """Return whether the port accepts a connection."""
        with suppress(OSError), socket.create_connection((self.host, self.port), KNOCK_SECONDS):
            return True
        return False

    def format_loss(self) -> str:
        """Return the message that the first host is gone, with the next step."""
        return (
            f"{self.host}, the first host of the run, does not answer at {self}. Checkpoints are "
            "intact: bring it back, or leave it out of nodes=; the same command then continues "
            "from the newest one."
        )

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class StandbyAgent:
    """The next agent of a host, started before it is needed, so that a restart waits for no import.

    Without `is_wanted` there is none, and every agent is started when it is needed.
    """

    def __init__(self, command: Sequence[str], is_wanted: bool) -> None:
        """Start agents by this command."""
        self.command, self.is_wanted = command, is_wanted
        self.process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Start the next agent, unless it is there."""
        if self.is_wanted and self.process is None:
            environment = build_child_environment() | {STANDBY: "1"}
            self.process = subprocess.Popen(self.command, env=environment, stdin=subprocess.PIPE)

    def take(self) -> "subprocess.Popen[bytes]":
        """Return an agent that begins now: the one that was prepared, else a new one."""
        agent, self.process = self.process, None
        with suppress(OSError):
            if agent is not None and agent.stdin is not None and agent.poll() is None:
                agent.stdin.write(b"\n")
                agent.stdin.close()
                return agent
        # a new process each time: an agent that lost its rendezvous blocks in a call without a
        # timeout
        return subprocess.Popen(self.command, env=build_child_environment())

    def close(self) -> None:
        """End the agent that was prepared and not needed."""
        if self.process is not None:
            self.process.kill()  # its ranks read the end of their input
            self.process.wait()


def run_with_restarts(
    command: Sequence[str],
    rendezvous: Rendezvous,
    restarts: int,
    patience_seconds: float,
    leave_after: int = 0,
    has_standby: bool = False,
) -> int:
    """Run the command until it has ended for good; return its last status, or 3 when the hosts did
    not meet in time.

    `restarts` counts ranks that ran and were lost. Hosts that wait for each other are limited by
    the patience alone. With `leave_after`, a host whose own ranks failed so often in a row ends, so
    that a spare can take its place. With `has_standby`, the processes of the next restart are
    started and import torch while the ranks run.
    """
    agents = StandbyAgent(command, has_standby)
    try:
        with forward_signals() as asked:
            return _run_attempts(agents, rendezvous, restarts, patience_seconds, leave_after, asked)
    finally:
        agents.close()


def _run_attempts(
    agents: StandbyAgent,
    rendezvous: Rendezvous,
    restarts: int,
    patience_seconds: float,
    leave_after: int,
    asked: list[int],
) -> int:
    """Run `run_with_restarts`. Ranks that were `asked` to stop are not restarted, whatever their
    exit status.
    """
    left, lost_at, pause, own_failures = restarts, time.monotonic(), 1.0, 0
    while _wait_for_rendezvous(rendezvous, lost_at + patience_seconds):
        status, lived_until = _run_attempt(agents, rendezvous, lost_at, patience_seconds, asked)
        if status in FINAL or asked:
            return status
        # hosts that did not meet have lost no rank, and use up no restart
        if lived_until is not None:
            # ranks that lost a peer are not the cause
            own_failures = own_failures + 1 if status != LOST_PEER else 0
            if leave_after and own_failures >= leave_after and not rendezvous.is_local:
                log.error(
                    "the ranks of this host failed %d times in a row; it leaves its place",
                    own_failures,
                )
                return status
            if left == 0:
                if restarts:  # else the ranks have has_warned all
                    log.error(
                        "the ranks of this host ended (status %d), and no restart of %d is left",
                        status,
                        restarts,
                    )
                return status
            left, lost_at, pause = left - 1, lived_until, 1.0
            log.warning(
                "the ranks of this host ended (status %d); restart %d of %d, after the next "
                "rendezvous at %s, within %.0f s (--patience)", status, restarts - left, restarts,
                rendezvous, patience_seconds,
            )  # fmt: skip
        time.sleep(min(pause, max(0.0, lost_at + patience_seconds - time.monotonic())))
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    is_lost = not rendezvous.is_local and not rendezvous.is_open()
    log.error(
        "no rendezvous at %s within %.0f s (--patience). %s", rendezvous, patience_seconds,
        rendezvous.format_loss() if is_lost
        else "Checkpoints are intact: the same command continues from the newest one.",
    )  # fmt: skip
    return LOST_PEER


def _wait_for_rendezvous(rendezvous: Rendezvous, deadline: float) -> bool:
    """Wait until the rendezvous can be tried; return False when the deadline has passed."""
    began, has_warned = time.monotonic(), False
    while (now := time.monotonic()) < deadline:
        if rendezvous.is_local or rendezvous.is_open():
            return True
        if now - began > SAY_SECONDS and not has_warned:
            log.warning(
                "no response from %s; retrying for %.0f s (--patience)", rendezvous, deadline - now
            )
            has_warned = True
        time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))
    return False


def _run_attempt(
    agents: StandbyAgent,
    rendezvous: Rendezvous,
    lost_at: float,
    patience_seconds: float,
    asked: list[int],
) -> tuple[int, float | None]:
    """Run one agent; return its status, and when its ranks were last seen (None: the hosts did not
    meet).

    An agent without ranks is killed when the patience is over, or when its rendezvous has been
    unreachable for SHUT_SECONDS. Agent and ranks are gone afterwards.
    """
    agent = agents.take()
    ranks: list[psutil.Process] = []
    lived_until, open_at = None, time.monotonic()
    settled_at = open_at + SETTLE_SECONDS
    while (status := _wait_for_exit(agent, LOOK_SECONDS)) is None:
        now = time.monotonic()
        if seen := list_descendant_ranks(agent.pid):
            ranks, lived_until, open_at = seen, now, now
            if now >= settled_at:
                agents.prepare()
            continue
        # Ranks may take long to come; only an unreachable rendezvous counts as shut.
        open_at = now if rendezvous.is_local or rendezvous.is_open() else open_at
        waited = now - (lost_at if lived_until is None else lived_until)
        if waited > patience_seconds or now - open_at > SHUT_SECONDS:
            agent.kill()
    # ranks outlive an agent that was killed: the process that they watch is this one
    left = [rank for rank in ranks if _kill_rank(rank)]
    # the ranks have stopped, and the agent found nobody left to tell
    if asked and status < 0 and not left:
        return STOPPED, time.monotonic()
    if lived_until is None and (status < 0 or status == UNMET):
        return UNMET, None
    return LOST_PEER if status < 0 else status, lived_until or time.monotonic()


def _kill_rank(rank: psutil.Process) -> bool:
    """Kill a rank; return whether it was still running."""
    with suppress(psutil.Error):
        was_running = rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE
        rank.kill()
        return was_running
    return False


def _wait_for_exit(agent: subprocess.Popen[bytes], seconds: float) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return agent.wait(seconds)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options, keep the command that follows them running, and return its status."""
    parser = argparse.ArgumentParser(
        prog="python -m llmsys.launch.launchers.restart_agent", description=__doc__
    )
    parser.add_argument("--meet", required=True, help="HOST:PORT of the first host")
    parser.add_argument(
        "--restarts", type=int, required=True, help="number of restarts of lost ranks"
    )
    parser.add_argument(
        "--patience", type=float, required=True, help="seconds to wait for lost hosts"
    )
    parser.add_argument(
        "--leave-after",
        type=int,
        default=0,
        help="failures of this host's own ranks until it leaves",
    )
    parser.add_argument(
        "--standby", action="store_true", help="import torch for the next restart in advance"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="command that starts the ranks of this host"
    )
    options = parser.parse_args(arguments)
    die_with_parent()
    configure_logging()
    host, _, port = options.meet.rpartition(":")
    try:
        rendezvous = Rendezvous(host, int(port))
        return run_with_restarts(
            options.command,
            rendezvous,
            options.restarts,
            options.patience,
            options.leave_after,
            options.standby,
        )
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
