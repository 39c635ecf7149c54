"""A published time, what its command prints, and the groups that are held out together.

Invariants:
- A row is priced by its command line alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from typing import Any, Literal

from llmsys.estimate.cluster_costs import load_cluster_costs
from llmsys.estimate.device_profile import Number, load_device_profile
from llmsys.estimate.percentile_interval import PercentileInterval
from tools.bench.fits.blind_programs import find_blind_words
from tools.bench.fits.published_row import ROOT, PublishedRow, estimate_printed_step, run_estimate

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
    def printed(self) -> dict[str, Any]:
        """Return what the command prints, as far as the row needs it."""
        price = run_estimate if self.published.kind == "run" else estimate_printed_step
        return price(self.published.words)

    @property
    def device_name(self) -> str:
        """Name of the device's profile, of which a cluster file has another network."""
        if "--device" in self.published.words:
            return self.get_option("--device")
        return load_cluster_costs(ROOT / self.get_option("--cluster")).device

    @cached_property
    def program(self) -> str:
        """Name of the program's profile."""
        return self.get_option("--program")

    @cached_property
    def model(self) -> str:
        """CONFIG and the overrides of its sizes: all words before those of the batch."""
        words = self.published.words
        end = next(place for place, word in enumerate(words) if word.startswith("batch."))
        return " ".join(words[1:end])

    @cached_property
    def kind(self) -> TimeClass:
        """The class of constants that the row belongs to."""
        if self.published.kind == "run":
            return "run"
        counts = estimate_printed_step(self.published.words)["parameters"]
        return "dense" if counts["active"]["all"] == counts["total"] else "moe"

    @cached_property
    def length(self) -> int:
        """Tokens of a sequence."""
        found: int = self.printed["batch"]["sequence_length"]
        return found

    @cached_property
    def modelled_time(self) -> float:
        """The P50 without the fitted factor of its class. Hours of a run keep that of its steps."""
        result = self.printed
        if self.kind == "run":
            hours: float = result["money"]["accelerator_hours"]["p50"]
            return hours / float(result["time"]["run"]["residual_factor"])
        seconds: float = result["time"]["step_seconds"]["p50"]
        return seconds / float(result["time"]["residual_factor"])

    @cached_property
    def printed_interval(self) -> PercentileInterval:
        """The interval that the command prints."""
        result = self.printed
        found = (
            result["money"]["accelerator_hours"]
            if self.kind == "run"
            else result["time"]["step_seconds"]
        )
        return PercentileInterval.model_validate(found)

    @cached_property
    def ideal_time(self) -> float:
        """The time of 6 · N · D FLOPs at the peak, which a constant utilisation divides."""
        result = self.printed
        device = load_device_profile(self.device_name)
        number: Number = "bf16" if "bf16" in device.peak_flops else "fp16"
        tokens = result["run"]["tokens"] if self.kind == "run" else result["batch"]["tokens"]
        seconds = 6 * result["parameters"]["active"]["all"] * tokens / device.get_peak_flops(number)
        return float(seconds / 3600 if self.kind == "run" else seconds / result["time"]["ranks"])

    @cached_property
    def log_ratio(self) -> float:
        """Natural logarithm of measured over modelled."""
        return log(self.measured / self.modelled_time)

    @cached_property
    def blind_log_ratio(self) -> float:
        """The same without what rows of this model, or of this report, alone gave."""
        return self._compute_blind_ratio(is_model_out=True)

    @cached_property
    def report_blind_log_ratio(self) -> float:
        """The same without what the errors of this report gave."""
        return self._compute_blind_ratio(is_model_out=False)

    def _compute_blind_ratio(self, *, is_model_out: bool) -> float:
        words = find_blind_words(self.name, self.published.words, is_model_out=is_model_out)
        if words is None:
            return self.log_ratio
        return TimeRow(replace(self.published, words=words)).log_ratio


def build_time_rows(rows: Iterable[PublishedRow]) -> list[TimeRow]:
    """Return the times among published rows."""
    return [TimeRow(row) for row in rows if row.kind != "memory"]


def get_source(row: TimeRow) -> str:
    """Return the report that a row is from."""
    return row.published.source


def get_report(row: TimeRow) -> str:
    """Return the report that a row is from, all releases of one page together; of a whole run the
    one that names it.
    """
    source = row.published.source
    return source if source.startswith("run of") else source.partition(" ")[0]


def get_family(row: TimeRow) -> str:
    """Return the family of a row's program: the first word of its name, such as megatron."""
    return row.program.partition("-")[0]


def get_model(row: TimeRow) -> str:
    """Return CONFIG and the overrides of its sizes: all words before those of the batch."""
    return row.model
