"""Compare what `llmsys init --minutes` promised with what a run did: for `train` and the report.

Reads the section `promise` of the run's config and its events.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from llmsys.config.promise import PromiseConfig, PromisedInterval
from llmsys.events import Event
from llmsys.report.html_markup import build_paragraph, build_table
from llmsys.report.report_section import ReportSection
from llmsys.report.run_record import RunRecord, is_finite

# A smaller share of tokens is a step more or less.
MIN_DIFFERENCE = 0.02


@dataclass(frozen=True)
class PromiseOutcome:
    """A promised number and what it became.

    Attributes:
        name: Name with unit.
        promised: The interval.
        outcome: None where it was not measured.
        note: Why it cannot be compared; "" where it can.
    """

    name: str
    promised: PromisedInterval
    outcome: float | None
    note: str = ""

    @property
    def verdict(self) -> str:
        """The comparison in words."""
        if self.outcome is None:
            return self.note
        is_inside = self.promised.contains(self.outcome)
        share = self.outcome / self.promised.middle - 1
        return f"{share:+.1%}, {'inside' if is_inside else 'OUTSIDE'} of the interval"

    @property
    def interval(self) -> str:
        """The promise in words."""
        return f"{self.promised.middle:.3g} ({self.promised.low:.3g} to {self.promised.high:.3g})"


def compare_promise(
    promise: PromiseConfig, tokens: int, events: Iterable[Event]
) -> list[PromiseOutcome]:
    """Compare a promise with the events of its run.

    Args:
        promise: Of the config.
        tokens: Budget of the run, `train.tokens`; another one than the promise's is not compared.
        events: All events of the run, in order.

    Returns:
        Minutes and bits per byte.
    """
    found = list(events)
    starts = sum(event["event"] == "start" for event in found)
    seconds = _get_last_value(found, "finish", "seconds")
    bits = _get_last_value(found, "evaluation", "bits_per_byte")
    return list(_iter_outcomes(promise, tokens, starts, seconds, bits))


def _get_last_value(events: list[Event], kind: str, key: str) -> Any:
    values = [event.get(key) for event in events if event["event"] == kind]
    return values[-1] if values else None


def _iter_outcomes(
    promise: PromiseConfig, tokens: int, starts: int, seconds: Any, bits: Any
) -> Iterator[PromiseOutcome]:
    if tokens != promise.tokens:
        why = (
            f"not comparable: the promise is for {promise.tokens:,} tokens, the run for {tokens:,}"
        )
        yield PromiseOutcome("minutes", promise.minutes, None, why)
        yield PromiseOutcome("bits per byte", promise.bits_per_byte, None, why)
        return
    if not is_finite(seconds):
        why = "not finished"
        yield PromiseOutcome("minutes", promise.minutes, None, why)
        yield PromiseOutcome("bits per byte", promise.bits_per_byte, None, why)
        return
    if starts > 1:
        why = f"not comparable: the run was started {starts} times, and minutes are of the last"
        yield PromiseOutcome("minutes", promise.minutes, None, why)
    else:
        yield PromiseOutcome("minutes", promise.minutes, seconds / 60)
    measured = bits if is_finite(bits) else None
    yield PromiseOutcome(
        "bits per byte", promise.bits_per_byte, measured, "" if measured else "not measured"
    )


def format_promise_lines(outcomes: Iterable[PromiseOutcome]) -> list[str]:
    """Return a line for each promised number.

    Args:
        outcomes: From `compare_promise`.

    Returns:
        Lines without line ends.
    """
    return [
        f"promised {one.interval} {one.name}: "
        + (one.verdict if one.outcome is None else f"{one.outcome:.3g}, {one.verdict}")
        for one in outcomes
    ]


def describe_trained_tokens(promise: PromiseConfig, trained: Any) -> str:
    """Return what became of the planned tokens.

    Args:
        promise: Of the config.
        trained: `tokens` of the run's `finish` event; None before it.

    Returns:
        A sentence without its full stop; "" where as many were trained.
    """
    if not is_finite(trained) or abs(trained / promise.tokens - 1) < MIN_DIFFERENCE:
        return ""
    speed = "slower" if trained < promise.tokens else "faster"
    return (
        f"trained {trained:,.0f} tokens, where {promise.tokens:,} were planned: the machine was "
        f"{speed} than the probe, and the run fitted its tokens to the minutes"
    )


def build_promise_section(record: RunRecord) -> ReportSection | None:
    """Return a table of promise and outcome; None for a run without a promise.

    Args:
        record: The run.
    """
    said = record.config.get("promise")
    if not said:
        return None
    promise = PromiseConfig.model_validate(said)
    tokens = record.config.get("train", {}).get("tokens", promise.tokens)
    finish, evaluation = record.finish or {}, record.last_evaluation or {}
    outcomes = _iter_outcomes(
        promise,
        tokens,
        len(record.starts),
        finish.get("seconds"),
        evaluation.get("bits_per_byte"),
    )
    rows = [
        [
            one.name,
            one.interval,
            "–" if one.outcome is None else f"{one.outcome:.3g}",
            one.verdict,
        ]
        for one in outcomes
    ]
    lead = build_paragraph(
        f"Of llmsys init --minutes on {promise.date}, for {promise.machine}. Eight of ten runs "
        "should end inside of the interval. Minutes are from the first step to the end of the "
        "final evaluation."
    )
    fitted = describe_trained_tokens(promise, finish.get("tokens"))
    note = [build_paragraph(fitted[0].upper() + fitted[1:] + ".")] if fitted else []
    table = build_table(("", "promised", "outcome", "difference"), rows, numeric=[1, 2, 3])
    return ReportSection("promise", "Promise and outcome", [lead, table, *note])
