"""A published time, what its command prints, and the groups that are held out together.

Invariants:
- A row is priced by its command line alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from typing import Literal

from llmsys.estimate.device_profile import Number, load_device_profile
from llmsys.estimate.percentile_interval import PercentileInterval
from tools.bench.fits.blind_programs import find_blind_words
from tools.bench.fits.published_row import PublishedRow, run_estimate

TimeClass = Literal["dense", "moe", "run"]
KINDS: tuple[TimeClass, ...] = ("dense", "moe", "run")


@dataclass(frozen=True)
class TimeRow:
    """A published time with what its command prints."""

    published: PublishedRow

    @property
    def name(self) -> str:
        """Name in tables."""
        return self.published.name

    @property
    def measured(self) -> float:
        """Seconds of a step, or accelerator-hours of a run."""
        return self.published.measured

    def get_option(self, name: str) -> str:
        """Return the value of an option of the command."""
        words = self.published.words
        return words[words.index(name) + 1]

    @property
    def program(self) -> str:
        """Name of the program's profile."""
        return self.get_option("--program")

    @cached_property
    def kind(self) -> TimeClass:
        """The class of constants that the row belongs to."""
        if self.published.kind == "run":
            return "run"
        counts = run_estimate(self.published.words)["parameters"]
        return "dense" if counts["active"]["all"] == counts["total"] else "moe"

    @cached_property
    def length(self) -> int:
        """Tokens of a sequence."""
        found: int = run_estimate(self.published.words)["batch"]["sequence_length"]
        return found

    @cached_property
    def modelled_time(self) -> float:
        """The P50 without the fitted factor of its class. Hours of a run keep that of its steps."""
        result = run_estimate(self.published.words)
        if self.kind == "run":
            hours: float = result["money"]["accelerator_hours"]["p50"]
            return hours / float(result["time"]["run"]["residual_factor"])
        seconds: float = result["time"]["step_seconds"]["p50"]
        return seconds / float(result["time"]["residual_factor"])

    @cached_property
    def printed_interval(self) -> PercentileInterval:
        """The interval that the command prints."""
        result = run_estimate(self.published.words)
        found = (
            result["money"]["accelerator_hours"]
            if self.kind == "run"
            else result["time"]["step_seconds"]
        )
        return PercentileInterval.model_validate(found)

    @cached_property
    def ideal_time(self) -> float:
        """The time of 6 · N · D FLOPs at the peak, which a constant utilisation divides."""
        result = run_estimate(self.published.words)
        device = load_device_profile(self.get_option("--device"))
        number: Number = "bf16" if "bf16" in device.peak_flops else "fp16"
        tokens = result["run"]["tokens"] if self.kind == "run" else result["batch"]["tokens"]
        seconds = 6 * result["parameters"]["active"]["all"] * tokens / device.get_peak_flops(number)
        return float(seconds / 3600 if self.kind == "run" else seconds / result["time"]["ranks"])

    @property
    def log_ratio(self) -> float:
        """Natural logarithm of measured over modelled."""
        return log(self.measured / self.modelled_time)

    @cached_property
    def blind_log_ratio(self) -> float:
        """The same without constants that were fitted on rows of this model alone."""
        words = find_blind_words(self.name, self.published.words)
        return (
            self.log_ratio
            if words is None
            else TimeRow(replace(self.published, words=words)).log_ratio
        )


def build_time_rows(rows: Iterable[PublishedRow]) -> list[TimeRow]:
    """Return the times among published rows."""
    return [TimeRow(row) for row in rows if row.kind != "memory"]


def get_source(row: TimeRow) -> str:
    """Return the report that a row is from."""
    return row.published.source


def get_model(row: TimeRow) -> str:
    """Return CONFIG and the overrides of its sizes: all words before those of the batch."""
    words = row.published.words
    return " ".join(words[1 : next(i for i, word in enumerate(words) if word.startswith("batch."))])
