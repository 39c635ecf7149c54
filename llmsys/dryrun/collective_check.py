"""Compare the collectives and shards of a dry run with those that follow from its config.

Invariants:
- Every difference is named with operation, axis, ranks, dtype, bytes and both counts.
- What has no expectation is listed by name.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmsys.dryrun.collective_log import OPTIMIZER, CollectiveLog, Message
from llmsys.dryrun.expected_exchanges import add_activation_messages, add_pipeline_messages
from llmsys.dryrun.expected_messages import Expectation, RankContext
from llmsys.dryrun.expected_passes import ONCE, REPEATED
from llmsys.dryrun.expected_sharding import add_sharding_messages
from llmsys.dryrun.expected_updates import add_update_messages
from llmsys.dryrun.order_check import find_wrong_order
from llmsys.dryrun.shard_check import find_wrong_shards

# The loss of a step, and the flags of the trainer: to stop, and to save.
STEP_NUMBERS = 3
TOKEN_COUNTS = 4


@dataclass(frozen=True)
class CollectiveCheck:
    """The result of a comparison.

    Attributes:
        num_messages: Expected calls of the micro-batches that ran; a sum that may be cut in pieces
            counts as one.
        differences: Sentences, one for each kind of message that is missing, additional, or of
            another group, size or number type, and for each wrong shard.
        unchecked: Names of what has no expectation.
    """

    num_messages: int
    differences: tuple[str, ...]
    unchecked: tuple[str, ...]


def build_expectation(context: RankContext) -> Expectation:
    """Derive the collectives of a step.

    Args:
        context: The rank and its config.

    Returns:
        What it is expected to send and receive.
    """
    expected = _build_pass_expectation(context)
    _add_partial_gradients(context, expected)
    _add_step_numbers(context, expected)
    add_update_messages(context, expected)
    return expected


def _build_pass_expectation(context: RankContext) -> Expectation:
    """Derive what the forward and backward passes of a step send."""
    expected = Expectation()
    add_sharding_messages(context, expected)
    add_activation_messages(context, expected)
    add_pipeline_messages(context, expected)
    return expected


def _add_step_numbers(context: RankContext, expected: Expectation) -> None:
    """Expect the sums over all ranks: token counts, gradient norm, loss with extras, loads of
    experts.
    """
    ranks = context.list_ranks("world")
    for numbers in (TOKEN_COUNTS, 1, STEP_NUMBERS):
        expected.add(ONCE, Message("all_reduce", ranks, "float32", 4 * numbers))
    model = context.config.model
    if model.moe is not None:
        depth = model.multi_token_prediction.depth if model.multi_token_prediction else 0
        is_last_sparse = model.is_moe_layer(model.num_hidden_layers - 1)
        layers = model.num_moe_layers + depth * is_last_sparse
        size = 8 * layers * (2 * model.moe.num_experts + 3)
        expected.add(ONCE, Message("all_reduce", ranks, "float64", size))


def _add_partial_gradients(context: RankContext, expected: Expectation) -> None:
    """Expect the one sum over the tensor axis of the gradients that a rank has of its own positions
    alone: those of unsplit parameters of blocks.
    """
    if context.layout.tensor == 1:
        return
    elements = sum(
        context.count_shard(row) * row.num_copies for row in context.rows if context.is_partial(row)
    )
    expected.add(ONCE, Message("all_reduce", context.list_ranks("tensor"), "float32", 4 * elements))


def compare_collectives(
    log: CollectiveLog, local_sizes: Mapping[str, int], context: RankContext
) -> CollectiveCheck:
    """Compare what was recorded with what is expected.

    Args:
        log: The messages of a step.
        local_sizes: Elements of each parameter that the rank holds.
        context: The rank and its config.

    Returns:
        The differences, and what was not compared.
    """
    expected = build_expectation(context)
    differences = [*_iter_differences(log, expected), *find_wrong_shards(local_sizes, context)]
    if not expected.is_open:
        differences += find_wrong_order(log.events, expected, context)
    num_messages = 0 if expected.is_open else sum(expected.messages.values())
    return CollectiveCheck(
        num_messages + len(expected.sums), tuple(differences), tuple(expected.unchecked)
    )


def iter_unexpected_messages(log: CollectiveLog, context: RankContext) -> Iterator[str]:
    """Find what a step sent that it should not have, also where it ended before it sent all.

    Args:
        log: The messages of the part of a step that ran.
        context: The rank and its config.

    Yields:
        A sentence for each kind of message that is additional, or more often than in a whole step.
    """
    expected = build_expectation(context)
    if expected.is_open:
        return
    for (part, message), found in _merge_parts(log).items():
        operation, ranks, dtype, *_ = message
        is_open = part in expected.open_parts or (operation, ranks) in expected.open_operations
        wanted = expected.messages[part, message]
        if found > wanted and not is_open and (part, operation, ranks, dtype) not in expected.sums:
            yield _describe_difference(log, part, message, found, wanted)


def iter_missing_messages(log: CollectiveLog, context: RankContext) -> Iterator[str]:
    """Find what the passes of a step did not send, where it ended after them.

    Args:
        log: The messages of the part of a step that ran.
        context: The rank and its config.

    Yields:
        A sentence for each kind of message that is missing, or less often than in a whole step.
        Sums that may be cut in pieces are left out: some are sent after the passes.
    """
    expected = _build_pass_expectation(context)
    if expected.is_open:
        return
    recorded = _merge_parts(log)
    for (part, message), wanted in expected.messages.items():
        found = recorded[part, message]
        if found < wanted:
            yield _describe_difference(log, part, message, found, wanted)


def _merge_parts(log: CollectiveLog) -> Counter[tuple[str, Message]]:
    recorded: Counter[tuple[str, Message]] = Counter()
    for (part, message), count in log.messages.items():
        recorded[_merge_part(part), message] += count
    return recorded


def _iter_differences(log: CollectiveLog, expected: Expectation) -> Iterator[str]:
    if expected.is_open:
        return
    recorded = _merge_parts(log)
    yield from _iter_sum_differences(log, recorded, expected)
    groups: dict[tuple[str, str, tuple[int, ...], str], set[Message]] = defaultdict(set)
    for part, message in (*expected.messages, *recorded):
        if part in expected.open_parts:
            continue
        if (message.operation, message.ranks) in expected.open_operations:
            continue
        groups[part, message.operation, message.ranks, message.dtype].add(message)
    for (part, *_), messages in groups.items():
        for message in sorted(messages):
            found, wanted = recorded[part, message], expected.messages[part, message]
            if found != wanted:
                yield _describe_difference(log, part, message, found, wanted)


def _iter_sum_differences(
    log: CollectiveLog, recorded: Counter[tuple[str, Message]], expected: Expectation
) -> Iterator[str]:
    """Compare bytes that may be cut in any number of messages, and take those messages out."""
    for (part, operation, ranks, dtype), wanted in expected.sums.items():
        # Smaller ones of the same kind are messages with an expectation of their own.
        own = [
            (where, message)
            for where, message in recorded
            if where == part
            and message[:3] == (operation, ranks, dtype)
            and not expected.messages[where, message]
        ]
        found = sum(message.bytes * recorded[where, message] for where, message in own)
        for key in own:
            del recorded[key]
        if found != wanted:
            yield (
                f"{_describe_kind(log, operation, ranks)}, {dtype}, {_describe_part(part)}: "
                f"{found:,} bytes, expected {wanted:,}"
            )


def _merge_part(part: str) -> str:
    return part if part in (REPEATED, OPTIMIZER) else ONCE


def _describe_difference(
    log: CollectiveLog, part: str, message: Message, found: int, wanted: int
) -> str:
    to = {"send": f" to rank {message.peer}", "receive": f" from rank {message.peer}"}
    kind = (
        "missing"
        if not found
        else "additional"
        if not wanted
        else "too few"
        if found < wanted
        else "too many"
    )
    return (
        f"{kind}: {_describe_kind(log, message.operation, message.ranks)}"
        f"{to.get(message.operation, '')}, {message.dtype}, "
        f"{message.bytes:,} bytes, {_describe_part(part)}: {found} calls, expected {wanted}"
    )


def _describe_kind(log: CollectiveLog, operation: str, ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"{operation} over {log.get_axis(ranks)} ({len(ranks)} ranks: {shown})"


def _describe_part(part: str) -> str:
    return {REPEATED: "each repeated micro-batch", ONCE: "rest of the step"}.get(part, part)
