"""What a run says while it works: log lines for people, events.jsonl for programs, progress for the impatient.

Reads RANK and WORLD_SIZE from the environment (never torch); gives `logger` and `configure_logging`, the append-only
event file (`EventWriter`, `read_events`, `latest_events`) and `Progress`. Promises: one event is one line and one
write, so that a killed process can damage the last line only, and no reader stumbles over it.
"""

import contextlib
import errno
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from llmsys.errors import DataError

Event = dict[str, Any]

PLAIN_LINE_SECONDS = 5.0


# --- Log lines ---


def logger(name: str) -> logging.Logger:
    """Return the logger of one module; call it as `logger(__name__)`. Lines appear once `configure_logging` has run."""
    return logging.getLogger(name)


def configure_logging(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all log lines to `stream` (standard error); with several ranks each line names its own.

    Other ranks say only warnings. Called once by each entry point; a second call replaces the first.
    """
    rank, world_size = _rank_and_world_size()
    handler = _LineHandler(stream)
    handler.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if world_size > 1 else "%(message)s"))
    root = logging.getLogger()
    for previous in [one for one in root.handlers if isinstance(one, _LineHandler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    own_level = level if rank == 0 else max(level, logging.WARNING)
    for room in ("llmsys", "data_pipeline", "launch"):
        logging.getLogger(room).setLevel(own_level)


def _rank_and_world_size() -> tuple[int, int]:
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


class _LineHandler(logging.Handler):
    """Writes one line, and lifts a progress bar out of the way while it does."""

    def __init__(self, stream: TextIO | None) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        stream = self._stream or sys.stderr
        try:
            line = self.format(record)
            if record.levelno >= logging.WARNING:
                line = f"{record.levelname.lower()}: {line}"
            bar_library = sys.modules.get("tqdm")  # imported only where a bar was drawn
            if bar_library is not None:
                bar_library.tqdm.write(line, file=stream)
            else:
                stream.write(line + "\n")
            stream.flush()
        except Exception:
            self.handleError(record)


# --- Events ---


class EventWriter:
    """Appends events to a file, one JSON object a line: {"time": unix seconds, "event": kind, …}.

    Several processes may append to one file. A number that is not finite is written as null, since JSON has no word
    for it.
    """

    def __init__(self, path: Path | str) -> None:
        """Open the file at `path`, or create it with its folder; a half-written last line is closed off."""
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            os.write(self._descriptor, b"\n")

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time of now (3 decimals). Raises OSError when the disk is full."""
        record = {"time": round(time.time(), 3), "event": event, **fields}
        text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        line = text.encode("utf-8", errors="replace") + b"\n"
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None  # os.write does not know its file
        if written != len(line):
            raise OSError(errno.ENOSPC, "event written only in part", str(self.path))

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


def _finite(value: Any) -> Any:
    """`value` as strict JSON can hold it: nan and inf become null, paths text, arrays plain numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return _finite(value.tolist())
    raise TypeError(f"an event holds plain JSON values, not {type(value).__name__}: {value!r}")


def iterate_events(path: Path | str) -> Iterator[Event]:
    """Yield the events of a file in the order written, without holding them all.

    A broken last line is what a killed writer leaves: skipped in silence. Broken lines before it are skipped, counted
    and warned about. Raises DataError when there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no event file here. `llmsys train CONFIG` writes one into the run's folder.")
    broken = 0
    last_was_broken = False
    with path.open("rb") as lines:
        for line in lines:
            if not line.strip():
                continue
            event = _parse_event(line)
            last_was_broken = event is None
            broken += last_was_broken
            if event is not None:
                yield event
    broken -= last_was_broken
    if broken:
        logger(__name__).warning(
            "%s: skipped %d broken line(s) before the end; a writer was killed there, or the file was edited. "
            "All other lines were read.",
            path,
            broken,
        )


def _parse_event(line: bytes) -> Event | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) and isinstance(value.get("event"), str) else None


def read_events(path: Path | str) -> list[Event]:
    """All events of a file in the order written; broken lines as in `iterate_events`."""
    return list(iterate_events(path))


def latest_events(path: Path | str) -> list[Event]:
    """The events that still hold: after a crash steps are logged again, and the last record per (event, step) counts.

    A `start` that resumed from step s (null: from nothing) takes back every earlier record of a later step, since that
    part of the trajectory was lost. Records without a step are all kept. Order: as last written.
    """
    kept: dict[tuple[str, object], Event] = {}
    for number, event in enumerate(iterate_events(path)):
        if event["event"] == "start":
            resumed_from = event.get("resumed_from") or 0
            kept = {key: old for key, old in kept.items() if "step" not in old or old["step"] <= resumed_from}
        key = (event["event"], event.get("step", f"record {number}"))
        kept.pop(key, None)
        kept[key] = event
    return list(kept.values())


# --- Progress ---


class Progress:
    """How far one stage is: done, rate, time left. A bar on a terminal, else a plain line every few seconds.

        with Progress("extract", total=len(pages), unit="page") as progress:
            for page in pages:
                progress.advance(1, dropped=dropped)

    Ranks other than 0 print nothing.
    """

    def __init__(
        self,
        stage: str,
        total: float | None,
        unit: str,
        *,
        done: float = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Name the stage and what it counts.

        Args:
            stage: what is being done, as a reader would say it.
            total: how much there is in `unit`; None when nobody knows yet.
            unit: "page", "step", …; "B" counts bytes and is shown as MB; "tok" and others are scaled by thousands.
            done: what was done before (a resumed run); it counts as done, but not for the rate.
            stream: where to print, standard error by default.
            clock: seconds, for tests.
        """
        self.stage, self.total, self.unit, self.done = stage, total, unit, done
        self._at_start = done
        self._stream = stream
        self._clock = clock
        self._details: dict[str, object] = {}
        self._bar: Any = None
        self._silent = _rank_and_world_size()[0] != 0

    def __enter__(self) -> Self:
        """Start the clock; on a terminal draw the bar."""
        self._began = self._printed = self._clock()
        stream = self._stream or sys.stderr
        if not self._silent and _columns(stream) > 0:
            from tqdm import tqdm  # only where a bar is drawn

            self._bar = tqdm(
                desc=self.stage,
                total=self.total,
                initial=self.done,
                unit=self.unit,
                unit_scale=True,
                dynamic_ncols=True,
                file=stream,
            )
        return self

    def advance(self, amount: float = 1, **details: object) -> None:
        """Count `amount` more as done; `details` (dropped=12, loss=3.2) are shown behind the numbers."""
        self.done += amount
        self._details.update(details)
        if self._bar is not None:
            if details:
                self._bar.set_postfix_str(_details_text(self._details), refresh=False)
            self._bar.update(amount)
        elif not self._silent and self._clock() - self._printed >= PLAIN_LINE_SECONDS:
            self._print(self.line())

    def line(self) -> str:
        """The state as one plain line: stage, done of total, rate, time left, details."""
        seconds = max(self._clock() - self._began, 1e-9)
        rate = (self.done - self._at_start) / seconds
        parts = [_amount(self.done, self.unit)]
        if self.total:
            done = _amount(self.done, "B" if self.unit == "B" else "")
            parts = [f"{done} of {_amount(self.total, self.unit)} ({self.done / self.total:.0%})"]
        if seconds >= 0.1 and rate > 0:  # a rate over less time says nothing
            parts.append(f"{_amount(rate, self.unit)}/s")
            if self.total is not None and self.done < self.total:
                parts.append(f"{duration((self.total - self.done) / rate)} left")
        if self._details:
            parts.append(_details_text(self._details))
        return f"{self.stage}: " + ", ".join(parts)

    def _print(self, line: str) -> None:
        stream = self._stream or sys.stderr
        with contextlib.suppress(BrokenPipeError):  # a reader that went away must not stop the work
            stream.write(line + "\n")
            stream.flush()
        self._printed = self._clock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say the final state: how much in which time, or that it stopped early."""
        if self._bar is not None:
            self._bar.close()
        elif not self._silent:
            ending = "done" if kind is None else "stopped"
            self._print(f"{self.line()}, {ending} after {duration(self._clock() - self._began)}")


def _columns(stream: TextIO) -> int:
    """Columns of the terminal behind `stream`; 0 where there is none, or one that does not know its size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except OSError:
        return 0


def _details_text(details: dict[str, object]) -> str:
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in details.items()
    )


def _amount(value: float, unit: str = "") -> str:
    """A count with its unit and a thousands prefix: 3 pages, 1.2k steps, 12.3 MB."""
    power = 0
    while abs(value) >= 999.5 and power < 5:
        value, power = value / 1000, power + 1
    prefix = ("", "k", "M", "G", "T", "P")[power]
    number = f"{value:.0f}" if float(value).is_integer() or abs(value) >= 99.95 else f"{value:.3g}"
    if unit == "B":
        return f"{number} {prefix}B"
    plural = "" if unit in ("", "tok") or (value == 1 and not power) else "s"
    return f"{number}{prefix} {unit}{plural}".rstrip()


def duration(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 2 min 05 s, 3 h 07 min, 2 d 04 h."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
