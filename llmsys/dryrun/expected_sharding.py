"""Expected messages of data parallelism: gathers of weights and reductions of gradients under
FSDP2, DDP and plain data parallelism.

Invariants:
- Everything follows from the config and the tensors that it lists.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from llmsys.config.engine import TorchEngineConfig
from llmsys.config.head import MlmHeadConfig
from llmsys.config.module_tensors import ParameterTensor
from llmsys.dryrun.collective_log import Message
from llmsys.dryrun.expected_messages import Expectation, RankContext
from llmsys.dryrun.expected_passes import ONCE, Pass
from llmsys.dryrun.rank_groups import Axis
from llmsys.estimate.rank_parameters import (
    count_local_elements,
    count_shards,
    is_in_block,
)


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers and reduces together.

    Attributes:
        stage: The stage of this rank that computes with them.
        shards: Ranks that share them.
        gathered: Elements of all shards, padded to equal ones.
        reduced: Those of parameters with gradients, by reduction: a reversible block reduces those
            of each branch by themselves.
        calls: Times that a forward calls the block.
        is_root: They are outside of blocks: gathered by a pass of any stage, and kept from a
            forward to its backward.
    """

    stage: int
    shards: tuple[int, ...]
    gathered: int
    reduced: tuple[int, ...]
    is_root: bool
    calls: int = 1


def add_sharding_messages(context: RankContext, expected: Expectation) -> None:
    """Add the messages of data parallelism.

    Args:
        context: The rank and its config.
        expected: Gets the messages.
    """
    engine = context.config.engine
    assert isinstance(engine, TorchEngineConfig)
    match engine.data_parallel:
        case "fsdp":
            _add_fsdp_messages(context, engine, expected)
        case "ddp":
            elements = sum(row.num_elements for row in _iter_trained(context))
            expected.add_sum(
                ONCE, "all_reduce", context.list_ranks("world"), "float32", 4 * elements
            )
        case "plain":
            _add_plain_messages(context, expected)
        case "auto":
            raise AssertionError("data_parallel=auto is resolved before a dry run")
        case unreachable:
            assert_never(unreachable)


def _add_plain_messages(context: RankContext, expected: Expectation) -> None:
    """Whole weights: one gather and one reduction of everything in a step, in buckets."""
    elements = sum(_count_padded(context, row) * row.num_copies for row in context.rows)
    ranks = context.list_ranks("replica")
    expected.add_sum(ONCE, "reduce_scatter", ranks, "float32", 4 * elements)
    expected.add_sum(ONCE, "all_gather", ranks, context.dtype, context.itemsize * elements)


def _add_fsdp_messages(
    context: RankContext, engine: TorchEngineConfig, expected: Expectation
) -> None:
    reduced_dtype, reduced_bytes = (
        ("float32", 4) if engine.reduce_dtype == "fp32" else ("bfloat16", 2)
    )
    replicas = context.list_ranks("replicate")
    units = list_units(context)
    for unit, count in units.items():
        gathers = count_gathers(unit, context.passes, engine.reshard)
        size = context.itemsize * unit.gathered
        for part, times in gathers.items():
            expected.add(
                part, Message("all_gather", unit.shards, context.dtype, size), count * times
            )
        for one in context.passes:
            if not one.is_backward or one.stage != unit.stage:
                continue
            if engine.gradient_accumulation == "whole" and not one.is_last:
                continue
            # What waits for the replicas has one place in a unit, and the branches of a reversible
            # block would share it.
            is_summed = one.is_last or context.config.model.residual.is_reversible
            for elements in filter(None, unit.reduced):
                size = reduced_bytes * elements
                whole = Message("reduce_scatter", unit.shards, reduced_dtype, size)
                expected.add(one.part, whole, count)
                if is_summed:
                    own = Message("all_reduce", replicas, reduced_dtype, size // len(unit.shards))
                    expected.add(one.part, own, count)


def count_gathers(unit: Unit, passes: list[Pass], reshard: str) -> Counter[str]:
    """Count the gathers of a unit by the part of the step.

    Args:
        unit: The unit.
        passes: The passes of the rank, in their order.
        reshard: `engine.reshard`.

    Returns:
        Counts by part.
    """
    counts: Counter[str] = Counter()
    keeps = unit.is_root or reshard != "after_forward"
    is_gathered = False
    for one in passes:
        ends = one.is_backward and (reshard != "after_step" or one.is_last)
        if unit.is_root or one.stage == unit.stage:
            counts[one.part] += not is_gathered
            # A block that runs again finds its weights only where its end has kept them.
            again = not keeps if not one.is_backward else ends
            counts[one.part] += again * (unit.calls - 1)
            is_gathered = keeps or one.is_backward
        # The end of a backward reshards every unit of the rank, also of stages that wait.
        if ends:
            is_gathered = False
    return counts


def list_units(context: RankContext) -> Counter[Unit]:
    """Return the FSDP units of a rank with their number: blocks, experts where they are sharded
    apart, and all that is outside of blocks.

    Args:
        context: The rank and its config.

    Returns:
        Equal units once, with their number.
    """
    elements: dict[tuple[str, int, bool], int] = defaultdict(int)
    reduced: dict[tuple[str, int, bool], Counter[str]] = defaultdict(Counter)
    calls: dict[tuple[str, int, bool], int] = defaultdict(lambda: 1)
    is_reversible = context.config.model.residual.is_reversible
    has_separate_experts = context.layout.expert > 1 or context.layout.tensor > 1
    trained = set(_iter_trained(context))
    for row in context.rows:
        padded = _count_padded(context, row)
        if not is_in_block(row):
            keys = [("", -1, False)] * row.num_copies
        else:
            prefix = row.name.partition("{i}")[0]
            is_apart = row.is_routed and has_separate_experts
            keys = [(prefix, layer, is_apart) for layer in row.layers]
        branch = "feed_forward" if is_reversible and ".feed_forward" in row.name else ""
        for key in keys:
            elements[key] += padded
            reduced[key][branch] += padded * (row in trained)
            if key[0]:
                calls[key] = 2 if is_reversible else row.steps
    units: Counter[Unit] = Counter()
    for key, gathered in elements.items():
        prefix, layer, is_apart = key
        is_root = not prefix
        stage = context.find_stage(layer if prefix == "blocks." else None)
        axis: Axis = "replica" if is_root else "expert_fsdp" if is_apart else "fsdp"
        sums = tuple(sorted(reduced[key].values()))
        units[Unit(stage, context.list_ranks(axis), gathered, sums, is_root, calls[key])] += 1
    return units


def _count_padded(context: RankContext, row: ParameterTensor) -> int:
    """Elements of one copy on all ranks that share it, where the shards are as long as the
    longest.
    """
    layout = context.layout
    return count_local_elements(row, layout, context.config.model) * count_shards(row, layout)


def _iter_trained(context: RankContext) -> Iterator[ParameterTensor]:
    """Yield the rows with gradients: where masks alone are trained, BERT's pooler and next-sentence
    head have none.
    """
    config = context.config
    is_unused = (
        isinstance(config.model.head, MlmHeadConfig)
        and config.objective.kind != "masked_next_sentence"
    )
    for row in context.rows:
        if not (is_unused and row.name.startswith(("pooler.", "next_sentence."))):
            yield row
