"""Lay one optimizer step out in time: forward, backward, bubbles, exchanges and the update, for
each pipeline rank.

Reads the parts of an estimated step. The schedule's order is that of torch.distributed.pipelining.

Invariants:
- A pass starts when its rank is free and its input has arrived; bubbles are the gaps that remain.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from llmsys.config.run import RunConfig

Kind = Literal["forward", "backward", "exchange", "bubble", "update"]
# Parts of a step that passes through blocks are made of; the rest comes after them.
PASS_PARTS = (
    "products",
    "experts",
    "attention",
    "elementwise",
    "recomputation",
    "tensor",
    "context",
    "expert",
    "host",
)
# A forward pass is one of three matmuls of each matrix.
FORWARD_SHARE = 1 / 3
# More bars than this are neither drawn fast nor told apart.
MAX_PASSES = 1_500


@dataclass(frozen=True)
class Activity:
    """One rank busy, or waiting, from `start` for `seconds`."""

    rank: int
    kind: Kind
    start: float
    seconds: float
    text: str


@dataclass(frozen=True)
class StepTimeline:
    """Activities of all pipeline ranks. `drawn` of `micro_batches` are laid out; fewer where
    there are very many.
    """

    activities: tuple[Activity, ...]
    ranks: int
    micro_batches: int
    drawn: int


def build_step_timeline(
    parts: dict[str, float], ranks: int, chunks: int, micro_batches: int, kind: str
) -> StepTimeline:
    """Lay out a step.

    Args:
        parts: seconds by part, as `time.parts_seconds` of an estimate.
        ranks: pipeline ranks.
        chunks: stages on each rank.
        micro_batches: micro-batches of a step.
        kind: gpipe, 1f1b or interleaved; without a pipeline it is not used.

    Returns:
        The activities, with bubbles.
    """
    limit = max(ranks, MAX_PASSES // (2 * ranks * chunks) // ranks * ranks)
    drawn = min(micro_batches, limit)
    whole = sum(parts.get(name, 0.0) for name in PASS_PARTS) / (micro_batches * chunks)
    hop = parts.get("stages", 0.0) / (2 * micro_batches * chunks)
    orders = [list(iter_rank_order(kind, rank, ranks, chunks, drawn)) for rank in range(ranks)]
    busy = _place_passes(orders, ranks, ranks * chunks, whole, hop)
    end = max(one.start + one.seconds for one in busy)
    found = [*busy, *_iter_bubbles(busy, ranks, end)]
    data, update = parts.get("data", 0.0), parts.get("optimizer", 0.0) + parts.get("offload", 0.0)
    for rank in range(ranks):
        found.append(Activity(rank, "exchange", end, data, "gradients and weights"))
        found.append(Activity(rank, "update", end + data, update, "optimizer"))
    return StepTimeline(tuple(one for one in found if one.seconds > 0), ranks, micro_batches, drawn)


Pass = tuple[bool, int, int]  # forward?, chunk, micro-batch


def iter_rank_order(
    kind: str, rank: int, ranks: int, chunks: int, micro_batches: int
) -> Iterator[Pass]:
    """Yield the passes of a rank in the order of its schedule.

    Args:
        kind: gpipe, 1f1b or interleaved.
        rank: index on the pipeline axis.
        ranks: size of it.
        chunks: stages on the rank.
        micro_batches: micro-batches of a step.

    Yields:
        Whether it is a forward pass, its chunk, and its micro-batch.
    """
    total = micro_batches * chunks
    # micro-batches that go through one chunk in turn
    size = micro_batches // max(1, micro_batches // ranks)

    def find_pass(number: int, *, forward: bool) -> Pass:
        turn, place = divmod(number, size * chunks)
        chunk = place // size
        return forward, chunk if forward else chunks - 1 - chunk, turn * size + place % size

    warmup = (
        min(total, ranks - rank)
        if chunks == 1
        else min(total, (chunks - 1) * size + 2 * (ranks - rank - 1) + 1)
    )
    if kind == "gpipe":
        warmup = total
    yield from (find_pass(number, forward=True) for number in range(warmup))
    for number in range(total):
        yield find_pass(number, forward=False)
        if warmup + number < total:
            yield find_pass(warmup + number, forward=True)


def _place_passes(
    orders: list[list[Pass]], ranks: int, stages: int, whole: float, hop: float
) -> list[Activity]:
    """Return the passes with their starts: each rank works through its order as inputs arrive."""
    ends: dict[tuple[bool, int, int], float] = {}
    free, nexts = [0.0] * ranks, [0] * ranks
    found: list[Activity] = []
    waiting = sum(map(len, orders))
    while waiting:
        before = waiting
        for rank, order in enumerate(orders):
            while nexts[rank] < len(order):
                forward, chunk, micro = order[nexts[rank]]
                stage = chunk * ranks + rank
                source = _find_input(forward, stage, micro, stages)
                if source is not None and source not in ends:
                    break
                arrived = (
                    0.0 if source is None else ends[source] + (hop if source[1] != stage else 0.0)
                )
                start = max(free[rank], arrived)
                seconds = whole * (FORWARD_SHARE if forward else 1 - FORWARD_SHARE)
                ends[forward, stage, micro] = free[rank] = start + seconds
                text = (
                    f"{'forward' if forward else 'backward'} of micro-batch {micro}, stage {stage}"
                )
                found.append(
                    Activity(rank, "forward" if forward else "backward", start, seconds, text)
                )
                nexts[rank] += 1
                waiting -= 1
        assert waiting < before, "the orders of the ranks wait for each other"
    return found


def _find_input(forward: bool, stage: int, micro: int, stages: int) -> tuple[bool, int, int] | None:
    if forward:
        return (True, stage - 1, micro) if stage else None
    return (False, stage + 1, micro) if stage < stages - 1 else (True, stage, micro)


def _iter_bubbles(busy: list[Activity], ranks: int, end: float) -> Iterator[Activity]:
    for rank in range(ranks):
        time = 0.0
        for one in sorted((one for one in busy if one.rank == rank), key=lambda one: one.start):
            if one.start > time + 1e-12:
                yield Activity(rank, "bubble", time, one.start - time, "bubble")
            time = one.start + one.seconds
        if end > time + 1e-12:
            yield Activity(rank, "bubble", time, end - time, "bubble")


def build_timeline_from_estimate(
    parts: dict[str, float], layout: dict[str, Any], config: RunConfig
) -> StepTimeline:
    """Lay out the step of a priced estimate.

    Args:
        parts: seconds by part, as `time.parts_seconds` of an estimate.
        layout: sizes of axes, as `memory.layout` of an estimate; empty for a bare model.
        config: the run's config.

    Returns:
        The activities.
    """
    ranks, schedule = layout.get("pipeline") or 1, config.layout.pipeline_schedule
    share = _count_rank_sequences(layout, config)
    micro_batches = max(1, share // config.batch.resolve_micro_sequences(share))
    chunks = schedule.num_chunks if ranks > 1 else 1
    return build_step_timeline(parts, ranks, chunks, micro_batches, schedule.kind)


def count_rank_micro_batch(layout: dict[str, Any], config: RunConfig) -> tuple[int, int]:
    """Return the sequences of a micro-batch of one rank, and the ranks that share each layer.

    Args:
        layout: sizes of axes, as `memory.layout` of an estimate; empty for a bare model.
        config: the run's config.

    Returns:
        Sequences, and the size of the tensor axis.
    """
    share = _count_rank_sequences(layout, config)
    return config.batch.resolve_micro_sequences(share), layout.get("tensor") or 1


def _count_rank_sequences(layout: dict[str, Any], config: RunConfig) -> int:
    groups = max(1, (layout.get("replicate") or 1) * (layout.get("shard") or 1))
    return max(1, config.batch.sequences_per_step // groups)
