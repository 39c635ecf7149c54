"""The peak of a rank's memory: what it holds at each named instant of a training step, and the fullest of them.

Reads a run's config and a resolved layout; gives a MemoryLedger. `System` says whose program and kernels are meant; by
default ours on a GPU, as its allocator reports it (max_memory_reserved).
"""

from dataclasses import dataclass, replace

from llmsys.config.layout import Layout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation import block_kinds, extent_of
from llmsys.estimate.instants import MemoryLedger, Remedy
from llmsys.estimate.kept import kept
from llmsys.estimate.loss_memory import logits_bytes, loss_items
from llmsys.estimate.remedies import changes
from llmsys.estimate.stages import stages_of
from llmsys.estimate.step_instants import StepInstants
from llmsys.estimate.system import OURS, System
from llmsys.estimate.tensors import model_tensors
from llmsys.estimate.weights import weights_in_use, whole_weights

OUTSIDE_BYTES = 1 << 30  # driver and kernels about half a GiB, NCCL's buffers the rest; no allocator counts them


def peak_memory(
    config: RunConfig, layout: Layout, *, pipeline: int | None = None, system: System = OURS
) -> MemoryLedger:
    """Memory of the fullest rank of a resolved layout.

    `pipeline` overrides the stages of `system`; our own trainer has one. With more, the first and the last stage are
    compared, and the fuller one is told.
    """
    system = system if pipeline is None else replace(system, pipeline=pipeline)
    outside = OUTSIDE_BYTES if system.device == "cuda" else 0
    instants = [tuple(StepInstants(config, layout, system, stage).all()) for stage in stages_of(config.model, system)]
    ledgers = [MemoryLedger(one, outside, lambda: _remedies(config, layout, system)) for one in instants]
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


def activation_bytes(config: RunConfig, layout: Layout, system: System = OURS) -> ActivationBytes:
    """Estimate for one micro-batch of the configured precision and recompute policy."""
    extent = extent_of(config, layout, system)
    whole = whole_weights(config, layout, model_tensors(config.model), system)
    train = config.train
    blocks = scores = 0
    for kind in block_kinds(config, extent):
        for tensor in kept(kind.tensors, train.recompute, train.compile == "block", system):
            square = tensor.name.startswith(("probabilities", "scores"))
            blocks += 0 if square else len(kind.layers) * tensor.bytes
            scores += len(kind.layers) * tensor.bytes if square else 0
    in_use = weights_in_use(config, whole, system, casts_kept=train.recompute == "none")
    logits = logits_bytes(loss_items(config, extent, whole.head))
    return ActivationBytes(blocks, scores, logits, sum(item.bytes for item in in_use))


def _remedies(config: RunConfig, layout: Layout, system: System) -> tuple[Remedy, ...]:
    """What each change saves."""
    now = peak_memory(config, layout, system=system).peak_bytes
    return tuple(
        Remedy(text, now - peak_memory(changed, ranks, system=program).peak_bytes)
        for text, changed, ranks, program in changes(config, layout, system)
    )
