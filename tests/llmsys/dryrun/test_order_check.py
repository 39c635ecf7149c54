"""Laws of the order of a pipeline: passes and what a rank sends have one order, and what a pass
needs is there before it.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.dryrun.collective_log import Event
from llmsys.dryrun.expected_messages import Expectation
from llmsys.dryrun.expected_passes import list_passes
from llmsys.dryrun.order_check import find_wrong_order

LAYOUT = ParallelLayout(shard=1, pipeline=3)
RANKS = (0, 1, 2)


def forward(number: int) -> Event:
    return Event("forward", (), number, 1)


def backward(number: int) -> Event:
    return Event("backward", (), number, 1)


def send(rank: int) -> Event:
    return Event("send", RANKS, rank)


def receive(rank: int) -> Event:
    return Event("receive", RANKS, rank)


# The second of three ranks with three micro-batches: 1F1B fills the pipeline with two.
EVENTS = [
    receive(0), forward(0), send(2),
    receive(0), forward(1), send(2), receive(2),
    backward(0), send(0), receive(0),
    forward(2), send(2), receive(2),
    backward(1), send(0), receive(2),
    backward(2), send(0),
]  # fmt: skip


def find(events: list[Event]) -> list[str]:
    context: Any = SimpleNamespace(
        layout=LAYOUT,
        rank=1,
        stages=(range(1),),
        passes=list_passes(LAYOUT, 1, 3, ()),
        list_ranks=lambda axis: RANKS,
    )
    return list(find_wrong_order(events, Expectation(), context))


def test_a_schedule_in_its_order_has_no_difference() -> None:
    assert find(EVENTS) == []


def test_messages_may_come_early() -> None:
    early = [receive(0), receive(0), *(one for one in EVENTS if one != receive(0)), receive(0)]
    early.insert(0, early.pop())
    assert find(early) == []


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            [*EVENTS[:4], forward(2), *EVENTS[5:10], forward(1), *EVENTS[11:]],
            "wrong order: passes of the pipeline 2 is the forward of micro-batch 2 in stage 1, "
            "expected the forward of micro-batch 1 in stage 1",
        ),
        (
            [*EVENTS[:8], send(2), *EVENTS[9:]],
            "wrong order: messages of the pipeline 3 is a send to rank 2, expected a send to rank "
            "0",
        ),
        (
            [*EVENTS[:6], EVENTS[7], EVENTS[6], *EVENTS[8:]],
            "wrong order: the backward of micro-batch 0 in stage 1 begins after 0 messages from "
            "rank 2, and needs 1",
        ),
        (EVENTS[:-2], "wrong number of passes of the pipeline: 5, expected 6"),
        (EVENTS[:-1], "wrong number of messages of the pipeline: 5, expected 6"),
    ],
    ids=["passes", "target", "late", "skipped pass", "missing message"],
)
def test_the_first_difference_is_named(changed: list[Event], named: str) -> None:
    assert find(changed) == [named]
