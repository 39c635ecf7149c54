"""A lower bound of the time of a layout, by which a plan orders what it looks at."""

from dataclasses import replace

from llmsys.config.run import RunConfig
from llmsys.estimate.plan.layout_candidate import (
    SCHEDULES,
    IllegalLayoutError,
    LayoutCandidate,
    PlanTarget,
    replace_config,
    require_divisible,
)


def estimate_lower_bound(config: RunConfig, choice: LayoutCandidate, place: PlanTarget) -> float:
    """Return seconds that no micro-batch and recomputation of a layout is faster than, to a few per
    cent.

    Args:
        config: resolved config of a run.
        choice: the layout, with the largest micro-batch.
        place: device profile and cluster.

    Returns:
        The P50 of a step without recomputation, the least of the smallest and the largest
        micro-batches.

    Raises:
        IllegalLayoutError: the batch does not divide, or the model.
    """
    require_divisible(config, choice)
    if choice.engine.kind == "deepspeed" and choice.tensor * choice.context > 1:
        raise IllegalLayoutError("engine.kind=deepspeed does not shard matrices or sequences")
    sizes = choice.list_micro_sizes() or [1]
    schedules = [
        one
        for one in SCHEDULES[: 1 if choice.pipeline == 1 else None]
        if not any(replace(choice, schedule=one).layout.find_stage_violations(config.model))
    ]
    # Not validated: what the config refuses is refused when its turn comes.
    tried = (
        replace_config(config, replace(choice, micro_sequences=size, schedule=schedule))
        for size in {sizes[0], sizes[min(1, len(sizes) - 1)], sizes[-1]}
        for schedule in schedules
    )
    return min(
        (place.estimate_step(one, one.layout).seconds.p50 for one in tried), default=float("inf")
    )
