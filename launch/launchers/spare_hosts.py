"""Decide when a spare takes the place of a host. Pure functions but for the clock.

A host has failed when its command ended with an error, or could not be reached, while others still
run: their agents wait for it. Hosts that fail together have a common cause, which no spare mends.
"""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from llmsys.launch.launchers.restart_agent import FINAL

# Hosts that fail for one reason do so within this time.
TOGETHER_SECONDS = 10.0
# A lost connection counts as a lost host after this time, where there is a spare.
RECONNECT_SECONDS = 30.0


@dataclass
class Replacement:
    """Failures of hosts that are not replaced yet.

    Attributes:
        first: The host of the rendezvous, which cannot be replaced.
        clock: Returns seconds.
    """

    first: str
    clock: Callable[[], float] = time.monotonic
    failed_at: dict[str, float] = field(default_factory=dict)

    def add_failure(self, host: str, status: int) -> None:
        """Note the end of a host's command.

        Args:
            host: Name of the host.
            status: Exit status.
        """
        if status not in FINAL and host != self.first:
            self.failed_at[host] = self.clock()

    def list_due(self, ended: Mapping[str, int], running: Collection[str]) -> list[str]:
        """Return the hosts to replace now, each of them once.

        Args:
            ended: Host → exit status of commands that have ended.
            running: Hosts whose commands run.

        Returns:
            Hosts that failed TOGETHER_SECONDS ago while the first host still runs; none after a
            final end of a host.
        """
        if self.first not in running or any(status in FINAL for status in ended.values()):
            return []
        due = [
            host
            for host, since in self.failed_at.items()
            if self.clock() - since >= TOGETHER_SECONDS
        ]
        for host in due:
            del self.failed_at[host]
        return due
