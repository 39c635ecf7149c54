"""The instants of a training step on one rank, in their order, each with all that is in memory
then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from llmsys.config.engine import TorchEngineConfig
from llmsys.config.model import ModelConfig
from llmsys.config.module_tensors import ActivationShape, ParameterTensor
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation_memory import (
    IN_EVALUATION,
    BlockGroup,
    Policy,
    build_activation_shape,
    compute_mask_bytes,
    compute_micro_batch,
    iter_block_groups,
    list_branch_activations,
    list_evaluation_block_items,
    list_evaluation_logits,
    list_loss_items,
    list_loss_remainders,
)
from llmsys.estimate.memory_timeline import (
    MemoryItem,
    MemorySnapshot,
    compute_saved_bytes,
    compute_temporary_bytes,
    reduce_item_bytes,
)
from llmsys.estimate.rank_parameters import (
    GatheredWeights,
    PipelineStage,
    count_branch_elements,
    count_gathered_weights,
)
from llmsys.estimate.software_profile import MemoryProfile
from llmsys.estimate.state_memory import (
    FP32,
    REDUCED,
    GatherMoment,
    StateBytes,
    compute_message_bytes,
    compute_state_bytes,
    compute_unsummed_bytes,
    compute_update_bytes,
    is_plain,
    is_state_offloaded,
    list_gathered_weights,
    list_gradients_in_flight,
    list_state_items,
)

# Allocated over asked for, with one micro-batch at a time, and with those of a pipeline.
# Calibrated, see README.md.
ALLOCATOR_SLACK, PIPELINE_SLACK = 0.04, 0.12
SAVED = "activations saved by blocks"


class _StageWeights:
    """Counts of the weights of a stage on one rank, which depend neither on the micro-batch nor on
    what is recomputed: a plan asks for the same ones again.
    """

    def __init__(
        self,
        model: ModelConfig,
        layout: ParallelLayout,
        system: MemoryProfile,
        stage: PipelineStage,
    ) -> None:
        self._model, self._layout = model, layout
        self.rows = list(stage.iter_parameters(model))
        self.gathered = count_gathered_weights(model, layout, self.rows, system)
        self._branches: dict[tuple[tuple[str, int], tuple[int, int]], int] = {}

    def count_branch(self, place: tuple[str, int], part: tuple[int, int]) -> int:
        """Return the elements of the branches of a block whose backward is not over."""
        key = place, part
        if key not in self._branches:
            self._branches[key] = count_branch_elements(
                self.rows, place, part, self._layout, self._model
            )
        return self._branches[key]


@lru_cache(maxsize=64)
def _count_stage_weights(
    model: ModelConfig, layout: ParallelLayout, system: MemoryProfile, stage: PipelineStage
) -> _StageWeights:
    return _StageWeights(model, layout, system, stage)


@dataclass(frozen=True)
class StepMemory:
    """One rank of a stage. Every property is in bytes, or items of bytes."""

    config: RunConfig
    layout: ParallelLayout
    system: MemoryProfile
    stage: PipelineStage

    def iter_snapshots(self) -> Iterator[MemorySnapshot]:
        """From the start of a step to the writing of a checkpoint, and an evaluation."""
        last, first, blocks = self._block_groups[-1], self._block_groups[0], self._num_stage_blocks
        early, kept, waiting = (
            self._early_items,
            self._list_saved_items(self.stage.held_layers),
            self._waiting_items,
        )
        yield self._build_snapshot("between steps", [])
        if self._gathers_blocks:
            yield self._build_snapshot(
                "at the start of forward", [*early, *self._list_weights("start")]
            )
            saved = reduce_item_bytes(kept, SAVED, self._compute_saved_bytes(last))
            yield self._build_snapshot(
                "before the last block", [*early, *saved, *self._list_weights("next block")]
            )
        weights = self._list_weights("forward")
        yield self._build_snapshot(
            "at the end of forward", [*early, *kept, *weights, self._temporary_item]
        )
        loss = [*self._list_weights("loss"), *self._loss_items]
        if self._uses_reserved_memory:  # what the last block left, in pieces too small for logits
            loss.append(self._temporary_item)
        yield self._build_snapshot("in the loss", [*early, *kept, *loss])
        # By then the last block's tensors are free.
        backward = self._list_backward_items(last, follows=blocks > 2)
        backward = reduce_item_bytes(backward, REDUCED, self._compute_saved_bytes(last))
        weights = self._list_weights("backward" if blocks > 1 else "first block", last)
        yield self._build_snapshot(
            "in the backward of the last block", [*early, *kept, *weights, *backward]
        )
        one = self._compute_saved_bytes(first)
        if self._gathers_blocks and blocks > 2:
            # The last one that gathers a block ahead, while gradients of the third are reduced.
            backward = [*self._list_backward_items(first, follows=True), *self._late_items]
            items = [
                MemoryItem("activations saved by two blocks", 2 * one),
                *self._list_weights("second block", first),
            ]
            yield self._build_snapshot(
                "in the backward of the second block", [*waiting, *items, *backward]
            )
        backward = [*self._list_backward_items(first, follows=blocks > 1), *self._late_items]
        items = [
            MemoryItem("activations saved by a block", one),
            *self._list_weights("first block", first),
        ]
        yield self._build_snapshot(
            "in the backward of the first block", [*waiting, *items, *backward]
        )
        weights, whole = self._list_weights("reduction"), self._gathered_weights
        root = list_gradients_in_flight(self.config, whole, whole.root, whole.root_buffer)
        if self._unsummed_item.bytes and self._num_micro_batches > 1:
            root = [self._unsummed_item]
        yield self._build_snapshot(
            "at the end of backward", [*waiting, self._gradient_item, *weights, *root]
        )
        sent = compute_message_bytes(self.config, self.layout, whole.matrices)
        if sent:
            message = MemoryItem("messages of gradients", sent)
            yield self._build_snapshot(
                "while gradients are reduced", [self._gradient_item, message]
            )
        yield self._build_snapshot(
            "in the optimizer step", [self._reduced_gradient_item, self._update_item]
        )
        yield self._build_snapshot("while a checkpoint is written", [])
        if self.system.evaluation == "logits":
            yield self._build_snapshot(IN_EVALUATION, self._list_evaluation_items())

    def _list_evaluation_items(self) -> list[MemoryItem]:
        """Return the items of the fuller one of blocks and logits; blocks are freed before the
        loss.
        """
        shape = self._activation_shape
        choices = [
            [
                *self._list_weights("forward", casts_kept=False),
                *list_evaluation_block_items(self.config, shape),
            ]
        ]
        if self.stage.last:
            choices.append(
                [
                    *self._list_weights("loss", casts_kept=False),
                    *list_evaluation_logits(self.config, shape),
                ]
            )
        if self._gathers_blocks:
            moments: tuple[GatherMoment, ...] = ("start", "next block")
            choices += [self._list_weights(moment, casts_kept=False) for moment in moments]
        return max(choices, key=lambda items: sum(item.bytes for item in items))

    def _build_snapshot(self, name: str, items: list[MemoryItem]) -> MemorySnapshot:
        items = [item for item in [*self._state_items, *items] if item.bytes]
        if self._uses_reserved_memory:
            share = ALLOCATOR_SLACK if self.system.pipeline == 1 else PIPELINE_SLACK
            items.append(
                MemoryItem(
                    "allocator fragmentation", int(share * sum(item.bytes for item in items))
                )
            )
        return MemorySnapshot(name, tuple(items))

    @cached_property
    def _weights(self) -> _StageWeights:
        return _count_stage_weights(self.config.model, self.layout, self.system, self.stage)

    @property
    def _parameter_tensors(self) -> list[ParameterTensor]:
        return self._weights.rows

    @cached_property
    def _state_bytes(self) -> StateBytes:
        return compute_state_bytes(self.config, self.layout, self._parameter_tensors, self.system)

    @property
    def _gathered_weights(self) -> GatheredWeights:
        return self._weights.gathered

    @cached_property
    def _activation_shape(self) -> ActivationShape:
        return build_activation_shape(self.config, self.layout, self.system)

    @property
    def _num_stage_blocks(self) -> int:
        """Blocks that run one after the other: all of the rank, or those of one of its stages."""
        chunks = self.layout.pipeline_schedule.num_chunks if self.layout.pipeline > 1 else 1
        return -(-sum(map(self._count_blocks, self._block_groups)) // chunks)

    @property
    def _stream_bytes(self) -> int:
        return self._activation_shape.compute_residual_bytes(self.config.model.hidden_size)

    @cached_property
    def _block_groups(self) -> list[BlockGroup]:
        """Kinds of blocks of this stage, in the order of the forward pass."""
        return [
            kind
            for kind in iter_block_groups(self.config, self._activation_shape)
            if self._count_blocks(kind)
        ]

    def _count_blocks(self, kind: BlockGroup, layers: frozenset[int] | None = None) -> int:
        return self.stage.count_blocks(
            kind.prefix, kind.layers, self.stage.layers if layers is None else layers
        )

    @cached_property
    def _state_items(self) -> list[MemoryItem]:
        """Allocations that live for the whole run."""
        sent = self.stage.message_buffers * self._num_micro_batches * self._stream_bytes
        messages = MemoryItem("messages between stages", sent)
        return [*list_state_items(self.config, self._state_bytes, self._gathered_weights), messages]

    @cached_property
    def _gradient_item(self) -> MemoryItem:
        """Gradients once they are summed over the ranks."""
        if is_state_offloaded(self.config):
            return MemoryItem("gradients", 0)
        ours = getattr(self.config.engine, "gradient_accumulation", "sharded")
        if "whole" in (ours, self.system.gradients) and self._num_micro_batches > 1:
            return MemoryItem("unsharded float32 gradients", FP32 * self._gathered_weights.matrices)
        return MemoryItem("gradients", self._state_bytes.gradients)

    @cached_property
    def _unsummed_item(self) -> MemoryItem:
        """Gradients of a micro-batch that are added to the sums after its backward."""
        size = compute_unsummed_bytes(self.config, self._gathered_weights.matrices)
        return MemoryItem("gradients in the compute dtype", size)

    @property
    def _reduced_gradient_item(self) -> MemoryItem:
        """Gradients that the optimizer reads: those of this rank's masters."""
        one = self._gradient_item
        if not is_plain(self.config):
            return one
        return MemoryItem(one.name, min(one.bytes, self._state_bytes.masters))

    @property
    def _late_items(self) -> list[MemoryItem]:
        """Gradients near the end of backward: those of the first block and outside of blocks are to
        come.
        """
        whole = self._gathered_weights
        left = (whole.root + whole.block.full) / max(1, whole.matrices)
        one, waiting = self._gradient_item, self._unsummed_item
        several = self._num_micro_batches > 1
        if waiting.bytes:
            late = MemoryItem(waiting.name, int(waiting.bytes * max(0.0, 1 - left)))
            # The first micro-batch has no sums to be added to.
            return [one, late] if several else [late]
        return [one if several else MemoryItem(one.name, int(one.bytes * max(0.0, 1 - left)))]

    @cached_property
    def _update_item(self) -> MemoryItem:
        """Tensors that the optimizer allocates for its step."""
        size = compute_update_bytes(
            self.config, self.layout, self._state_bytes, self._parameter_tensors
        )
        return MemoryItem("updates of matrices", size)

    @cached_property
    def _num_micro_batches(self) -> int:
        return compute_micro_batch(self.config, self.layout)[1]

    @cached_property
    def _early_items(self) -> list[MemoryItem]:
        """Gradients of earlier micro-batches, or the places where gradients will be.

        Where gradient shards of the step before are smaller than activations, those do not fit into
        their places.
        """
        shard = (
            FP32
            * self._gathered_weights.block.full
            // max(1, self.layout.shard * self.layout.context)
        )
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
        is_fsdp = isinstance(engine, TorchEngineConfig) and engine.is_fsdp
        return is_fsdp and self.system.weights == "sharded"

    def _list_weights(
        self,
        moment: GatherMoment,
        kind: BlockGroup | None = None,
        *,
        casts_kept: bool | None = None,
    ) -> list[MemoryItem]:
        kept = (
            self.config.train.activation_checkpoint in ("none", "offload")
            if casts_kept is None
            else casts_kept
        )
        return list_gathered_weights(
            self.config, self._select_weights(kind), self.system, moment, casts_kept=kept
        )

    def _select_weights(self, kind: BlockGroup | None) -> GatheredWeights:
        """Return the weights where a block of a kind is in use. An allocator keeps the places of
        the largest one.
        """
        whole = self._gathered_weights
        if kind is None or self._uses_reserved_memory:
            return whole
        return whole.select_block(kind.prefix, self._select_layer(kind))

    def _select_layer(self, kind: BlockGroup) -> int:
        """Return a layer of a kind that this stage has."""
        is_numbered = kind.prefix == "blocks."
        return min(self.stage.layers.intersection(kind.layers)) if is_numbered else kind.layers[0]

    def _compute_saved_bytes(self, kind: BlockGroup) -> int:
        return compute_saved_bytes(kind.saved_tensors, *self._policy)

    @property
    def _policy(self) -> Policy:
        return (
            self.config.train.activation_checkpoint,
            self.config.train.compile == "block",
            self.system,
        )

    @cached_property
    def _waiting_items(self) -> list[MemoryItem]:
        """Activations of the micro-batches in flight in our pipeline while another one is in its
        backward pass.
        """
        return (
            self._list_saved_items(((self.stage.layers, self.stage.waiting),))
            if self.layout.pipeline > 1
            else []
        )

    def _list_saved_items(self, parts: Sequence[tuple[frozenset[int], float]]) -> list[MemoryItem]:
        several = self.system.pipeline > 1
        held = [
            (layers, min(count, self._num_micro_batches) if several else 1.0)
            for layers, count in parts
        ]
        sizes = [(kind, self._compute_saved_bytes(kind)) for kind in self._block_groups]
        total = sum(
            count * self._count_blocks(kind, own) * size
            for own, count in held
            for kind, size in sizes
        )
        if (
            self.system.activations == "host"
            or self.config.train.activation_checkpoint == "offload"
        ):
            # two blocks' activations are on their way to or from the host at a time
            total = min(total, 2 * max(size for _, size in sizes))
        sent = (
            sum(count for _, count in held) if several and self.system.boundaries == "kept" else 0
        )
        return [
            MemoryItem(SAVED, int(total)),
            MemoryItem(
                "attention mask", compute_mask_bytes(self.config.model, self._activation_shape)
            ),
            MemoryItem("stage output", int(sent * self._stream_bytes)),
        ]

    @cached_property
    def _temporary_item(self) -> MemoryItem:
        """Tensors that a branch makes and does not save, at its end."""
        sizes = (
            compute_temporary_bytes(one, *self._policy)
            for kind in self._block_groups
            for one in kind.branches
        )
        return MemoryItem("temporaries of a block", max(sizes))

    @cached_property
    def _loss_items(self) -> list[MemoryItem]:
        if not self.stage.last:
            return []
        return list_loss_items(
            self.config, self._activation_shape, self.system, self._gathered_weights.head
        )

    def _list_backward_items(self, kind: BlockGroup, *, follows: bool) -> list[MemoryItem]:
        """Return the fullest moment of a block's backward: before its last branch, or after one of
        them.

        What was computed again is freed branch by branch, while gradients of weights appear. A
        block that `follows` begins while the gradients of the one before are reduced.
        """
        moments = product((False, True), range(len(kind.branches)))
        choices = [
            self._list_branch_items(kind, number, follows, is_over) for is_over, number in moments
        ]
        return max(choices, key=lambda items: sum(item.bytes for item in items))

    def _list_branch_items(
        self, kind: BlockGroup, number: int, follows: bool, is_over: bool
    ) -> list[MemoryItem]:
        """Return what is in memory before or after the backward of a branch of a block."""
        # Weights of branches that are over have gradients. An allocator keeps the places of a whole
        # block's.
        over, count = (
            0 if self._uses_reserved_memory else number + (not is_over),
            len(kind.branches),
        )
        place = (kind.prefix, self._select_layer(kind))
        weights = self._weights.count_branch(place, (over, count))
        held = list_branch_activations(
            self.config.model,
            self._activation_shape,
            self._policy,
            kind.branches,
            number,
            is_over=is_over,
        )
        block = self._select_weights(kind).block
        begins = number == count - 1 and not is_over
        reduced = (
            block.travelling if self._uses_reserved_memory else block.count_reduced(follows, begins)
        )
        gradients = list_gradients_in_flight(self.config, self._gathered_weights, weights, reduced)
        return [*held, *gradients, *self._loss_remainders]

    @cached_property
    def _loss_remainders(self) -> list[MemoryItem]:
        if not self.stage.last:
            return []
        return list_loss_remainders(
            self.config, self._activation_shape, self._gathered_weights.head
        )
