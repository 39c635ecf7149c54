"""The instants of a training step on one rank, in their order, each with all that is in memory then."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from llmsys.config.module_tensors import ActivationShape, ParameterTensor, SavedTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import (
    IN_EVALUATION,
    BlockGroup,
    build_activation_shape,
    compute_micro_batch,
    iter_block_groups,
    list_evaluation_items,
    list_loss_items,
    list_loss_remainders,
)
from llmsys.estimate.memory_timeline import MemoryItem, MemorySnapshot
from llmsys.estimate.pipeline_stages import PipelineStage
from llmsys.estimate.saved_tensors import compute_saved_bytes
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import (
    FP32,
    GatheredWeights,
    StateBytes,
    compute_gradient_buckets,
    compute_state_bytes,
    count_gathered_weights,
    list_gathered_weights,
    list_gradients_in_flight,
)

# Of what tensors hold, the room beside it that nothing asked for fits into: with one micro-batch at a time, and where
# those of a pipeline come and go in another order. Calibrated, see README.md.
ALLOCATOR_SLACK, PIPELINE_SLACK = 0.04, 0.12
REDUCED = "float32 gradients before reduction"


def _reduce_item_bytes(items: list[MemoryItem], name: str, free: int) -> list[MemoryItem]:
    """The items, with one of them in a place that was `free` before."""
    return [MemoryItem(one.name, max(0, one.bytes - free)) if one.name == name else one for one in items]


@dataclass(frozen=True)
class StepMemory:
    """One rank of a stage. Every property is in bytes, or items of bytes."""

    config: RunConfig
    layout: ParallelLayout
    system: MemoryProfile
    stage: PipelineStage

    def iter_snapshots(self) -> Iterator[MemorySnapshot]:
        """From the start of a step to the writing of a checkpoint, and an evaluation."""
        last, first = self._block_groups[-1], self._block_groups[0]
        yield self._build_snapshot("between steps", [])
        yield self._build_snapshot(
            "at the end of forward", [*self._early_items, *self._saved_items, self._temporary_item]
        )
        yield self._build_snapshot(
            "in the loss", [*self._early_items, *self._saved_items, *self._loss_items, *self._forward_remainder_items]
        )
        backward = _reduce_item_bytes(
            self._list_backward_items(last), REDUCED, self._compute_saved_bytes(last)
        )  # by then the last block's tensors are free
        yield self._build_snapshot(
            "in the backward of the last block", [*self._early_items, *self._saved_items, *backward]
        )
        kept = MemoryItem("activations saved by a block", self._compute_saved_bytes(first))
        yield self._build_snapshot(
            "in the backward of the first block", [*self._late_items, kept, *self._list_backward_items(first)]
        )
        yield self._build_snapshot(
            "at the end of backward",
            [*self._late_items, *self._list_gradients_in_flight(self._gathered_weights.root)],
        )
        yield self._build_snapshot("in the optimizer step", [self._gradient_item, self._update_item])
        yield self._build_snapshot("while a checkpoint is written", [])
        if self.system.evaluation == "logits":
            used = list_gathered_weights(self.config, self._gathered_weights, self.system, casts_kept=False)
            yield self._build_snapshot(
                IN_EVALUATION, [*used, *list_evaluation_items(self.config, self._activation_shape)]
            )

    def _build_snapshot(self, name: str, items: list[MemoryItem]) -> MemorySnapshot:
        items = [item for item in [*self._state_items, *items] if item.bytes]
        if self._uses_reserved_memory:
            share = ALLOCATOR_SLACK if self.system.pipeline == 1 else PIPELINE_SLACK
            items.append(MemoryItem("allocator fragmentation", int(share * sum(item.bytes for item in items))))
        return MemorySnapshot(name, tuple(items))

    @cached_property
    def _parameter_tensors(self) -> list[ParameterTensor]:
        return list(self.stage.iter_parameters(self.config.model))

    @cached_property
    def _state_bytes(self) -> StateBytes:
        return compute_state_bytes(self.config, self.layout, self._parameter_tensors)

    @cached_property
    def _gathered_weights(self) -> GatheredWeights:
        return count_gathered_weights(self.config, self.layout, self._parameter_tensors, self.system)

    @cached_property
    def _activation_shape(self) -> ActivationShape:
        return build_activation_shape(self.config, self.layout, self.system)

    @cached_property
    def _block_groups(self) -> list[BlockGroup]:
        """Kinds of blocks of this stage, in the order of the forward pass."""
        return [kind for kind in iter_block_groups(self.config, self._activation_shape) if self._count_blocks(kind)]

    def _count_blocks(self, kind: BlockGroup) -> int:
        if kind.prefix == "blocks.":
            return len(self.stage.layers.intersection(kind.layers))
        return len(kind.layers) if (self.stage.first if kind.prefix.startswith("encoder") else self.stage.last) else 0

    @property
    def _offload_mode(self) -> str:
        return getattr(self.config.engine, "cpu_offload", "none")

    @cached_property
    def _state_items(self) -> list[MemoryItem]:
        """Allocations that live for the whole run."""
        sizes = self._state_bytes
        items = [MemoryItem("weights", sizes.weights)]
        if self._offload_mode == "none":
            items += [MemoryItem("masters", sizes.masters), MemoryItem("moments", sizes.moments)]
        if self.config.train.ema_half_life_tokens:
            items.append(MemoryItem("EMA of the weights", sizes.masters))
        return [*items, compute_gradient_buckets(self.config, self._gathered_weights)]

    @cached_property
    def _gradient_item(self) -> MemoryItem:
        """Gradients once they are summed over the ranks."""
        if self._offload_mode != "none":
            return MemoryItem("gradients", 0)
        ours = getattr(self.config.engine, "gradient_accumulation", "sharded")
        if "whole" in (ours, self.system.gradients) and self._num_micro_batches > 1:
            return MemoryItem("unsharded float32 gradients", FP32 * self._gathered_weights.matrices)
        return MemoryItem("gradients", self._state_bytes.gradients)

    @cached_property
    def _update_item(self) -> MemoryItem:
        """Tensors that the optimizer allocates for its step."""
        if self._offload_mode != "none":  # the step runs in host memory
            return MemoryItem("updates of matrices", 0)
        matrix = max(row.elements_per_copy // (row.shape[0] if row.is_routed else 1) for row in self._parameter_tensors)
        elements = self.config.optimizer.count_update_elements(self._state_bytes.masters // FP32, matrix)
        return MemoryItem("updates of matrices", FP32 * elements)

    @cached_property
    def _num_micro_batches(self) -> int:
        return compute_micro_batch(self.config, self.layout)[1]

    @cached_property
    def _early_items(self) -> list[MemoryItem]:
        """Weights in use, and gradients of earlier micro-batches, or the places where gradients will be.

        Gradient shards of the step before lay between activations; where they are smaller than those, activations do
        not fit into their places.
        """
        shard = FP32 * self._gathered_weights.block // max(1, self.layout.shard * self.layout.context)
        small = shard < self._activation_shape.compute_residual_bytes(self.config.model.hidden_size)
        if self._num_micro_batches > 1 or (self._uses_reserved_memory and small):
            return [*self._weight_items, self._gradient_item]
        return self._weight_items

    @property
    def _uses_reserved_memory(self) -> bool:
        """True for the allocator's view: it never returns memory that it once reserved."""
        return self.system.device == "cuda" and self.system.measured == "reserved"

    @cached_property
    def _late_items(self) -> list[MemoryItem]:
        return [*self._weight_items, self._gradient_item]

    @cached_property
    def _weight_items(self) -> list[MemoryItem]:
        kept = self.config.train.activation_checkpoint in ("none", "offload")
        return list_gathered_weights(self.config, self._gathered_weights, self.system, casts_kept=kept)

    def _list_gradients_in_flight(self, elements: int) -> list[MemoryItem]:
        return list_gradients_in_flight(self.config, self._gathered_weights, elements)

    def _compute_saved_bytes(self, kind: BlockGroup) -> int:
        train = self.config.train
        return compute_saved_bytes(
            kind.saved_tensors, train.activation_checkpoint, train.compile == "block", self.system
        )

    @cached_property
    def _saved_items(self) -> list[MemoryItem]:
        several = self.system.pipeline > 1
        micro_batches = min(self.stage.in_flight, self._num_micro_batches) if several else 1.0
        total = micro_batches * sum(
            self._count_blocks(kind) * self._compute_saved_bytes(kind) for kind in self._block_groups
        )
        if self.system.activations == "host" or self.config.train.activation_checkpoint == "offload":
            # two blocks' activations are on their way to or from the host at a time
            total = min(total, 2 * max(self._compute_saved_bytes(kind) for kind in self._block_groups))
        table = (
            self._activation_shape.sequences * self._activation_shape.length**2
            if self._activation_shape.mask_table == "documents"
            else 0
        )
        given = (
            micro_batches * self._activation_shape.compute_residual_bytes(self.config.model.hidden_size)
            if several
            else 0
        )
        return [
            MemoryItem("activations saved by blocks", int(total)),
            MemoryItem("attention mask", table),
            MemoryItem("stage output", int(given)),
        ]

    @cached_property
    def _temporary_item(self) -> MemoryItem:
        """Tensors that a branch makes and does not save, at its end."""
        return MemoryItem(
            "temporaries of a block",
            max(self._compute_temporary_bytes(branch) for kind in self._block_groups for branch in kind.branches),
        )

    def _compute_temporary_bytes(self, branch: list[SavedTensor]) -> int:
        train, compiled = self.config.train, self.config.train.compile == "block"
        made = sum(one.bytes for one in branch if not (compiled and one.producer == "fused"))
        return max(0, made - compute_saved_bytes(branch, train.activation_checkpoint, compiled, self.system))

    @cached_property
    def _loss_items(self) -> list[MemoryItem]:
        return (
            list_loss_items(self.config, self._activation_shape, self.system, self._gathered_weights.head)
            if self.stage.last
            else []
        )

    @cached_property
    def _forward_remainder_items(self) -> list[MemoryItem]:
        """The allocator holds what the last block left, in pieces too small for logits."""
        if self._uses_reserved_memory:
            return [self._temporary_item]
        return []

    def _list_backward_items(self, kind: BlockGroup) -> list[MemoryItem]:
        """The backward of a block: what it computes again, gradients of its tensors, and gradients of its weights."""
        compiled = self.config.train.compile == "block"
        again = compute_saved_bytes(kind.saved_tensors, "none", compiled, self.system) - self._compute_saved_bytes(kind)
        largest = max(one.bytes for one in kind.saved_tensors)
        stream = self._activation_shape.compute_gathered_bytes(self.config.model.hidden_size)
        leftovers = (
            list_loss_remainders(self.config, self._activation_shape, self._gathered_weights.head)
            if self.stage.last
            else []
        )
        return [
            MemoryItem("recomputed block", max(0, again)),
            MemoryItem("gradients inside a block", 2 * largest + 2 * stream),
            *self._list_gradients_in_flight(self._gathered_weights.block),
            *leftovers,
        ]
