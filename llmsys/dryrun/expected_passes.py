"""The forward and backward passes of a rank in one step, in their order, and the parts of a step
that they belong to.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.pipeline import (
    GPipeScheduleConfig,
    InterleavedScheduleConfig,
    OneForwardOneBackwardConfig,
)

REPEATED = "first"
"""Part of a step that stands for several micro-batches."""
ONCE = "step"


@dataclass(frozen=True)
class Pass:
    """A pass of one micro-batch through one stage.

    Attributes:
        part: REPEATED, or ONCE.
        stage: Index of the stage among those of this rank.
        is_backward: Whether gradients are computed.
        is_last: It is the last backward pass of its stage in the step.
    """

    part: str
    stage: int
    is_backward: bool
    is_last: bool = False


def count_forwards(passes: Sequence[Pass]) -> Counter[tuple[str, int]]:
    """Count forward passes by part of the step and stage.

    Args:
        passes: Passes of a rank.

    Returns:
        Counts; stages are counted among those of the rank.
    """
    return Counter((one.part, one.stage) for one in passes if not one.is_backward)


def list_passes(
    layout: ParallelLayout, rank: int, micro_batches: int, parts: tuple[str, ...]
) -> list[Pass]:
    """List the passes that a dry run makes.

    Args:
        layout: A resolved layout.
        rank: The rank.
        micro_batches: Micro-batches of a step.
        parts: Of the micro-batches that run, where there is no pipeline; in a pipeline all run.

    Returns:
        The passes in their order.
    """
    if layout.pipeline == 1:
        found: list[Pass] = []
        for number, part in enumerate(parts):
            found.append(Pass(part, 0, is_backward=False))
            found.append(Pass(part, 0, is_backward=True, is_last=number == len(parts) - 1))
        return found
    order = [*_iter_order(layout, rank // layout.ranks_per_stage, micro_batches)]
    left = {stage: micro_batches for stage, _ in order}
    passes = []
    for stage, is_backward in order:
        left[stage] -= is_backward
        passes.append(Pass(ONCE, stage, is_backward, is_backward and left[stage] == 0))
    return passes


def _iter_order(layout: ParallelLayout, place: int, count: int) -> Iterator[tuple[int, bool]]:
    """Yield (stage of this rank, whether it is a backward pass) of a pipeline's schedule."""
    ranks = layout.pipeline
    stages = 1
    # Passes go through a stage in rounds of this many micro-batches.
    round_size = count
    match layout.pipeline_schedule:
        case GPipeScheduleConfig():
            filled = count
        case OneForwardOneBackwardConfig():
            # Each rank fills the pipeline after it; with too few micro-batches GPipe runs.
            filled = count if count < ranks else min(count, ranks - place)
        case InterleavedScheduleConfig(stages_per_rank=stages):
            # Narayanan 2021, arXiv:2104.04473, 2.2.
            round_size = count // max(1, count // ranks)
            waiting = (stages - 1) * round_size + 2 * (ranks - 1 - place)
            filled = min(count * stages, waiting + 1)
        case unreachable:
            assert_never(unreachable)
    for step in range(filled):
        yield step // round_size % stages, False
    for step in range(count * stages):
        yield stages - 1 - step // round_size % stages, True
        if filled + step < count * stages:
            yield (filled + step) // round_size % stages, False
