"""Compare the order of passes and of messages between two ranks with that of the schedule.

Invariants:
- Passes of a pipeline, and what a rank sends, have one order. What it receives may come early, and
  must be there when a pass needs it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from llmsys.dryrun.collective_log import Event
from llmsys.dryrun.expected_messages import Expectation, RankContext
from llmsys.dryrun.expected_passes import Pass

PASSES = ("forward", "backward")


def find_wrong_order(
    events: Sequence[Event], expected: Expectation, context: RankContext
) -> Iterator[str]:
    """Find the first place at which passes or messages are in another order than the config asks
    for.

    Args:
        events: What was recorded.
        expected: What is expected, with the messages of rings in their order.
        context: The rank and its config.

    Yields:
        A sentence for the passes, for each direction of a pipeline, and for a ring.
    """
    if context.layout.pipeline > 1:
        yield from _iter_pipeline_differences(events, context)
    if context.layout.ring_size > 1:
        ranks = context.list_ranks("ring")
        found = [one for one in events if one.ranks == ranks]
        wanted = [one for one in expected.events if one.ranks == ranks]
        yield from _compare("messages of the ring", found, wanted)


def _iter_pipeline_differences(events: Sequence[Event], context: RankContext) -> Iterator[str]:
    passes = list_pipeline_passes(context)
    found = [one for one in events if one.name in PASSES]
    yield from _compare("passes of the pipeline", found, passes)
    if found != passes:
        return
    ranks = context.list_ranks("pipeline")
    own = [one for one in events if one.ranks == ranks or one.name in PASSES]
    sent: list[Event] = []
    needed: Counter[int] = Counter()
    arrived: Counter[int] = Counter()
    expected: list[Event] = []
    last = len(ranks) * len(context.stages) - 1
    for one in own:
        if one.name == "send":
            sent.append(one)
        elif one.name == "receive":
            arrived[one.number] += 1
        else:
            source, target = _find_peers(one, ranks, last)
            if source is not None:
                needed[source] += 1
                if arrived[source] < needed[source]:
                    yield (
                        f"wrong order: {_describe(one)} begins after {arrived[source]} messages "
                        f"from rank {source}, and needs {needed[source]}"
                    )
                    return
            if target is not None:
                expected.append(Event("send", ranks, target))
    # The gradients of an embedding at both ends are sent after all passes.
    yield from _compare("messages of the pipeline", sent[: len(expected)], expected)


def list_pipeline_passes(context: RankContext) -> list[Event]:
    """List the passes of a rank of a pipeline.

    Args:
        context: The rank and its config.

    Returns:
        Passes in their order; micro-batches go through a stage in ascending order.
    """
    layout = context.layout
    place = context.rank // layout.ranks_per_stage
    numbers: Counter[Pass] = Counter()
    found = []
    for one in context.passes:
        key = Pass("", one.stage, one.is_backward)
        stage = place + one.stage * layout.pipeline
        found.append(Event(PASSES[one.is_backward], (), numbers[key], stage))
        numbers[key] += 1
    return found


def _find_peers(one: Event, ranks: tuple[int, ...], last: int) -> tuple[int | None, int | None]:
    """Return the ranks that a pass gets its input from and sends its output to."""
    before = ranks[(one.stage - 1) % len(ranks)] if one.stage > 0 else None
    after = ranks[(one.stage + 1) % len(ranks)] if one.stage < last else None
    return (before, after) if one.name == "forward" else (after, before)


def _compare(what: str, found: Sequence[Event], wanted: Sequence[Event]) -> Iterator[str]:
    """Yield a sentence about the first difference."""
    for number, (one, other) in enumerate(zip(found, wanted, strict=False), start=1):
        if one != other:
            yield f"wrong order: {what} {number} is {_describe(one)}, expected {_describe(other)}"
            return
    if len(found) != len(wanted):
        yield f"wrong number of {what}: {len(found)}, expected {len(wanted)}"


def _describe(one: Event) -> str:
    if one.name in PASSES:
        return f"the {one.name} of micro-batch {one.number} in stage {one.stage}"
    return f"a {one.name} {'to' if one.name == 'send' else 'from'} rank {one.number}"
