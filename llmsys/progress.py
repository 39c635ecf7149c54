"""Show the progress of a stage: a bar on a terminal, otherwise a line every few seconds."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

PLAIN_LINE_SECONDS = 5.0
# The percentage is rounded: from here on it would be 100.
_FULL = 0.995
# The bar without its percentage.
_REMAINDER_BAR = "{desc} |{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"


class Progress:
    """The progress of one stage: done, rate, time left. A bar on a terminal, otherwise a line every
    few seconds.

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
        """Name the stage and its unit.

        Args:
            stage: The name of the stage, as printed.
            total: The amount in `unit`. None when it is unknown.
            unit: "page", "step", …; "B" counts bytes and is shown as MB; "tok" and others are
                scaled by thousands.
            done: The amount done before (a resumed run). It does not count for the rate.
            stream: The output. None means standard error.
            clock: Return seconds. Tests replace it.
        """
        self.stage = stage
        self.total = total
        self.unit = unit
        self.done = done
        # Returns what still runs when all that is counted is done: the line says it instead of
        # 100 %. "": nothing does.
        self.describe_remainder: Callable[[], str] = str
        self._at_start = done
        self._stream = stream
        self._clock = clock
        self._details: dict[str, object] = {}
        self._bar: Any = None
        self._silent = int(os.environ.get("RANK") or 0) != 0

    def __enter__(self) -> Self:
        """Start the clock; on a terminal draw the bar."""
        self._began = self._printed = self._clock()
        stream = self._stream or sys.stderr
        if not self._silent and _count_columns(stream) > 0:
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
        """Count work as done, and draw or print the line where it is time.

        Args:
            amount: what was done, in the unit of `total`.
            details: numbers to show after the others, such as `dropped=12`; they stay until
                replaced.
        """
        self.done += amount
        self._details.update(details)
        if self._bar is not None:
            if details:
                self._bar.set_postfix_str(_format_details(self._details), refresh=False)
            self._bar.update(amount)
            self._draw_remainder()
        elif not self._silent and self._clock() - self._printed >= PLAIN_LINE_SECONDS:
            self._print_line(self.format_line())

    def change_total(self, total: float) -> None:
        """Set another amount of the whole stage.

        Args:
            total: in the unit of the stage.
        """
        self.total = total
        if self._bar is not None:
            self._bar.total = total

    def format_line(self) -> str:
        """Return the state as one plain line: stage, done of total, rate, time left, details."""
        seconds = max(self._clock() - self._began, 1e-9)
        rate = (self.done - self._at_start) / seconds
        parts = [_format_amount(self.done, self.unit)]
        remainder = self._find_remainder()
        if self.total:
            done = _format_amount(self.done, "B" if self.unit == "B" else "")
            parts = [f"{done} of {_format_amount(self.total, self.unit)}"]
            share = f" ({self.done / self.total:.0%})"
            parts[0] += f", still running: {remainder}" if remainder else share
        if seconds >= 0.1 and rate > 0:  # a rate over less time says nothing
            parts.append(f"{_format_amount(rate, self.unit)}/s")
            if self.total is not None and self.done < self.total and not remainder:
                parts.append(f"{format_duration((self.total - self.done) / rate)} left")
        if self._details:
            parts.append(_format_details(self._details))
        return f"{self.stage}: " + ", ".join(parts)

    def _find_remainder(self) -> str:
        """Return what still runs although all that is counted is done; otherwise an empty text."""
        is_full = self.total and self.done / self.total >= _FULL
        return self.describe_remainder() if is_full else ""

    def _draw_remainder(self) -> None:
        """Write on the bar what still runs instead of 100 %, and the percentage again where that
        is due.
        """
        remainder = self._find_remainder()
        title = f"{self.stage}: still running: {remainder}" if remainder else self.stage
        if self._bar.desc != title:
            self._bar.desc = title
            self._bar.bar_format = _REMAINDER_BAR if remainder else None
            self._bar.refresh()

    def _print_line(self, line: str) -> None:
        stream = self._stream or sys.stderr
        with contextlib.suppress(BrokenPipeError):  # a reader that went away must not stop the work
            stream.write(line + "\n")
            stream.flush()
        self._printed = self._clock()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Print the final state: the amount and the time, or that the stage stopped early."""
        self.describe_remainder = str
        if self._bar is not None:
            self._draw_remainder()
            self._bar.close()
        elif not self._silent:
            ending = "done" if kind is None else "stopped"
            self._print_line(
                f"{self.format_line()}, {ending} after "
                f"{format_duration(self._clock() - self._began)}"
            )


def _count_columns(stream: TextIO) -> int:
    """Return the columns of the terminal of `stream`. 0 when there is none or its size is
    unknown.
    """
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except OSError:
        return 0


def _format_details(details: dict[str, object]) -> str:
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in details.items()
    )


def _format_amount(value: float, unit: str = "") -> str:
    """Return a count with its unit and a thousands prefix: 3 pages, 1.2k steps, 12.3 MB."""
    power = 0
    # 999.5 would be rounded to 1000
    while abs(value) >= 999.5 and power < 5:
        value = value / 1000
        power = power + 1
    prefix = ("", "k", "M", "G", "T", "P")[power]
    number = f"{value:.0f}" if float(value).is_integer() or abs(value) >= 99.95 else f"{value:.3g}"
    if unit == "B":
        return f"{number} {prefix}B"
    plural = "" if unit in ("", "tok") or (value == 1 and not power) else "s"
    return f"{number}{prefix} {unit}{plural}".rstrip()


def format_duration(seconds: float) -> str:
    """Format a duration for people.

    Args:
        seconds: The duration.

    Returns:
        8 s, 2 min 05 s, 3 h 07 min or 2 d 04 h.
    """
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
