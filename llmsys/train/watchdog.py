"""Names the rank that hangs, with the stacks of every rank, and ends the run.

The loop says at each phase that it lives (`beat`). A thread of each rank writes what was said last to
`heartbeats/rank-N.json` in the run folder. When a rank gets no further for the timeout, the interpreter's own watchdog
writes its stacks to `heartbeats/rank-N.stacks`, even where no Python code can run any more; then the first rank that
still can compares all heartbeats, names those that are silent or behind, and every rank leaves with status 4.

Files and not the store of the process group: that one lives in rank 0, which may be the rank that hangs.
"""

import atexit
import faulthandler
import json
import os
import platform
import signal
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import psutil

from llmsys.log import EventWriter, logger
from llmsys.parallel.group import rank, world_size

HUNG = 4
"""The exit status of a run that was ended because a rank hung."""

FOLDER = "heartbeats"
BEATS_PER_TIMEOUT = 10
LONGEST_PAUSE_SECONDS = 5.0
SILENT_BEATS = 4
"""Heartbeats that are missed before a rank counts as silent: its process is stopped, or gone, or its host is."""

LAST_SECONDS = 1.0

log = logger(__name__)


@dataclass(frozen=True)
class Heartbeat:
    """What a rank was doing when it was heard of last. `age_seconds` is how much older than the reader's own it is."""

    rank: int
    host: str
    process: int
    step: int
    phase: str
    beats: int
    created: float = 0.0
    age_seconds: float = 0.0


def state_of(beat: Heartbeat) -> str:
    """What the system says of a rank's process: running, stopped, disk-sleep, …, gone; unknown on another host."""
    if beat.host != platform.node():
        return "unknown, on another host"
    try:
        process = psutil.Process(beat.process)
        return str(process.status()) if process.create_time() == beat.created else "gone"
    except psutil.NoSuchProcess:
        return "gone"


def culprits(heartbeats: list[Heartbeat], ranks: int, silent_after_seconds: float) -> list[str]:
    """Who holds the others up, one sentence each: the silent ones, else those that are behind; empty when none is."""
    known = {beat.rank: beat for beat in heartbeats}
    unheard = [f"rank {number} was never heard of" for number in range(ranks) if number not in known]
    silent = [
        f"rank {beat.rank} on {beat.host} (process {beat.process}) has been silent for {beat.age_seconds:.0f} s, "
        f"since {beat.phase} of step {beat.step}; its process is {state_of(beat)}"
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


class Watchdog:
    """Watches this rank's loop. A timeout of 0 watches nothing. `close` ends it."""

    def __init__(self, run_folder: Path, timeout_seconds: float) -> None:
        self._folder, self._events = run_folder / FOLDER, run_folder / "events.jsonl"
        self._named = self._folder / "named"
        self._timeout = timeout_seconds
        self._pause = min(timeout_seconds / BEATS_PER_TIMEOUT, LONGEST_PAUSE_SECONDS)
        created = psutil.Process().create_time()
        self._beat = Heartbeat(rank(), platform.node(), os.getpid(), 0, "start", 0, created)
        self._heard, self._armed = time.monotonic(), float("-inf")
        self._closed = threading.Event()
        self._ending = threading.Event()
        self._stacks: TextIO | None = None
        if timeout_seconds:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._named.unlink(missing_ok=True)
            self._stacks = (self._folder / f"rank-{rank():05d}.stacks").open("w")
            self.beat(0, "start")
            self._write()
            atexit.register(self._leave_together)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, step: int, phase: str) -> None:
        """Say that this rank has come to `phase` of step `step`, counted from 1."""
        if self._stacks is None or self._closed.is_set():
            return
        self._beat = replace(self._beat, step=step, phase=phase, beats=self._beat.beats + 1)
        self._heard = time.monotonic()
        if self._heard - self._armed >= self._pause:  # arming starts a thread: a tenth of a millisecond
            self._armed = self._heard
            faulthandler.dump_traceback_later(self._timeout + self._pause, file=self._stacks)

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        if self._stacks is not None:
            faulthandler.cancel_dump_traceback_later()
            atexit.unregister(self._leave_together)
            self._stacks.close()
            self._stacks = None

    def _watch(self) -> None:
        while not self._closed.wait(self._pause):
            self._write()
            if time.monotonic() - self._heard > self._timeout + 2 * self._pause:
                self._end()

    def _write(self) -> None:
        text = json.dumps({key: value for key, value in asdict(self._beat).items() if key != "age_seconds"})
        path = self._folder / f"rank-{rank():05d}.json"
        aside = path.with_suffix(".tmp")
        try:
            aside.write_text(text)
            aside.rename(path)
        except OSError as error:  # a full disk must not stop the watch
            log.debug("%s could not be written: %s", path, error)

    def _end(self) -> None:
        """Say who it is, from the first rank that is not silent, and leave."""
        self._ending.set()
        heartbeats = self._read()
        silent_after = SILENT_BEATS * self._pause
        speaker = min((beat.rank for beat in heartbeats if beat.age_seconds <= silent_after), default=rank())
        if speaker == rank() and self._first_to_speak():
            self._speak(culprits(heartbeats, world_size(), silent_after))
            for beat in heartbeats:
                if state_of(beat) == psutil.STATUS_STOPPED:
                    os.kill(beat.process, signal.SIGCONT)
        time.sleep(LAST_SECONDS)  # the cause is said, and a woken rank has written, before a launcher sees us leave
        os._exit(HUNG)

    def _leave_together(self) -> None:
        """At the exit of a rank whose partner left a moment before: the status is still HUNG, from `_end`."""
        if self._ending.is_set():
            time.sleep(2 * LAST_SECONDS)

    def _first_to_speak(self) -> bool:
        """Whether nobody has named anyone yet: a woken rank, for one, comes too late to know better."""
        try:
            os.close(os.open(self._named, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def _speak(self, named: list[str]) -> None:
        own = self._beat
        who = "; ".join(named) or "no rank is behind: all wait in the same place, see their stacks"
        log.error(
            "no step was finished for %.0f s (train.hang_timeout_seconds), in %s of step %d: %s. Stacks of every rank "
            "are in %s. The run ends; the same command goes on from the last checkpoint.",
            self._timeout,
            own.phase,
            own.step,
            who,
            self._folder,
        )
        try:
            with EventWriter(self._events) as events:
                events.write("hang", step=own.step, phase=own.phase, named=named, timeout_seconds=self._timeout)
        except OSError as error:
            log.debug("the hang could not be written to the events: %s", error)

    def _read(self) -> list[Heartbeat]:
        """All heartbeats that are there. Ages are differences of file times, so that no two clocks are compared."""
        found = []
        times = {}
        for number in range(world_size()):
            path = self._folder / f"rank-{number:05d}.json"
            try:
                times[number] = path.stat().st_mtime
                found.append(Heartbeat(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError):
                continue
        now = times.get(rank(), max(times.values(), default=0.0))
        return [replace(beat, age_seconds=now - times[beat.rank]) for beat in found]
