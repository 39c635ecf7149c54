"""Compare the waits of the host in a dry run with those that a step has by design.

Invariants:
- Every wait that the config does not ask for is named with its line, in a block, at the head, in
  the loss, in a backward and in the optimizer alike.
"""

from collections import Counter
from collections.abc import Iterator

from llmsys.dryrun.expected_messages import RankContext
from llmsys.dryrun.expected_passes import count_forwards
from llmsys.dryrun.host_waits import HostWait
from llmsys.dryrun.module_names import is_inside_block

STEP_NUMBERS = ("tolist", "llmsys/engine/engine.py")
"""Cause and file of the one read of loss, norm and counts at the end of a step."""
LARGEST_LOGITS = ("copy to the host", "llmsys/engine/logit_clip.py")
OFFLOADED = "torch/distributed/fsdp/"
"""Gradients of offloaded shards go to the host, which waits for them before it steps."""


def count_expected_waits(context: RankContext) -> int:
    """Count the waits in blocks that a step has by design: the host reads the rows of experts that
    are on other ranks, or that have a capacity, once in a forward of a layer.

    Args:
        context: The rank and its config.

    Returns:
        Waits of the micro-batches that run.
    """
    moe = context.config.model.moe
    if moe is None or (context.layout.expert == 1 and moe.routing.kind == "token_choice"):
        return 0
    forwards = count_forwards(context.passes)
    rows = {
        (layer, row.name.partition("{i}")[0])
        for row in context.rows
        if row.is_routed
        for layer in row.layers
    }
    steps = max((row.steps for row in context.rows if row.is_routed), default=1)
    count = 0
    for layer, prefix in rows:
        stage = context.find_stage(layer if prefix == "blocks." else None)
        count += steps * sum(n for (_, own), n in forwards.items() if own == stage)
    return count


def list_step_waits(context: RankContext) -> Counter[tuple[str, str]]:
    """List the waits of a step that no block has.

    Args:
        context: The rank and its config.

    Returns:
        Counts by cause and file.
    """
    waits = Counter({STEP_NUMBERS: 1})
    if context.config.optimizer.max_attention_logit is not None:
        waits[LARGEST_LOGITS] = 1
    return waits


def iter_wait_differences(waits: list[HostWait], context: RankContext) -> Iterator[str]:
    """Find the waits that a step does not have by design.

    Args:
        waits: What was recorded.
        context: The rank and its config.

    Yields:
        A sentence for each line that waits.
    """
    wanted = count_expected_waits(context)
    by_design: list[HostWait] = []
    outside: list[HostWait] = []
    for one in waits:
        if not is_inside_block(one.module):
            outside.append(one)
        # Of experts, and in their layer: everything else is a wait that nothing needs.
        elif one.module.endswith("feed_forward") and one.cause in ("tolist", "item"):
            by_design.append(one)
        else:
            yield _describe_wait(one, "in a block", "expected 0")
    found = sum(one.count for one in by_design)
    if found != wanted:
        for one in by_design:
            yield _describe_wait(
                one, "in a block", f"where all of the experts' reads together are {wanted}"
            )
        if not by_design:
            yield f"missing reads of the rows of experts: 0, expected {wanted}"
    if getattr(context.config.engine, "cpu_offload", "none") != "none":
        outside = [one for one in outside if not one.line.startswith(OFFLOADED)]
    yield from _iter_outside(outside, list_step_waits(context))


def _iter_outside(waits: list[HostWait], expected: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yield the waits outside of the forward of blocks, of which a step has few."""
    found: Counter[tuple[str, str]] = Counter()
    for one in waits:
        found[_get_kind(one)] += one.count
    for one in waits:
        wanted = expected[_get_kind(one)]
        if found[_get_kind(one)] > wanted:
            yield _describe_wait(one, "outside of blocks", f"expected {wanted}")


def _get_kind(one: HostWait) -> tuple[str, str]:
    return one.cause, one.line.partition(":")[0]


def _describe_wait(one: HostWait, where: str, expected: str) -> str:
    module = f" in {one.module}" if one.module else ""
    return (
        f"wait of the host {where}: {one.cause}{module} at {one.line}, {one.count} "
        f"times in the micro-batches that ran, {expected}; the device runs empty while the host "
        "waits, so keep the value on the device"
    )
