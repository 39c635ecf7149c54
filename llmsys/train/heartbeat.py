"""What each rank said of itself last, and who holds the others up."""

import os
import platform
import signal
from contextlib import suppress
from dataclasses import dataclass

import psutil

STACKS_SIGNAL = signal.SIGQUIT
"""Has a rank write the stacks of its threads without the interpreter, as Java's and Go's programs do."""

GONE, UNKNOWN = "gone", "unknown, on another host"


@dataclass(frozen=True)
class Heartbeat:
    """What a rank was doing when it was heard of last. `age_seconds` is how much older than the reader's own it is.

    `idle_seconds` is for how long its process had done no work when it wrote this.
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


def read_process_state(beat: Heartbeat) -> str:
    """What the system says of a rank's process: running, stopped, disk-sleep, …, gone; unknown on another host."""
    if beat.host != platform.node():
        return UNKNOWN
    try:
        process = psutil.Process(beat.process)
        return str(process.status()) if process.create_time() == beat.created else GONE
    except psutil.NoSuchProcess:
        return GONE


def describe_hanging_ranks(heartbeats: list[Heartbeat], ranks: int, silent_after_seconds: float) -> list[str]:
    """Who holds the others up, one sentence each: the silent ones, else those that are behind; empty when none is."""
    known = {beat.rank: beat for beat in heartbeats}
    unheard = [f"rank {number} was never heard of" for number in range(ranks) if number not in known]
    silent = [
        f"rank {beat.rank} on {beat.host} (process {beat.process}) has been silent for {beat.age_seconds:.0f} s, "
        f"since {beat.phase} of step {beat.step}; its process is {read_process_state(beat)}"
        for beat in heartbeats
        if beat.age_seconds > silent_after_seconds
    ]
    if unheard or silent:
        return unheard + silent
    furthest = max(beat.beats for beat in heartbeats)
    return [
        f"rank {beat.rank} on {beat.host} (process {beat.process}) is still in {beat.phase} of step {beat.step}, "
        f"and others are further"
        for beat in heartbeats
        if beat.beats < furthest
    ]


def is_any_at_work(heartbeats: list[Heartbeat], timeout_seconds: float, silent_after_seconds: float) -> bool:
    """Return whether a rank has worked within the timeout, and none is silent because it was stopped or is gone."""
    silent = [beat for beat in heartbeats if beat.age_seconds > silent_after_seconds]
    if any(read_process_state(beat) in (GONE, UNKNOWN, psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) for beat in silent):
        return False
    return any(beat.idle_seconds + beat.age_seconds <= timeout_seconds for beat in heartbeats)


def request_stack_dump(beat: Heartbeat) -> None:
    """Have a silent rank of this host write its stacks: one that is stopped goes on, and its own watchdog does.

    One whose watchdog cannot run, because other code keeps the interpreter's lock, is sent STACKS_SIGNAL.
    """
    state = read_process_state(beat)
    if state in (GONE, UNKNOWN):
        return
    with suppress(ProcessLookupError):
        os.kill(beat.process, signal.SIGCONT if state == psutil.STATUS_STOPPED else STACKS_SIGNAL)
