"""The peak of a rank's memory: what it holds at each named instant of a training step, and the fullest of them.

Reads a run's config and a resolved layout; gives a MemoryLedger. `MemoryProfile` says whose program and kernels are meant; by
default ours on a GPU, as its allocator reports it (max_memory_reserved).
"""

from dataclasses import dataclass, replace

from llmsys.config.layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation import iter_block_groups, build_activation_shape
from llmsys.estimate.instants import MemoryTimeline, SuggestedFix
from llmsys.estimate.kept import select_saved_tensors
from llmsys.estimate.loss_memory import sum_logits_bytes, list_loss_items
from llmsys.estimate.remedies import iter_config_changes
from llmsys.estimate.stages import list_pipeline_stages
from llmsys.estimate.step_instants import StepMemory
from llmsys.estimate.system import OURS, MemoryProfile
from llmsys.estimate.tensors import list_model_tensors
from llmsys.estimate.weights import list_gathered_weights, count_gathered_weights

OUTSIDE_BYTES = 1 << 30  # driver and kernels about half a GiB, NCCL's buffers the rest; no allocator counts them


def estimate_peak_memory(
    config: RunConfig, layout: ParallelLayout, *, pipeline: int | None = None, system: MemoryProfile = OURS
) -> MemoryTimeline:
    """Memory of the fullest rank of a resolved layout.

    `pipeline` overrides the stages of `system`; our own trainer has one. With more, the first and the last stage are
    compared, and the fuller one is told.
    """
    system = system if pipeline is None else replace(system, pipeline=pipeline)
    outside = OUTSIDE_BYTES if system.device == "cuda" else 0
    instants = [tuple(StepMemory(config, layout, system, stage).iter_snapshots()) for stage in list_pipeline_stages(config.model, system)]
    ledgers = [MemoryTimeline(one, outside, lambda: _list_suggested_fixes(config, layout, system)) for one in instants]
    return max(ledgers, key=lambda ledger: ledger.peak_bytes)


@dataclass(frozen=True)
class ActivationBytes:
    """Parts of the peak that one forward pass brings, on one rank: an estimate, on a GPU where nothing else is said.

    `blocks` is what blocks keep for the backward, without attention's T × T `probabilities` where those are kept;
    `logits` what is as large as rows of logits at its fullest, `gathered` the whole weights in use.
    """

    blocks: int
    probabilities: int
    logits: int
    gathered: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.blocks + self.probabilities + self.logits + self.gathered


def estimate_activation_bytes(config: RunConfig, layout: ParallelLayout, system: MemoryProfile = OURS) -> ActivationBytes:
    """Estimate for one micro-batch of the configured precision and recompute policy."""
    extent = build_activation_shape(config, layout, system)
    whole = count_gathered_weights(config, layout, list_model_tensors(config.model), system)
    train = config.train
    blocks = scores = 0
    for kind in iter_block_groups(config, extent):
        for tensor in select_saved_tensors(kind.saved_tensors, train.recompute, train.compile == "block", system):
            square = tensor.name.startswith(("probabilities", "scores"))
            blocks += 0 if square else len(kind.layers) * tensor.bytes
            scores += len(kind.layers) * tensor.bytes if square else 0
    in_use = list_gathered_weights(config, whole, system, casts_kept=train.recompute == "none")
    logits = sum_logits_bytes(list_loss_items(config, extent, whole.head))
    return ActivationBytes(blocks, scores, logits, sum(item.bytes for item in in_use))


def _list_suggested_fixes(config: RunConfig, layout: ParallelLayout, system: MemoryProfile) -> tuple[SuggestedFix, ...]:
    """What each change saves."""
    now = estimate_peak_memory(config, layout, system=system).peak_bytes
    return tuple(
        SuggestedFix(text, now - estimate_peak_memory(changed, ranks, system=program).peak_bytes)
        for text, changed, ranks, program in iter_config_changes(config, layout, system)
    )
