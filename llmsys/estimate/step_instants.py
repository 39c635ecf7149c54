"""The instants of a training step on one rank, in their order, each with all that is in memory then."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from llmsys.config.layout import Layout
from llmsys.config.run import RunConfig
from llmsys.estimate.activation import BlockKind, block_kinds, extent_of, micro_batch
from llmsys.estimate.evaluation_memory import IN_EVALUATION, evaluation_items
from llmsys.estimate.instants import Instant, Item
from llmsys.estimate.kept import Extent, Tensor, kept_bytes
from llmsys.estimate.loss_memory import loss_items, loss_leftovers
from llmsys.estimate.memory import FP32, StateBytes, state_bytes
from llmsys.estimate.rows import TensorRow
from llmsys.estimate.stages import Stage
from llmsys.estimate.system import System
from llmsys.estimate.weights import WholeWeights, buckets, gradients_in_flight, weights_in_use, whole_weights

# Of what tensors hold, the room beside it that nothing asked for fits into: with one micro-batch at a time, and where
# those of a pipeline come and go in another order. Calibrated, see README.md.
ALLOCATOR_SLACK, PIPELINE_SLACK = 0.04, 0.12
REDUCED = "float32 gradients to be summed over ranks"


def _less(items: list[Item], name: str, free: int) -> list[Item]:
    """The items, with one of them in a place that was `free` before."""
    return [Item(one.name, max(0, one.bytes - free)) if one.name == name else one for one in items]


@dataclass(frozen=True)
class StepInstants:
    """One rank of a stage. Every property is in bytes, or items of bytes."""

    config: RunConfig
    layout: Layout
    system: System
    stage: Stage

    def all(self) -> Iterator[Instant]:
        """From the start of a step to the writing of a checkpoint, and an evaluation."""
        last, first = self._kinds[-1], self._kinds[0]
        yield self._instant("between steps", [])
        yield self._instant("at the end of the forward", [*self._early, *self._kept_by_all, self._forward_work])
        yield self._instant("in the loss", [*self._early, *self._kept_by_all, *self._loss, *self._forward_rest])
        backward = _less(self._backward(last), REDUCED, self._kept(last))  # by then the last block's tensors are free
        yield self._instant("in the backward of the last block", [*self._early, *self._kept_by_all, *backward])
        kept = Item("activations kept by a block", self._kept(first))
        yield self._instant("in the backward of the first block", [*self._late, kept, *self._backward(first)])
        yield self._instant("at the end of the backward", [*self._late, *self._in_flight(self._whole.root)])
        yield self._instant("in the optimizer step", [self._gradients, self._orthogonal])
        yield self._instant("while a checkpoint is written", [])
        if self.system.evaluation == "logits":
            used = weights_in_use(self.config, self._whole, self.system, casts_kept=False)
            yield self._instant(IN_EVALUATION, [*used, *evaluation_items(self.config, self._extent)])

    def _instant(self, name: str, items: list[Item]) -> Instant:
        items = [item for item in [*self._state, *items] if item.bytes]
        if self._reserves:
            share = ALLOCATOR_SLACK if self.system.pipeline == 1 else PIPELINE_SLACK
            items.append(Item("room the allocator cannot use", int(share * sum(item.bytes for item in items))))
        return Instant(name, tuple(items))

    @cached_property
    def _rows(self) -> list[TensorRow]:
        return list(self.stage.rows(self.config.model))

    @cached_property
    def _sizes(self) -> StateBytes:
        return state_bytes(self.config, self.layout, self._rows)

    @cached_property
    def _whole(self) -> WholeWeights:
        return whole_weights(self.config, self.layout, self._rows, self.system)

    @cached_property
    def _extent(self) -> Extent:
        return extent_of(self.config, self.layout, self.system)

    @cached_property
    def _kinds(self) -> list[BlockKind]:
        """Kinds of blocks of this stage, in the order of the forward pass."""
        return [kind for kind in block_kinds(self.config, self._extent) if self._count(kind)]

    def _count(self, kind: BlockKind) -> int:
        if kind.place == "blocks.":
            return len(self.stage.layers.intersection(kind.layers))
        return len(kind.layers) if (self.stage.first if kind.place.startswith("encoder") else self.stage.last) else 0

    @property
    def _offload(self) -> str:
        return getattr(self.config.engine, "offload", "none")

    @cached_property
    def _state(self) -> list[Item]:
        """What is there for the whole run."""
        sizes = self._sizes
        items = [Item("weights", sizes.weights)]
        if self._offload == "none":
            items += [Item("masters", sizes.masters), Item("moments", sizes.moments)]
        if self.config.train.average_half_life_tokens:
            items.append(Item("mean of the weights", sizes.masters))
        return [*items, buckets(self.config, self._whole)]

    @cached_property
    def _gradients(self) -> Item:
        """Gradients once they are summed over the ranks."""
        if self._offload != "none":
            return Item("gradients", 0)
        ours = getattr(self.config.engine, "gradients", "sharded")
        if "whole" in (ours, self.system.gradients) and self._micro_batches > 1:
            return Item("whole gradients in float32", FP32 * self._whole.matrices)
        return Item("gradients", self._sizes.gradients)

    @cached_property
    def _orthogonal(self) -> Item:
        """Muon's updates, and a whole matrix with its products on the way to being orthogonal."""
        if self.config.optimizer.kind != "muon" or self._offload != "none":
            return Item("updates of matrices", 0)
        matrix = max(row.each // (row.shape[0] if row.routed else 1) for row in self._rows)
        return Item("updates of matrices", self._sizes.masters + 4 * FP32 * matrix)

    @cached_property
    def _micro_batches(self) -> int:
        return micro_batch(self.config, self.layout)[1]

    @cached_property
    def _early(self) -> list[Item]:
        """Weights in use, and gradients of earlier micro-batches, or the places where gradients will be.

        Gradient shards of the step before lay between activations; where they are smaller than those, activations do
        not fit into their places.
        """
        shard = FP32 * self._whole.block // max(1, self.layout.shard * self.layout.context)
        small = shard < self._extent.stream(self.config.model.hidden_size)
        if self._micro_batches > 1 or (self._reserves and small):
            return [*self._in_use, self._gradients]
        return self._in_use

    @property
    def _reserves(self) -> bool:
        """Whether an allocator's view is asked for, which never gives back what it once held."""
        return self.system.device == "cuda" and self.system.measured == "reserved"

    @cached_property
    def _late(self) -> list[Item]:
        return [*self._in_use, self._gradients]

    @cached_property
    def _in_use(self) -> list[Item]:
        kept = self.config.train.recompute == "none"
        return weights_in_use(self.config, self._whole, self.system, casts_kept=kept)

    def _in_flight(self, elements: int) -> list[Item]:
        return gradients_in_flight(self.config, self._whole, elements)

    def _kept(self, kind: BlockKind) -> int:
        train = self.config.train
        return kept_bytes(kind.tensors, train.recompute, train.compile == "block", self.system)

    @cached_property
    def _kept_by_all(self) -> list[Item]:
        several = self.system.pipeline > 1
        micro_batches = min(self.stage.in_flight, self._micro_batches) if several else 1.0
        total = micro_batches * sum(self._count(kind) * self._kept(kind) for kind in self._kinds)
        if self.system.activations == "host":
            total = min(total, 2 * max(self._kept(kind) for kind in self._kinds))
        table = self._extent.sequences * self._extent.length**2 if self._extent.table == "documents" else 0
        given = micro_batches * self._extent.stream(self.config.model.hidden_size) if several else 0
        return [
            Item("activations kept by blocks", int(total)),
            Item("table of what is visible", table),
            Item("what the stage gives", int(given)),
        ]

    @cached_property
    def _forward_work(self) -> Item:
        """What a branch makes and does not keep, at its end."""
        return Item(
            "temporaries of a block", max(self._unkept(branch) for kind in self._kinds for branch in kind.branches)
        )

    def _unkept(self, branch: list[Tensor]) -> int:
        train, compiled = self.config.train, self.config.train.compile == "block"
        made = sum(one.bytes for one in branch if not (compiled and one.maker == "fused"))
        return max(0, made - kept_bytes(branch, train.recompute, compiled, self.system))

    @cached_property
    def _loss(self) -> list[Item]:
        return loss_items(self.config, self._extent, self._whole.head) if self.stage.last else []

    @cached_property
    def _forward_rest(self) -> list[Item]:
        """The allocator holds what the last block left, in pieces too small for logits."""
        if self._reserves:
            return [self._forward_work]
        return []

    def _backward(self, kind: BlockKind) -> list[Item]:
        """The backward of a block: what it computes again, gradients of its tensors, and gradients of its weights."""
        compiled = self.config.train.compile == "block"
        again = kept_bytes(kind.tensors, "none", compiled, self.system) - self._kept(kind)
        largest = max(one.bytes for one in kind.tensors)
        stream = self._extent.gathered(self.config.model.hidden_size)
        leftovers = loss_leftovers(self.config, self._extent, self._whole.head) if self.stage.last else []
        return [
            Item("a block computed again", max(0, again)),
            Item("gradients inside a block", 2 * largest + 2 * stream),
            *self._in_flight(self._whole.block),
            *leftovers,
        ]
