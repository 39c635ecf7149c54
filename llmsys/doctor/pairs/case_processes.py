"""Run the phases of cases in separate processes, several cases at once where they fit.

Every rank is forked from a server that has imported torch and the engines, so a process costs a
tenth of a second and no state of one case is left for another.
"""

import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from llmsys.doctor.pairs.case_rank import compare_case, compare_watched_case, run_rank
from llmsys.doctor.pairs.cases import (
    STEPS,
    Limits,
    PairCase,
    RefusedError,
    build_branch_config,
    build_parts,
)
from llmsys.doctor.pairs.comparison import Difference
from llmsys.doctor.pairs.events import EVENT_STEPS, is_seen_at_the_end
from llmsys.doctor.pairs.factor import Factor
from llmsys.doctor.pairs.factors import FACTORS
from llmsys.doctor.pairs.phase import Phase
from llmsys.doctor.pairs.phase_clock import PhaseClock
from llmsys.parallel.port import find_free_port

# Longest time of one phase by `PhaseClock`, a hundred times the usual; ranks that lost a peer would
# wait for a collective.
PHASE_SECONDS = 900.0
# Seconds between two looks at the clock.
LOOK_SECONDS = 5.0
# Seconds that the other ranks get once one has failed.
GRACE_SECONDS = 1.0
# Lines of a crash that are shown.
CRASH_LINES = 40

# Held around everything that may read the status of a process: multiprocessing polls all of them as
# it starts another one, and of two threads that read one status the second finds 255.
_STATUSES = threading.Lock()


@dataclass(frozen=True)
class CaseResult:
    """The result of a case.

    Attributes:
        case: the case.
        difference: the first number that differs, or None.
        failure: the error of a rank, or empty.
        refusal: the message of a combination that is refused, or empty.
        seconds: time that it took.
    """

    case: PairCase
    difference: Difference | None = None
    failure: str = ""
    refusal: str = ""
    seconds: float = 0.0

    @property
    def has_passed(self) -> bool:
        """True if every number is within its band."""
        return self.difference is None and not self.failure and not self.refusal

    @property
    def problem(self) -> str:
        """One line about the first number that is wrong; empty if none is."""
        return str(self.difference) if self.difference is not None else self.failure or self.refusal

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "choices": self.case.list_choices(),
            "seed": self.case.seed,
            "passed": self.has_passed,
            "difference": None if self.difference is None else self.difference.to_dict(),
            "failure": self.failure,
            "refusal": self.refusal,
            "seconds": round(self.seconds, 2),
        }


def list_phases(
    case: PairCase, root: Path, limits: Limits, first: int = 0, factors: Sequence[Factor] = FACTORS
) -> list[Phase]:
    """Return the phases of a case: until a signal, until a kill, to the end, and the branch.

    Args:
        case: the case.
        root: its folder.
        limits: what the machine has.
        first: number of the first phase.
        factors: the factors.

    Raises:
        RefusedError: the config refuses it.
    """
    labels = case.labels
    parts = build_parts(labels, case.seed, root, limits, factors)
    starts: list[tuple[Any, int]] = [(parts[0], 0)]
    if labels["signal"] == "yes":
        starts.append((parts[0], EVENT_STEPS["signal"]))
    if labels["kill"] != "no":
        starts.append((parts[1], EVENT_STEPS["kill"]))
    phases = [
        Phase(
            first + number,
            part.config,
            part.ranks,
            frozenset(
                name
                for name, step in EVENT_STEPS.items()
                if step <= passed and name not in REPEATED
            ),
        )
        for number, (part, passed) in enumerate(starts)
    ]
    if labels["branch"] == "yes":
        last = phases[-1]
        phases.append(
            Phase(last.number + 1, build_branch_config(last.config, STEPS), last.ranks, run=1)
        )
    return phases


# Events between steps that happen whenever their step passes.
REPEATED = ("evaluate", "save", "evaluate and save")


def _prepare_nothing() -> None:
    pass


@dataclass
class CaseRunner:
    """Runs cases.

    Attributes:
        root: folder of the datasets, in which each case gets a folder.
        limits: what the machine has.
        slots: ranks that run at once; half as many comparisons run beside them.
        factors: the factors of the cases.
        prepare: called in every rank before anything is built; tests plant bugs there.
    """

    root: Path
    limits: Limits
    slots: int = 4
    factors: Sequence[Factor] = FACTORS
    prepare: Callable[[], None] = _prepare_nothing
    _free: int = field(init=False, default=0)
    _number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Begin with every slot free."""
        self._free = self.slots = max(self.slots, self.limits.processes)
        self._changed = threading.Condition()
        self._comparing = threading.Semaphore(max(1, self.slots // 2))
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["llmsys.doctor.pairs.preload"])

    def run_cases(
        self,
        cases: Sequence[PairCase],
        on_result: Callable[[CaseResult], None],
        deadline: float = float("inf"),
    ) -> list[CaseResult]:
        """Run cases until all are done or the deadline has passed; return results in order.

        Args:
            cases: the cases.
            on_result: called with each result.
            deadline: time of time.monotonic after which no case is begun.
        """
        found: dict[int, CaseResult] = {}
        waiting = list(enumerate(cases))
        lock = threading.Lock()

        def run_waiting_cases() -> None:
            while True:
                with lock:
                    if not waiting or time.monotonic() > deadline:
                        return
                    number, case = waiting.pop(0)
                try:
                    result = self.run_case(case)
                except Exception as error:  # it would end the thread, and the case would be missing
                    result = CaseResult(case, failure=f"{type(error).__name__}: {error}")
                with lock:
                    found[number] = result
                    on_result(result)

        threads = [
            threading.Thread(target=run_waiting_cases, daemon=True) for _ in range(self.slots)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[number] for number in sorted(found)]

    def run_case(self, case: PairCase) -> CaseResult:
        """Run one case and compare it."""
        began = time.monotonic()
        with self._changed:
            self._number += 1
            folder = self.root / f"case-{self._number}"
        folder.mkdir()
        try:
            result = self._run_phases(case, folder)
        except RefusedError as refused:
            result = CaseResult(case, refusal=str(refused))
        shutil.rmtree(folder, ignore_errors=True)
        return CaseResult(
            case, result.difference, result.failure, result.refusal, time.monotonic() - began
        )

    def _run_phases(self, case: PairCase, folder: Path) -> CaseResult:
        phases = list_phases(case, folder, self.limits, factors=self.factors)
        twin: list[Phase] = []
        # In 16 bits two runs go apart where a token chooses another expert.
        is_exact = case.labels["precision"] == "fp32"
        if case.labels["reproducibility"] == "bitwise" and is_exact:
            fast = case.replace_label("reproducibility", "fast")
            twin = self._list_twin_phases(fast, folder, "fast", len(phases))
        result = self._run_and_compare(
            case, folder, [*phases, *twin], compare_case, (case.labels, phases, twin)
        )
        if result.difference is None or twin or not is_seen_at_the_end(case.labels):
            return result
        # Some models make of rounding, in a few steps, more than any band allows, and a run that is
        # looked at after each step is compared from its own state.
        each = case.replace_label("inspection", "each step")
        watched = self._list_twin_phases(each, folder, "watched", len(phases))
        arguments = (each.labels, phases, watched)
        return self._run_and_compare(each, folder, watched, compare_watched_case, arguments)

    def _list_twin_phases(self, twin: PairCase, folder: Path, name: str, first: int) -> list[Phase]:
        """Return the phases of a run beside that of a case, in a folder of its own."""
        (folder / name).mkdir()
        phases = list_phases(twin, folder, self.limits, first, self.factors)
        return [_move_phase(phase, folder / name) for phase in phases]

    def _run_and_compare(
        self,
        case: PairCase,
        folder: Path,
        phases: Sequence[Phase],
        compare: Callable[..., None],
        arguments: Sequence[object],
    ) -> CaseResult:
        """Run phases, and compare in one more process, which writes the difference."""
        with self._take_slots(max(phase.ranks for phase in phases)):
            for phase in phases:
                if failure := self._run_phase(case, folder, phase):
                    return CaseResult(case, failure=failure)
        # Samples of rounding may take minutes, for which no case with many ranks is to wait.
        with self._comparing:
            process = self._context.Process(target=compare, args=(folder, *arguments))
            # It waits for no other process, so it ends however busy the machine is.
            if failure := self._wait([process], folder, "compare", seconds=None):
                return CaseResult(case, failure=failure)
        import torch

        return CaseResult(case, torch.load(folder / "difference.pt", weights_only=False))

    @contextlib.contextmanager
    def _take_slots(self, count: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= count)
            self._free -= count
        try:
            yield
        finally:
            with self._changed:
                self._free += count
                self._changed.notify_all()

    def _run_phase(self, case: PairCase, folder: Path, phase: Phase) -> str:
        """Run a phase and return the error of its first rank that failed, or an empty text."""
        port = find_free_port()
        processes = [
            self._context.Process(
                target=run_rank, args=(folder, case.labels, phase, rank, port, self.prepare)
            )
            for rank in range(phase.ranks)
        ]
        return self._wait(processes, folder, str(phase.number))

    def _wait(
        self,
        processes: Sequence[BaseProcess],
        folder: Path,
        name: str,
        seconds: float | None = PHASE_SECONDS,
    ) -> str:
        for process in processes:
            with _STATUSES:
                process.start()
        clock = PhaseClock()
        deadline = math.inf
        sentinels = [process.sentinel for process in processes]
        try:
            while running := [
                process
                for process, status in zip(processes, _read_statuses(processes), strict=True)
                if status is None
            ]:
                pids = [process.pid for process in running if process.pid is not None]
                if seconds is not None and clock.advance(pids) >= seconds:
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                wait_for([process.sentinel for process in running], min(left, LOOK_SECONDS))
                if any(status not in (None, 0) for status in _read_statuses(processes)):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        finally:
            late = [rank for rank, status in enumerate(_read_statuses(processes)) if status is None]
            for rank in late:
                pid = processes[rank].pid
                if pid is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                wait_for([sentinels[rank]])
        statuses = _read_statuses(processes)
        for rank, status in enumerate(statuses):
            # Its peers end with errors about their connections to it.
            if status is not None and status < 0 and rank not in late:
                return _describe_crash(rank, -status, folder / f"output-{name}-{rank}.txt")
        errors = sorted(folder.glob(f"error-{name}*.txt"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            return errors[0].read_text()
        if any(status for rank, status in enumerate(statuses) if rank not in late):
            return f"ranks ended with statuses {statuses}"
        # Without a limit none is late.
        return (
            f"rank {late[0]} did not end within {seconds} s of work, or of waiting" if late else ""
        )


def _read_statuses(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Return the status of each process, None while it runs."""
    with _STATUSES:
        return [process.exitcode for process in processes]


def _describe_crash(rank: int, number: int, output: Path) -> str:
    """Return the signal that ended a rank, and the frames that `faulthandler` wrote."""
    printed = output.read_text(errors="replace") if output.exists() else ""
    _, marker, frames = printed.rpartition("Fatal Python error")
    shown = "\n".join((marker + frames).splitlines()[:CRASH_LINES])
    return f"rank {rank} ended with {signal.Signals(number).name}\n{shown}".rstrip()


def _move_phase(phase: Phase, folder: Path) -> Phase:
    """Return a phase whose run is in another folder."""
    run = phase.config.run.model_copy(update={"folder": folder / phase.config.run.folder.name})
    train = phase.config.train
    if train.branch_from is not None:
        step = str(train.branch_from).rpartition("@")[2]
        train = train.model_copy(update={"branch_from": Path(f"{folder / 'run'}@{step}")})
    config = phase.config.model_copy(update={"run": run, "train": train})
    return Phase(phase.number, config, phase.ranks, phase.fired, phase.run)
