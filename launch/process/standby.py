"""Processes that have imported torch and wait for the next restart, so that no restart waits for
imports.

A standby agent (launch/launchers/torchrun.py under LLMSYS_STANDBY) starts a standby rank for each
slot. Both import everything and then read one line from their standard input: the agent an empty
one, the rank its environment as JSON.

Invariants:
- A standby whose starter is gone reads the end of its input, and exits.
- An idle standby is no rank for launch/process/signal_forwarding.py: its process has the name
  IDLE_NAME.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

VARIABLE = "LLMSYS_STANDBY"
IDLE_NAME = "llmsys-standby"  # the kernel keeps 15 letters
NAME = Path("/proc/self/comm")


def is_standby() -> bool:
    """Return whether this process was started as a standby and has not begun its work.

    Returns:
        True until `wait_for_turn` has returned.
    """
    return VARIABLE in os.environ


def wait_for_turn() -> str:
    """Wait until the starter of this process gives it its work; exit when the starter is gone.

    Returns:
        The line that the starter wrote.
    """
    # Ctrl-C ends the starter, and that ends the input
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    signal.signal(signal.SIGINT, before)
    del os.environ[VARIABLE]
    # what is started later must not read the pipe
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return line


def wait_as_rank(import_everything: Callable[[], None]) -> float:
    """Import, wait idle, and adopt the environment of a rank.

    Args:
        import_everything: Imports what a rank needs. Must not start threads, devices or process
            groups.

    Returns:
        Seconds from the start of this process until it was ready: what the restart did not have to
        wait for.
    """
    name = NAME.read_text()
    # asks ranks for a profile, and would end this process
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    NAME.write_text(IDLE_NAME)
    import_everything()
    ready_seconds = time.time() - psutil.Process().create_time()
    environment: dict[str, str] = json.loads(wait_for_turn())
    os.environ.clear()
    os.environ.update(environment)
    NAME.write_text(name)
    return ready_seconds


class StandbyRanks:
    """Standby ranks of one host: processes that take over instead of new ones."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        """Start the processes, which import what a rank needs and then wait.

        Args:
            command: Command line of a rank.
            count: Number of processes, that of ranks on this host.
        """
        self.command = list(command)
        environment = os.environ | {VARIABLE: "1"}
        if count > 1:  # as torchrun sets it for its workers; OpenMP reads it as torch is imported
            environment.setdefault("OMP_NUM_THREADS", "1")
        # torch ends a rank by its process group
        self.waiting = [
            subprocess.Popen(
                self.command, env=environment, stdin=subprocess.PIPE, start_new_session=True
            )
            for _ in range(count)
        ]

    def take(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes] | None":
        """Hand a rank's environment to a standby.

        Args:
            command: What the rank would be started with.
            environment: All of its variables.

        Returns:
            The process, which is the rank from now on; None where none is left or it was made for
            another command.
        """
        while self.waiting and list(command) == self.command:
            process = self.waiting.pop(0)
            if process.poll() is None and process.stdin is not None:
                try:
                    process.stdin.write(json.dumps(dict(environment)).encode() + b"\n")
                    process.stdin.close()
                except OSError:  # it ended just now
                    continue
                return process
        return None
