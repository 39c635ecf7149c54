"""The outcome of a run stands beside what was promised, and what cannot be compared is not."""

from pathlib import Path
from typing import Any

import pytest

from llmsys.config.promise import PromiseConfig, PromisedInterval
from llmsys.report.promise_section import (
    build_promise_section,
    compare_promise,
    describe_trained_tokens,
    format_promise_lines,
)
from llmsys.report.run_record import RunRecord

PROMISE = PromiseConfig(
    minutes=PromisedInterval(low=1.8, middle=2.0, high=2.2),
    bits_per_byte=PromisedInterval(low=2.0, middle=2.2, high=2.4),
    tokens=1_000,
    machine="two cores",
    date="2026-11-28",
)


def list_events(seconds: float, bits: float, starts: int = 1) -> list[dict[str, Any]]:
    return [
        *({"event": "start", "step": 0} for _ in range(starts)),
        {"event": "evaluation", "step": 5, "bits_per_byte": 9.0},
        {"event": "evaluation", "step": 10, "bits_per_byte": bits},
        {"event": "finish", "step": 10, "seconds": seconds},
    ]


def test_minutes_and_loss_are_compared_with_their_intervals() -> None:
    lines = format_promise_lines(compare_promise(PROMISE, 1_000, list_events(129.0, 2.5)))
    assert lines == [
        "promised 2 (1.8 to 2.2) minutes: 2.15, +7.5%, inside of the interval",
        "promised 2.2 (2 to 2.4) bits per byte: 2.5, +13.6%, OUTSIDE of the interval",
    ]


@pytest.mark.parametrize(
    ("tokens", "events", "why"),
    [
        (2_000, list_events(120, 2.2), "the promise is for 1,000 tokens, the run for 2,000"),
        (1_000, list_events(120, 2.2)[:1], "not finished"),
        (1_000, list_events(120, 2.2, starts=2), "the run was started 2 times"),
    ],
)
def test_other_runs_are_not_compared(tokens: int, events: list[dict[str, Any]], why: str) -> None:
    minutes, bits = compare_promise(PROMISE, tokens, events)
    assert minutes.outcome is None
    assert why in minutes.verdict
    assert (bits.outcome is None) == ("started" not in why)


def test_tokens_that_followed_the_clock_are_said() -> None:
    assert describe_trained_tokens(PROMISE, None) == ""
    assert describe_trained_tokens(PROMISE, 1_010) == ""
    slower = describe_trained_tokens(PROMISE, 600)
    assert slower.startswith("trained 600 tokens, where 1,000 were planned: the machine was slower")
    assert "was faster" in describe_trained_tokens(PROMISE, 1_300)


def test_the_report_has_a_section_for_a_run_with_a_promise(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "run")
    assert build_promise_section(record) is None
    record.config = {
        "promise": PROMISE.model_dump(mode="json"),
        "train": {"tokens": 1_000},
    }
    for event in list_events(129.0, 2.1):
        record.add_event(event)
    section = build_promise_section(record)
    assert section is not None
    text = str(section.content)
    assert "+7.5%, inside of the interval" in text
    assert "2.2 (2 to 2.4)" in text
    assert "two cores" in text
