"""The result of one rank as plain values with stable keys, which the command prints and the page
shows.

Invariants:
- Counts and bytes between ranks are those of a whole step, with every micro-batch.
- Memory is what tensors hold; `needed_bytes` adds what an allocator and the driver take, as the
  estimate does, without what compiled blocks save by the estimate.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from llmsys.config.attention_device import AttentionDevice
from llmsys.config.run import RunConfig
from llmsys.dryrun.block_check import check_blocks
from llmsys.dryrun.categories import SAVED
from llmsys.dryrun.collective_check import compare_collectives
from llmsys.dryrun.kernel_flops import count_backward_channels, count_forward_channels
from llmsys.dryrun.memory_tracker import Allocation, MemoryTracker
from llmsys.dryrun.order_check import PASSES
from llmsys.dryrun.rank_session import RankSession, SessionOutcome
from llmsys.estimate.activation_memory import compute_micro_batch
from llmsys.estimate.device_profile import DeviceProfile
from llmsys.estimate.flops import count_flops, list_attention_flops
from llmsys.estimate.peak_memory import OUTSIDE_BYTES, estimate_peak_memory
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.step_memory import ALLOCATOR_SLACK
from llmsys.kernels.attention_layers import list_attention_groups

TIMELINE_POINTS = 500
MAX_OWNERS = 24
MAX_PHASE_OWNERS = 12
MAX_OPERATIONS = 16
ATTENTION_WORDS = ("attention", "attn", "flex")


def build_rank_result(session: RankSession, outcome: SessionOutcome) -> dict[str, Any]:
    """Build the result of a session.

    Args:
        session: after its run.
        outcome: what its run returned.

    Returns:
        Plain values.
    """
    request = session.request
    recorder = session.recorder
    config = session.config
    memory = build_memory_result(recorder.memory, 1 / config.model.num_hidden_layers)
    capacity = int(session.profile.memory_bytes)
    saving = estimate_compiled_saving(session)
    needed = int((memory["peak_bytes"] - saving) * (1 + ALLOCATOR_SLACK)) + OUTSIDE_BYTES
    repeats = session.count_repeats
    kernels = list_kernels(config, session.profile, session.stage.layers)
    check = compare_collectives(recorder.collectives, outcome.local_sizes, session.context)
    blocks = check_blocks(recorder, session.context, kernels, has_probe=session.probe is not None)
    operations = _sum_phases(recorder.operations, session)
    return {
        "rank": request.rank,
        "world_size": request.world_size,
        "request": request.to_dict(),
        "layout": session.layout.to_settings(),
        "device": session.profile.name,
        "precision": config.train.resolved_precision,
        "micro_sequences": compute_micro_batch(config, session.layout)[0],
        "micro_batches": session.num_micro_batches,
        "fits": needed <= capacity,
        "is_proven": needed <= capacity and not check.differences and not blocks.differences,
        "capacity_bytes": capacity,
        "needed_bytes": needed,
        "compiled_saving_bytes": saving,
        "memory": memory,
        "host_copy_bytes": outcome.host_copy_bytes,
        "collectives": [asdict(one) for one in recorder.collectives.list_collectives(repeats)],
        "collective_check": asdict(check),
        "block_check": asdict(blocks),
        "host_work": build_host_work(session),
        "recorded_micro_batches": session.num_recorded,
        "num_waits": sum(one.count for one in recorder.waits.list_waits()),
        "waits": [asdict(one) for one in recorder.waits.list_waits()],
        "kernels": kernels,
        "attention": {
            name: n
            for name, n in operations.items()
            if any(word in name for word in ATTENTION_WORDS)
        },
        "operations": dict(operations.most_common(MAX_OPERATIONS)),
        "num_operations": sum(operations.values()),
        "flops": dict(_sum_phases(recorder.flops, session).most_common()),
        "attention_flops": build_attention_flops(session),
        "squares": [
            {"owner": owner, "tensor": tensor, "maker": maker, "count": n}
            for (owner, tensor, maker), n in recorder.squares.items()
        ],
        "probe_length": None if session.probe is None else session.probe.target.length,
        "compiled": {
            "signatures": dict(Counter(name for name, _ in session.signatures.counts)),
            "recompiled": dict(session.signatures.recompiled),
        },
        "parameters": asdict(outcome.parameters) | {"imbalance": outcome.parameters.imbalance},
        "seconds": session.seconds,
        "process_bytes": outcome.process_bytes,
    }


def build_host_work(session: RankSession) -> dict[str, float] | None:
    """Count what the host does for a block and a micro-batch.

    Args:
        session: A session that has run.

    Returns:
        Operations that the host starts in a forward of a block, and in its backward with what is
        repeated and with the hooks of data parallelism; and the seconds that they take at the time
        of a launch of the device's profile. None where no block is recognized.
    """
    recorder = session.recorder
    runs = sum(recorder.block_runs.values())
    if not runs:
        return None
    forward, backward = (recorder.block_operations[name] / runs for name in PASSES)
    seconds = session.profile.efficiency.host_seconds
    return {"forward": forward, "backward": backward, "seconds": (forward + backward) * seconds}


def estimate_compiled_saving(session: RankSession) -> int:
    """Estimate what compiled blocks would save: blocks run eagerly in a dry run.

    Args:
        session: A session that has run.

    Returns:
        Bytes of the peak that blocks hold less compiled than eager.
    """
    config = session.config
    layout = session.layout
    if config.train.compile != "block":
        return 0
    system = MemoryProfile(measured="allocated", capability=session.profile.compute_capability)
    stage = session.request.rank // layout.ranks_per_stage
    eager = config.model_copy(update={"train": config.train.model_copy(update={"compile": "none"})})
    before, after = (
        estimate_peak_memory(one, layout, system=system, pipeline_rank=stage).peak_bytes
        for one in (eager, config)
    )
    return max(0, before - after)


def list_kernels(
    config: RunConfig, profile: DeviceProfile, layers: frozenset[int]
) -> list[dict[str, Any]]:
    """List the attention kernels of a rank by the decision table.

    Args:
        config: The config of the run.
        profile: The device.
        layers: Layers that the rank has.

    Returns:
        One entry for each group of layers, with the kernel and the reason.
    """
    whole = config.model.family == "encoder_decoder"  # it has no pipeline
    groups = list_attention_groups(config, AttentionDevice("cuda", profile.compute_capability))
    counts = [len(group.layers if whole else layers.intersection(group.layers)) for group in groups]
    return [
        {
            "stack": group.stack,
            "attention": group.attention,
            "layers": count,
            **asdict(group.choice),
        }
        for group, count in zip(groups, counts, strict=True)
        if count
    ]


def build_attention_flops(session: RankSession) -> dict[str, float] | None:
    """Compare what attention needs with what its kernels compute.

    Args:
        session: A session that has run.

    Returns:
        FLOPs of a step: what documents and mask need, and what kernels compute. None where a
        kernel is made of plain operations, which are not counted apart from other products.
    """
    config = session.config
    layout = session.layout
    kernels = [
        group["kernel"] for group in list_kernels(config, session.profile, session.stage.layers)
    ]
    computed = sum(_sum_phases(session.recorder.attention_flops, session).values())
    if "eager" in kernels or not computed:
        return None
    policy = config.train.activation_checkpoint
    # Under these policies backward runs the forward of attention once more.
    repeats = policy == "full" or (policy == "selective" and set(kernels) == {"flex"})
    sequences, micro_batches = compute_micro_batch(config, layout)
    forward = _count_needed_forward(session, sequences) / (layout.tensor * layout.context)
    traits = list_attention_groups(
        config, AttentionDevice("cuda", session.profile.compute_capability)
    )[0].traits
    widths = (traits.qk_width, traits.v_width)
    backward = forward * count_backward_channels(*widths) / count_forward_channels(*widths)
    needed = micro_batches * (forward * (1 + repeats) + backward)
    return {"needed": needed, "computed": computed, "ratio": computed / needed}


def _count_needed_forward(session: RankSession, sequences: int) -> float:
    """Count the operations of attention that the documents of a micro-batch need, in the layers of
    this rank's stages.
    """
    config = session.config
    documents = session.request.documents
    source, length = config.sequence_lengths
    if session.layout.pipeline == 1:
        return count_flops(
            config.model, source, sequences, target_length=length, documents=documents
        ).attention
    by_layer = list_attention_flops(config.model, source, sequences, documents)
    stage = session.stage
    own = sum(by_layer[layer] for layer in stage.layers)
    return own + (sum(by_layer[config.model.num_hidden_layers :]) if stage.last else 0)


def build_memory_result(tracker: MemoryTracker, block_share: float) -> dict[str, Any]:
    """Build the memory part of a result.

    A backward is two phases: the second begins where no more activations are left than
    `block_share`.

    Args:
        tracker: The log of storages.
        block_share: Bytes of activations of a block.

    Returns:
        The peak, its composition, the timeline and the peak of each phase.
    """
    peak, event = tracker.find_peak()
    composition = tracker.compute_composition(event)
    phases = [_build_phase(tracker, *phase) for phase in _iter_phases(tracker, block_share)]
    return {
        "peak_bytes": peak,
        "peak_phase": tracker.get_phase(event),
        "peak_event": event,
        "num_events": tracker.num_events,
        "categories": dict(_sum_categories(composition).most_common()),
        "owners": _list_owners(composition, MAX_OWNERS),
        "phases": phases,
        "timeline": [
            {"event": at, "bytes": sizes} for at, sizes in tracker.build_timeline(TIMELINE_POINTS)
        ],
    }


def _iter_phases(tracker: MemoryTracker, block_share: float) -> Iterator[tuple[str, int, int]]:
    """Yield name, first event and end of each phase."""
    ends = [start for start, _ in tracker.marks[1:]] + [tracker.num_events]
    for (start, name), end in zip(tracker.marks, ends, strict=True):
        if not name.endswith(": backward"):
            if end > start:
                yield name, start, end
            continue
        first_block = tracker.find_share(start, end, SAVED, 1.25 * block_share)
        if first_block > start:
            yield f"{name} to the second block", start, first_block
        if end > first_block:
            yield f"{name} of the first block", first_block, end


def _build_phase(tracker: MemoryTracker, name: str, start: int, end: int) -> dict[str, Any]:
    peak, event = tracker.find_peak(start, end)
    composition = tracker.compute_composition(event)
    categories = dict(_sum_categories(composition).most_common())
    return {
        "name": name,
        "event": start,
        "peak_bytes": peak,
        "categories": categories,
        "owners": _list_owners(composition, MAX_PHASE_OWNERS),
    }


def _list_owners(composition: Counter[Allocation], count: int) -> list[dict[str, Any]]:
    """Return the largest kinds of storages with their bytes."""
    return [one._asdict() | {"bytes": size} for one, size in composition.most_common(count)]


def _sum_categories(composition: Counter[Allocation]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for allocation, size in composition.items():
        sums[allocation.category] += size
    return sums


def _sum_phases(counts: Counter[tuple[str, str]], session: RankSession) -> Counter[str]:
    sums: Counter[str] = Counter()
    for (phase, name), count in counts.items():
        sums[name] += count * session.count_repeats(phase)
    return sums
