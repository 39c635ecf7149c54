"""What each rank said of itself last, and who holds the others up.

Names the rank that hangs, with the stacks of every rank, and ends the run.

The loop says at each phase that it lives (`report_phase`). A thread of each rank writes what was said last to
`heartbeats/rank-N.json` in the run folder. When a rank gets no further for the timeout, its thread writes the stacks to
`heartbeats/rank-N.stacks`, and the first rank that can compares all heartbeats and names those that are silent or
behind; every rank leaves with status 4. On each host the first rank rouses the silent ones, so that they write theirs.

The first time of a phase may take longer than the timeout, as building, compiling and loading do, as long as some rank
is at work (`work_meter.py`).

Files and not the store of the process group: that one lives in rank 0, which may be the rank that hangs. Stacks are
written while the interpreter's lock is held: `faulthandler.dump_traceback_later` does without, and now and then walks
into a frame that is just being freed, which kills a rank that had only been stopped for a while.
"""

import atexit
import faulthandler
import json
import os
import platform
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import psutil

from llmsys.events import EventWriter
from llmsys.log import get_logger
from llmsys.parallel.process_group import get_rank, get_world_size
from llmsys.train.work_meter import WorkMeter

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


HUNG = 4
"""The exit status of a run that was ended because a rank hung."""

FOLDER, NAMED = "heartbeats", "named"
BEATS_PER_TIMEOUT = 10
MAX_INTERVAL_SECONDS = 5.0
SILENT_BEATS = 4
"""Heartbeats that are missed before a rank counts as silent: its process is stopped, or gone, or its host is."""

WORK_SHARE = 0.02
"""The share of the timeout that a process computes when it counts as at work: threads that only look do less."""

EXIT_DELAY_SECONDS = 1.0

log = get_logger(__name__)


def is_hang_named(run_folder: Path, since: float) -> bool:
    """Return whether a rank has named one that hangs since this time: a peer that is lost then is a consequence."""
    path = run_folder / FOLDER / NAMED
    return path.exists() and path.stat().st_mtime >= since


class Watchdog:
    """Watches this rank's loop. A timeout of 0 watches nothing. `close` ends it."""

    def __init__(self, run_folder: Path, timeout_seconds: float) -> None:
        self._folder, self._events = run_folder / FOLDER, run_folder / "events.jsonl"
        self._named = self._folder / NAMED
        self._timeout = timeout_seconds
        self._interval = min(timeout_seconds / BEATS_PER_TIMEOUT, MAX_INTERVAL_SECONDS)
        self._silent_after_seconds = SILENT_BEATS * self._interval
        created = psutil.Process().create_time()
        self._beat = Heartbeat(get_rank(), platform.node(), os.getpid(), 0, "start", 0, created)
        self._last_report = time.monotonic()
        self._phases: set[str] = set()
        self._is_first_time = True
        self._work = WorkMeter(WORK_SHARE * timeout_seconds)
        self._closed = threading.Event()
        self._ending = threading.Event()
        self._stacks: TextIO | None = None
        if timeout_seconds:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._named.unlink(missing_ok=True)
            self._stacks = (self._folder / f"rank-{get_rank():05d}.stacks").open("w")
            faulthandler.register(STACKS_SIGNAL, self._stacks)
            self._write_heartbeat()
            atexit.register(self._delay_exit)
            threading.Thread(target=self._run_watch_loop, name="watchdog", daemon=True).start()

    def report_phase(self, step: int, phase: str) -> None:
        """Say that this rank has come to `phase` of step `step`, counted from 1."""
        if self._stacks is None or self._closed.is_set():
            return
        self._beat = replace(self._beat, step=step, phase=phase, beats=self._beat.beats + 1)
        self._is_first_time = phase not in self._phases
        self._phases.add(phase)
        self._last_report = time.monotonic()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        if self._stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            atexit.unregister(self._delay_exit)
            self._stacks.close()
            self._stacks = None

    def _run_watch_loop(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self._interval):
            heard = time.monotonic() - self._last_report
            self._write_heartbeat(self._work.measure_idle_seconds() if self._is_first_time else heard)
            now = time.monotonic()
            if now - before > self._silent_after_seconds:  # this process itself was stopped
                if self._named.exists():
                    self._end_run()
                self._last_report = now  # and so were all others, as in a job that is suspended: nothing hung
            elif now - self._last_report > self._timeout + 2 * self._interval and not self._may_take_longer():
                self._end_run()
            before = now

    def _may_take_longer(self) -> bool:
        if not self._is_first_time or self._named.exists():
            return False
        patience = self._timeout + 2 * self._interval
        return is_any_at_work(self._read_heartbeats(), patience, max(self._timeout, self._silent_after_seconds))

    def _write_heartbeat(self, idle_seconds: float = 0.0) -> None:
        said = asdict(self._beat) | {"idle_seconds": idle_seconds}
        text = json.dumps({key: value for key, value in said.items() if key != "age_seconds"})
        path = self._folder / f"rank-{get_rank():05d}.json"
        aside = path.with_suffix(".tmp")
        try:
            aside.write_text(text)
            aside.rename(path)
        except OSError as error:  # a full disk must not stop the watch
            log.debug("%s could not be written: %s", path, error)

    def _end_run(self) -> None:
        """Say who it is, from the first rank that is not silent, and leave."""
        self._ending.set()
        if self._stacks is not None:
            faulthandler.dump_traceback(self._stacks)
        heartbeats = self._read_heartbeats()
        alive = [beat for beat in heartbeats if beat.age_seconds <= self._silent_after_seconds]
        if get_rank() == min((beat.rank for beat in alive), default=get_rank()) and self._claim_report():
            self._report_hang(describe_hanging_ranks(heartbeats, get_world_size(), self._silent_after_seconds))
        if get_rank() == min((beat.rank for beat in alive if beat.host == self._beat.host), default=get_rank()):
            for beat in heartbeats:
                if beat not in alive:
                    request_stack_dump(beat)
        time.sleep(
            EXIT_DELAY_SECONDS
        )  # the cause is said, and a woken rank has written, before a launcher sees us leave
        os._exit(HUNG)

    def _delay_exit(self) -> None:
        """At the exit of a rank whose partner left a moment before: the status is still HUNG, from `_end_run`."""
        if self._ending.is_set():
            time.sleep(2 * EXIT_DELAY_SECONDS)

    def _claim_report(self) -> bool:
        """Whether nobody has named anyone yet: a woken rank, for one, comes too late to know better."""
        try:
            os.close(os.open(self._named, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def _report_hang(self, named: list[str]) -> None:
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

    def _read_heartbeats(self) -> list[Heartbeat]:
        """All heartbeats that are there. Ages are differences of file times, so that no two clocks are compared."""
        found = []
        times = {}
        for number in range(get_world_size()):
            path = self._folder / f"rank-{number:05d}.json"
            try:
                times[number] = path.stat().st_mtime
                found.append(Heartbeat(**json.loads(path.read_text())))
            except (OSError, ValueError, TypeError):
                continue
        now = times.get(get_rank(), max(times.values(), default=0.0))
        return [replace(beat, age_seconds=now - times[beat.rank]) for beat in found]
