"""Compare the memory of a dry run with `llmsys estimate`, phase by phase and item by item.

Invariants:
- Both sides are what tensors hold, without the share that an allocator cannot use.
- Every item of the estimate has one category; an item that is new here raises.
"""

from typing import Any

from llmsys.config.run import RunConfig
from llmsys.dryrun.categories import (
    BACKWARD,
    BATCH,
    BUFFERS,
    EVALUATION,
    FORWARD,
    GATHERED,
    GRADIENTS,
    LOSS,
    MOMENTS,
    PARAMETERS,
    REDUCED,
    SAVED,
    SAVING,
    UPDATE,
)
from llmsys.estimate.activation_memory import IN_EVALUATION
from llmsys.estimate.device_profile import load_device_profile
from llmsys.estimate.memory_timeline import MemorySnapshot
from llmsys.estimate.peak_memory import estimate_peak_memory
from llmsys.estimate.software_profile import MemoryProfile

STATE = "parameters and buffers"
IN_USE = "temporaries and unreduced gradients"
# Group of each category of the dry run. An unreduced gradient is a temporary of the backward until
# FSDP copies it.
GROUPS = {
    PARAMETERS: STATE,
    BUFFERS: STATE,
    MOMENTS: "optimizer state",
    GRADIENTS: "gradients",
    GATHERED: "gathered weights",
    SAVED: "activations",
    LOSS: "loss",
    UPDATE: IN_USE,
    FORWARD: IN_USE,
    BACKWARD: IN_USE,
    REDUCED: IN_USE,
    EVALUATION: IN_USE,
    SAVING: IN_USE,
    BATCH: "activations",
}

# Items of the estimate in each group.
ITEM_GROUPS = {
    STATE: ("weights", "masters", "EMA of the weights"),
    "optimizer state": ("moments",),
    "gradients": ("gradients", "unsharded float32 gradients"),
    "gathered weights": (
        "gathered weights",
        "gathered weights outside of blocks",
        "gathered weights of blocks",
        "whole weights",
        "weights cast for matmuls",
    ),
    "activations": (
        "activations saved by blocks",
        "activations saved by a block",
        "activations saved by two blocks",
        "attention mask",
        "stage output",
        "messages between stages",
    ),
    "loss": (
        "last hidden states",
        "last hidden states and their gradient",
        "one block of logits",
        "a piece of it in float32",
        "gradient of the head",
        "logits",
        "logits in float32",
        "gradient of logits",
    ),
    IN_USE: (
        "temporaries of a block",
        "recomputed block",
        "gradients inside a block",
        "gradients in the compute dtype",
        "gradients before reduction",
        "buckets of gradients",
        "gradient of the stream",
        "the stream",
        "a piece of them in float32",
        "updates of matrices",
    ),
}
GROUP_OF_ITEM = {item: group for group, items in ITEM_GROUPS.items() for item in items}

LAST = "step 2, last micro-batch"
# Phase of the dry run, and instants of the estimate, by name.
PHASES = {
    "forward": (
        f"{LAST}: forward",
        ("at the start of forward", "before the last block", "at the end of forward"),
    ),
    "loss": (f"{LAST}: loss", ("in the loss",)),
    "backward to the second block": (
        f"{LAST}: backward to the second block",
        (
            "in the backward of the last block",
            "in the backward of the second block",
        ),
    ),
    "backward of the first block": (
        f"{LAST}: backward of the first block",
        ("in the backward of the first block", "at the end of backward"),
    ),
    "optimizer step": ("step 2: optimizer", ("in the optimizer step",)),
    "evaluation": ("evaluation", (IN_EVALUATION,)),
}


def compare_with_estimate(result: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """Compare the result of one rank with the estimate of the fullest rank, in a pipeline of those
    with its stages.

    Args:
        result: plain values of `rank_result.py`.
        config: the run's config.

    Returns:
        `peak_bytes` of the estimate, `difference` of the dry run's peak relative to it, and
        `phases` with the peak and the items of both sides.
    """
    config = config.resolve_precision(result["precision"])
    # A dry run computes compiled blocks eagerly.
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"compile": "none"})}
    )
    if config.batch.micro_sequences == "auto":
        batch = config.batch.model_copy(update={"micro_sequences": result["micro_sequences"]})
        config = config.model_copy(update={"batch": batch})
    layout = config.resolve_layout(result["world_size"])
    device = load_device_profile(result["request"]["device"])
    system = MemoryProfile(measured="allocated", capability=device.compute_capability)
    timeline = estimate_peak_memory(
        config, layout, system=system, pipeline_rank=result["rank"] // layout.ranks_per_stage
    )
    instants = {instant.name: instant for instant in timeline.instants}
    measured = {phase["name"]: phase for phase in result["memory"]["phases"]}
    phases = []
    for name, (phase, candidates) in PHASES.items():
        if phase in measured:
            found = [instants[one] for one in candidates if one in instants]
            fullest = max(found, key=lambda instant: instant.bytes)
            phases.append(_compare_phase(name, measured[phase], fullest))
    return {
        "peak_bytes": timeline.peak_bytes,
        "peak_instant": timeline.peak_instant,
        "difference": result["memory"]["peak_bytes"] / timeline.peak_bytes - 1,
        "phases": phases,
    }


def _compare_phase(name: str, phase: dict[str, Any], instant: MemorySnapshot) -> dict[str, Any]:
    measured = dict.fromkeys(GROUPS.values(), 0)
    estimated = dict.fromkeys(GROUPS.values(), 0)
    # Evaluation is one category. The head's gradient is made in the loss, or where it is cast after
    # it.
    passing = ("loss",) if instant.name == IN_EVALUATION or name.startswith("backward") else ()
    for category, size in phase["categories"].items():
        measured[IN_USE if GROUPS[category] in passing else GROUPS[category]] += size
    for item in instant.items:
        group = GROUP_OF_ITEM[item.name]
        estimated[IN_USE if group in passing else group] += item.bytes
    items = [
        {"item": group, "dry_run_bytes": measured[group], "estimate_bytes": estimated[group]}
        for group in measured
        if measured[group] or estimated[group]
    ]
    return {
        "phase": name,
        "instant": instant.name,
        "dry_run_bytes": phase["peak_bytes"],
        "estimate_bytes": instant.bytes,
        "items": items,
    }
