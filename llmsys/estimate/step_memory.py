"""The instants of a training step on one rank, in their order, each with all that is in memory then."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from llmsys.config.engine import TorchEngineConfig
from llmsys.config.module_tensors import ActivationShape, ParameterTensor, SavedTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import (
    IN_EVALUATION,
    BlockGroup,
    build_activation_shape,
    compute_mask_bytes,
    compute_micro_batch,
    iter_block_groups,
    list_evaluation_block_items,
    list_evaluation_logits,
    list_loss_items,
    list_loss_remainders,
)
from llmsys.estimate.memory_timeline import MemoryItem, MemorySnapshot, compute_saved_bytes, reduce_item_bytes
from llmsys.estimate.rank_parameters import PipelineStage, count_branch_elements
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import (
    FP32,
    GatheredWeights,
    GatherMoment,
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
REDUCED, SAVED = "float32 gradients before reduction", "activations saved by blocks"


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
        early, kept, waiting = self._early_items, self._list_saved_items(), self._waiting_items
        yield self._build_snapshot("between steps", [])
        if self._gathers_blocks:
            yield self._build_snapshot("at the start of forward", [*early, *self._list_weights("start")])
            saved = reduce_item_bytes(kept, SAVED, self._compute_saved_bytes(last))
            yield self._build_snapshot("before the last block", [*early, *saved, *self._list_weights("next block")])
        yield self._build_snapshot(
            "at the end of forward", [*early, *kept, *self._list_weights("forward"), self._temporary_item]
        )
        loss = [*self._list_weights("loss"), *self._loss_items]
        if self._uses_reserved_memory:  # what the last block left, in pieces too small for logits
            loss.append(self._temporary_item)
        yield self._build_snapshot("in the loss", [*early, *kept, *loss])
        # By then the last block's tensors are free.
        backward = reduce_item_bytes(self._list_backward_items(last), REDUCED, self._compute_saved_bytes(last))
        yield self._build_snapshot(
            "in the backward of the last block", [*early, *kept, *self._list_weights("backward"), *backward]
        )
        one, backward = self._compute_saved_bytes(first), [*self._list_backward_items(first), self._late_item]
        if self._gathers_blocks and sum(map(self._count_blocks, self._block_groups)) > 2:
            # The last one that gathers a block ahead, while gradients of the third are reduced.
            items = [MemoryItem("activations saved by two blocks", 2 * one), *self._list_weights("backward")]
            yield self._build_snapshot("in the backward of the second block", [*waiting, *items, *backward])
        items = [MemoryItem("activations saved by a block", one), *self._list_weights("first block")]
        yield self._build_snapshot("in the backward of the first block", [*waiting, *items, *backward])
        whole = self._gathered_weights
        root = list_gradients_in_flight(self.config, whole, whole.root, whole.root_buffer)
        yield self._build_snapshot(
            "at the end of backward", [*waiting, self._gradient_item, *self._list_weights("reduction"), *root]
        )
        yield self._build_snapshot("in the optimizer step", [self._gradient_item, self._update_item])
        yield self._build_snapshot("while a checkpoint is written", [])
        if self.system.evaluation == "logits":
            yield self._build_snapshot(IN_EVALUATION, self._list_evaluation_items())

    def _list_evaluation_items(self) -> list[MemoryItem]:
        """Return the items of the fuller one of blocks and logits; blocks are freed before the loss."""
        shape = self._activation_shape
        choices = [[*self._list_weights("forward", casts_kept=False), *list_evaluation_block_items(self.config, shape)]]
        if self.stage.last:
            choices.append([*self._list_weights("loss", casts_kept=False), *list_evaluation_logits(self.config, shape)])
        if self._gathers_blocks:
            moments: tuple[GatherMoment, ...] = ("start", "next block")
            choices += [self._list_weights(moment, casts_kept=False) for moment in moments]
        return max(choices, key=lambda items: sum(item.bytes for item in items))

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

    @property
    def _stream_bytes(self) -> int:
        return self._activation_shape.compute_residual_bytes(self.config.model.hidden_size)

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
        sent = self.stage.message_buffers * self._num_micro_batches * self._stream_bytes
        items.append(MemoryItem("messages between stages", sent))
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

    @property
    def _late_item(self) -> MemoryItem:
        """Summed gradients near the end of backward: those of the first block and outside of blocks are to come."""
        one, whole = self._gradient_item, self._gathered_weights
        left = 0 if self._num_micro_batches > 1 else (whole.root + whole.block) / max(1, whole.matrices)
        return MemoryItem(one.name, int(one.bytes * max(0.0, 1 - left)))

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
        """Gradients of earlier micro-batches, or the places where gradients will be.

        Where gradient shards of the step before are smaller than activations, those do not fit into their places.
        """
        shard = FP32 * self._gathered_weights.block // max(1, self.layout.shard * self.layout.context)
        small = shard < self._activation_shape.compute_residual_bytes(self.config.model.hidden_size)
        is_kept = self._num_micro_batches > 1 or (self._uses_reserved_memory and small)
        return [self._gradient_item] if is_kept else []

    @property
    def _uses_reserved_memory(self) -> bool:
        """True for the allocator's view: it never returns memory that it once reserved."""
        return self.system.device == "cuda" and self.system.measured == "reserved"

    @property
    def _gathers_blocks(self) -> bool:
        """True where FSDP2 gathers block after block."""
        engine = self.config.engine
        is_fsdp = isinstance(engine, TorchEngineConfig) and engine.data_parallel == "fsdp"
        return is_fsdp and self.system.weights == "sharded"

    def _list_weights(self, moment: GatherMoment, *, casts_kept: bool | None = None) -> list[MemoryItem]:
        kept = self.config.train.activation_checkpoint in ("none", "offload") if casts_kept is None else casts_kept
        return list_gathered_weights(self.config, self._gathered_weights, self.system, moment, casts_kept=kept)

    def _compute_saved_bytes(self, kind: BlockGroup) -> int:
        train = self.config.train
        return compute_saved_bytes(
            kind.saved_tensors, train.activation_checkpoint, train.compile == "block", self.system
        )

    @cached_property
    def _waiting_items(self) -> list[MemoryItem]:
        """Activations of the micro-batches in flight in our pipeline while another one is in its backward pass."""
        return self._list_saved_items(1 / self.layout.pipeline_schedule.num_chunks) if self.layout.pipeline > 1 else []

    def _list_saved_items(self, finished: float = 0.0) -> list[MemoryItem]:
        several = self.system.pipeline > 1
        micro_batches = (min(self.stage.in_flight, self._num_micro_batches) if several else 1.0) - finished
        total = micro_batches * sum(
            self._count_blocks(kind) * self._compute_saved_bytes(kind) for kind in self._block_groups
        )
        if self.system.activations == "host" or self.config.train.activation_checkpoint == "offload":
            # two blocks' activations are on their way to or from the host at a time
            total = min(total, 2 * max(self._compute_saved_bytes(kind) for kind in self._block_groups))
        return [
            MemoryItem(SAVED, int(total)),
            MemoryItem("attention mask", compute_mask_bytes(self.config.model, self._activation_shape)),
            MemoryItem("stage output", int(micro_batches * self._stream_bytes) if several else 0),
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

    def _list_backward_items(self, kind: BlockGroup) -> list[MemoryItem]:
        """Return the fullest moment of a block's backward: before its last branch, or after one of them.

        What was computed again is freed branch by branch, while gradients of weights appear.
        """
        moments = [self._list_branch_items(kind, number) for number in range(len(kind.branches))]
        moments += [self._list_branch_items(kind, number, is_over=True) for number in range(len(kind.branches))]
        return max(moments, key=lambda items: sum(item.bytes for item in items))

    def _list_branch_items(self, kind: BlockGroup, number: int, *, is_over: bool = False) -> list[MemoryItem]:
        """Return what is in memory before or after the backward of a branch of a block."""
        compiled, whole = self.config.train.compile == "block", self._gathered_weights
        left = [tensor for branch in kind.branches[: number + (not is_over)] for tensor in branch]
        again = compute_saved_bytes(left, "none", compiled, self.system)
        again -= compute_saved_bytes(left, self.config.train.activation_checkpoint, compiled, self.system)
        largest = max(one.bytes for one in kind.branches[number])
        rows = 1 if is_over else 2
        stream = self._activation_shape.compute_gathered_bytes(self.config.model.hidden_size)
        # Weights of branches that are over have gradients. An allocator keeps the places of a whole block's.
        over = 0 if self._uses_reserved_memory else number + (not is_over)
        weights = count_branch_elements(
            self._parameter_tensors,
            (kind.prefix, kind.layers[0]),
            (over, len(kind.branches)),
            self.layout,
            self.config.model,
        )
        return [
            MemoryItem("recomputed block", max(0, again)),
            MemoryItem("gradients inside a block", rows * largest + 2 * stream),
            *list_gradients_in_flight(self.config, whole, weights, whole.block_buffer),
            *self._loss_remainders,
        ]

    @cached_property
    def _loss_remainders(self) -> list[MemoryItem]:
        if not self.stage.last:
            return []
        return list_loss_remainders(self.config, self._activation_shape, self._gathered_weights.head)
