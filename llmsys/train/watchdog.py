"""Detect hangs: name the rank that hangs, dump the stacks of every rank, and end the run.

The loop reports each phase (`report_phase`). A thread of each rank writes the last report to
`heartbeats/rank-N.json` in the run folder. When a rank makes no progress for the timeout, its
thread writes stacks to `heartbeats/rank-N.stacks` and the last collectives to
`heartbeats/collectives-rank-N` (flight_recorder.py). The first live rank compares all heartbeats
and names the ranks that are silent or late; every rank exits with status 4. On each host the first
live rank makes silent ranks dump their stacks.

Invariants:
- The first time of a phase may exceed the timeout, as compiling does, while a rank works
  (`work_meter.py`).
- Heartbeats are files, not keys of the process group's store: its server is rank 0, which may be
  the one that hangs.
- Stacks are dumped under the interpreter's lock. `faulthandler.dump_traceback_later` runs without
  it and sometimes walks into a frame that is being freed, which kills a rank that was only
  suspended.
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
from llmsys.parallel import flight_recorder
from llmsys.parallel.process_group import get_rank, get_world_size
from llmsys.train.work_meter import WorkMeter

# Makes a rank dump its stacks without the interpreter, as Java and Go programs do.
STACKS_SIGNAL = signal.SIGQUIT

# States of a process that the system does not give.
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
    """Read the system's state of a rank's process.

    Args:
        beat: The last report of the rank.

    Returns:
        running, stopped, disk-sleep, …, gone; unknown on another host.
    """
    if beat.host != platform.node():
        return UNKNOWN
    try:
        process = psutil.Process(beat.process)
        # A number may belong to another process by now.
        return str(process.status()) if process.create_time() == beat.created else GONE
    except psutil.NoSuchProcess:
        return GONE


def describe_hanging_ranks(
    heartbeats: list[Heartbeat], ranks: int, silent_after_seconds: float
) -> list[str]:
    """Name the ranks that hang.

    Args:
        heartbeats: The last report of each rank that has one.
        ranks: Ranks of the run.
        silent_after_seconds: Age from which a rank counts as silent.

    Returns:
        One sentence per rank: those that are silent, else those with fewer beats, else those in
        a pass that other stages wait for. Empty if there are none.
    """
    known = {beat.rank: beat for beat in heartbeats}
    unheard = [
        f"rank {number} has sent no heartbeat" for number in range(ranks) if number not in known
    ]
    silent = [
        f"rank {beat.rank} on {beat.host} (process {beat.process}) has been silent for "
        f"{beat.age_seconds:.0f} s, since {beat.phase_and_work} of step {beat.step}; its process "
        f"is {read_process_state(beat)}"
        for beat in heartbeats
        if beat.age_seconds > silent_after_seconds
    ]
    if unheard or silent:
        return unheard + silent
    furthest = max(beat.beats for beat in heartbeats)
    late = [beat for beat in heartbeats if beat.beats < furthest]
    others = "are ahead"
    if not late and any(not beat.work for beat in heartbeats):
        late = [beat for beat in heartbeats if beat.work]
        others = "wait"
    return [
        f"rank {beat.rank} on {beat.host} (process {beat.process}) is still in "
        f"{beat.phase_and_work} of step {beat.step}, while others {others}"
        for beat in late
    ]


def is_any_at_work(
    heartbeats: list[Heartbeat], timeout_seconds: float, silent_after_seconds: float
) -> bool:
    """Return whether a rank works: a phase that is run for the first time may take longer than the
    timeout.

    Args:
        heartbeats: The last report of each rank.
        timeout_seconds: Time without work after which a rank is idle.
        silent_after_seconds: Age from which a rank counts as silent.

    Returns:
        True if a rank worked within the timeout and no silent rank is stopped or gone.
    """
    silent = [beat for beat in heartbeats if beat.age_seconds > silent_after_seconds]
    if any(
        read_process_state(beat) in (GONE, UNKNOWN, psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        for beat in silent
    ):
        return False
    return any(beat.idle_seconds + beat.age_seconds <= timeout_seconds for beat in heartbeats)


def request_stack_dump(beat: Heartbeat) -> None:
    """Make a silent rank of this host dump its stacks.

    A stopped rank is continued, and its own watchdog dumps. STACKS_SIGNAL reaches one whose
    interpreter lock is held.

    Args:
        beat: The last report of the rank.
    """
    state = read_process_state(beat)
    if state in (GONE, UNKNOWN):
        return
    with suppress(ProcessLookupError):
        os.kill(beat.process, signal.SIGCONT if state == psutil.STATUS_STOPPED else STACKS_SIGNAL)


# Exit status of a run that ended because a rank hung.
HUNG = 4

FOLDER = "heartbeats"
NAMED = "named"
# For long timeouts one beat every MAX_INTERVAL_SECONDS.
BEATS_PER_TIMEOUT = 10
MAX_INTERVAL_SECONDS = 5.0
# Missed heartbeats after which a rank counts as silent: its process is stopped or gone, or its host
# is.
SILENT_BEATS = 4

# CPU time, as a share of the timeout, that counts as work: threads that only poll use less.
WORK_SHARE = 0.02

EXIT_DELAY_SECONDS = 1.0

log = get_logger(__name__)


def is_hang_named(run_folder: Path, since: float) -> bool:
    """Return whether a rank has named a hanging one, so that a peer lost afterwards is a
    consequence.

    Args:
        run_folder: folder of the run.
        since: start of this run, in seconds of the wall clock.

    Returns:
        True if a hang was reported since then.
    """
    path = run_folder / FOLDER / NAMED
    return path.exists() and path.stat().st_mtime >= since


class Watchdog:
    """A watchdog of this rank's loop until `close`. With a timeout of 0 it does nothing."""

    def __init__(self, run_folder: Path, timeout_seconds: float) -> None:
        self._folder = run_folder / FOLDER
        self._events = run_folder / "events.jsonl"
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
            # a report of an earlier run in this folder is stale
            self._named.unlink(missing_ok=True)
            self._stacks = (self._folder / f"rank-{get_rank():05d}.stacks").open("w")
            faulthandler.register(STACKS_SIGNAL, self._stacks)
            self._write_heartbeat()
            atexit.register(self._delay_exit)
            threading.Thread(target=self._run_watch_loop, name="watchdog", daemon=True).start()

    def report_phase(self, step: int, phase: str) -> None:
        """Report that this rank is alive.

        Args:
            step: The step, counted from 1.
            phase: The phase that begins, such as `building the model`.
        """
        if self._stacks is None or self._closed.is_set():
            return
        # A new object in one assignment, because the watching thread reads it at any time.
        self._beat = replace(self._beat, step=step, phase=phase, beats=self._beat.beats + 1)
        self._is_first_time = phase not in self._phases
        self._phases.add(phase)
        self._last_report = time.monotonic()

    def report_work(self, work: str) -> None:
        """Report which pass of a pipeline stage runs, so that a rank that others wait for can be
        told from those that wait.

        Args:
            work: The pass; "" at its end.
        """
        self._beat = replace(self._beat, work=work)

    def close(self) -> None:
        """Stop watching."""
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
            self._write_heartbeat(
                self._work.measure_idle_seconds() if self._is_first_time else heard
            )
            now = time.monotonic()
            if now - before > self._silent_after_seconds:  # this process itself was suspended
                if self._named.exists():
                    self._end_run()
                self._last_report = now  # so was the whole job, and nothing hung
            # Two intervals of grace: heartbeats of other ranks are up to one interval old.
            elif (
                now - self._last_report > self._timeout + 2 * self._interval
                and not self._may_take_longer()
            ):
                self._end_run()
            before = now

    def _may_take_longer(self) -> bool:
        if not self._is_first_time or self._named.exists():
            return False
        patience = self._timeout + 2 * self._interval
        return is_any_at_work(
            self._read_heartbeats(), patience, max(self._timeout, self._silent_after_seconds)
        )

    def _write_heartbeat(self, idle_seconds: float = 0.0) -> None:
        fields = asdict(self._beat) | {"idle_seconds": idle_seconds}
        text = json.dumps({key: value for key, value in fields.items() if key != "age_seconds"})
        path = self._folder / f"rank-{get_rank():05d}.json"
        aside = path.with_suffix(".tmp")  # renamed, so that no reader finds half a heartbeat
        try:
            aside.write_text(text)
            aside.rename(path)
        except OSError as error:  # a full disk must not end the watch
            log.debug("%s could not be written: %s", path, error)

    def _end_run(self) -> None:
        """Report the hanging ranks from the first rank that is not silent, and exit."""
        self._ending.set()
        # In a thread: a rank that was suspended has EXIT_DELAY_SECONDS before its partners leave.
        trace = flight_recorder.start_collective_trace(self._folder, get_rank())
        if self._stacks is not None:
            faulthandler.dump_traceback(self._stacks)
        heartbeats = self._read_heartbeats()
        alive = [beat for beat in heartbeats if beat.age_seconds <= self._silent_after_seconds]
        if (
            get_rank() == min((beat.rank for beat in alive), default=get_rank())
            and self._claim_report()
        ):
            self._report_hang(
                describe_hanging_ranks(heartbeats, get_world_size(), self._silent_after_seconds)
            )
        if get_rank() == min(
            (beat.rank for beat in alive if beat.host == self._beat.host), default=get_rank()
        ):
            for beat in heartbeats:
                if beat not in alive:
                    request_stack_dump(beat)
        # The report and the stacks of a woken rank must be written before a launcher sees this
        # exit.
        time.sleep(EXIT_DELAY_SECONDS)
        trace.join(flight_recorder.WRITE_SECONDS)
        os._exit(HUNG)  # sys.exit would end this thread only

    def _delay_exit(self) -> None:
        """Wait at exit if `_end_run` runs, so that the status is HUNG even if a partner left a
        moment before.
        """
        if self._ending.is_set():
            time.sleep(2 * EXIT_DELAY_SECONDS)

    def _claim_report(self) -> bool:
        """Return whether no rank has reported yet. A rank that was suspended comes too late to
        know better.
        """
        try:
            # decides between ranks that time out together
            os.close(os.open(self._named, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        except OSError:  # two reports are better than none
            return True
        return True

    def _report_hang(self, named: list[str]) -> None:
        own = self._beat
        who = (
            "; ".join(named) or "no single rank hangs: all wait at the same point, see their stacks"
        )
        log.error(
            "no step has finished for %.0f s (train.hang_timeout_seconds), in %s of step %d: %s. "
            "Stacks of every rank are in %s, and its last collectives in %sN, to compare with "
            "`%s`. The run ends; the same command continues from the last checkpoint.",
            *(self._timeout, own.phase, own.step, who),
            *(
                self._folder,
                flight_recorder.FILE_PREFIX,
                flight_recorder.format_trace_command(self._folder),
            ),
        )
        try:
            with EventWriter(self._events) as events:
                events.write(
                    "hang",
                    step=own.step,
                    phase=own.phase,
                    named=named,
                    timeout_seconds=self._timeout,
                )
        except OSError as error:
            log.debug("the hang event could not be written: %s", error)

    def _read_heartbeats(self) -> list[Heartbeat]:
        """Return all heartbeats. Ages are differences of file times, so clocks of hosts are not
        compared.
        """
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
