"""A step laid out in time: every pass once and in a legal order, and bubbles as long as the
papers say.
"""

from itertools import pairwise

import pytest

from llmsys.estimate.step_timeline import Activity, build_step_timeline, iter_rank_order

PARTS = {"products": 24.0, "data": 2.0, "optimizer": 1.0, "bubble": 9.0}


def select(timeline, kind: str, rank: int = 0) -> list[Activity]:
    return [one for one in timeline.activities if one.kind == kind and one.rank == rank]


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_the_bubble_is_that_of_the_papers(kind: str, chunks: int, micro_batches: int) -> None:
    ranks = 4
    timeline = build_step_timeline(PARTS, ranks, chunks, micro_batches, kind)
    passes = [one for one in timeline.activities if one.kind in ("forward", "backward")]
    assert len({one.text for one in passes}) == len(passes) == 2 * ranks * chunks * micro_batches
    assert sum(one.seconds for one in passes) == pytest.approx(24.0 * ranks)
    # Narayanan 2021, section 2.2: (p - 1) / (v m) of the time that a rank computes.
    for rank in range(ranks):
        idle = sum(one.seconds for one in select(timeline, "bubble", rank))
        assert idle == pytest.approx(24.0 * (ranks - 1) / (chunks * micro_batches))
    end = max(one.start + one.seconds for one in passes)
    assert [one.start for one in select(timeline, "exchange", 3)] == [pytest.approx(end)]
    assert select(timeline, "update")[0].start == pytest.approx(end + 2.0)


@pytest.mark.parametrize(
    ("kind", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
)
def test_an_order_has_every_pass_once_and_forward_before_backward(kind: str, chunks: int) -> None:
    for rank in range(3):
        order = list(iter_rank_order(kind, rank, 3, chunks, 6))
        assert sorted(order) == sorted(
            (one, c, m) for one in (True, False) for c in range(chunks) for m in range(6)
        )
        for _, chunk, micro in order:
            assert order.index((True, chunk, micro)) < order.index((False, chunk, micro))


def test_no_rank_does_two_things_at_once_and_inputs_come_first() -> None:
    timeline = build_step_timeline(PARTS | {"stages": 4.0}, 3, 2, 6, "interleaved")
    for rank in range(3):
        mine = sorted(
            (one for one in timeline.activities if one.rank == rank), key=lambda one: one.start
        )
        for before, after in pairwise(mine):
            assert before.start + before.seconds <= after.start + 1e-9
    ends = {one.text: one.start + one.seconds for one in timeline.activities}
    starts = {one.text: one.start for one in timeline.activities}
    for micro in range(6):
        for stage in range(1, 6):
            forward = f"forward of micro-batch {micro}, stage {stage}"
            assert (
                starts[forward]
                >= ends[f"forward of micro-batch {micro}, stage {stage - 1}"] + 4.0 / 24 - 1e-9
            )


def test_a_step_of_very_many_micro_batches_is_drawn_in_part() -> None:
    timeline = build_step_timeline(PARTS, 8, 1, 10_000, "1f1b")
    assert timeline.drawn < timeline.micro_batches == 10_000
    assert len(timeline.activities) < 2_000
