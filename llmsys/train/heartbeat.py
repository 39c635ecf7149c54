"""The last report of a rank, which the watchdogs of a run exchange, and the state of its
process.
"""

import platform
from dataclasses import dataclass

import psutil

GONE = "gone"
UNKNOWN = "unknown, on another host"


@dataclass(frozen=True)
class Heartbeat:
    """The last report of a rank.

    Attributes:
        beats: phases reported so far.
        created: start time of its process.
        idle_seconds: seconds without work in its process when it wrote this.
        age_seconds: how much older than the reader's own heartbeat it is.
        work: pass of a pipeline stage that runs; empty while the rank waits for another.
    """

    rank: int
    host: str
    process: int
    step: int
    phase: str
    beats: int
    created: float = 0.0
    idle_seconds: float = 0.0
    age_seconds: float = 0.0
    work: str = ""

    @property
    def phase_and_work(self) -> str:
        """The phase, with the pass of a pipeline stage where one runs."""
        return f"{self.phase} ({self.work})" if self.work else self.phase


def read_process_state(beat: Heartbeat) -> str:
    """Return the system's state of a rank's process: running, stopped, disk-sleep, …, gone;
    unknown on another host.
    """
    if beat.host != platform.node():
        return UNKNOWN
    try:
        process = psutil.Process(beat.process)
        # A number may belong to another process by now.
        return str(process.status()) if process.create_time() == beat.created else GONE
    except psutil.NoSuchProcess:
        return GONE
