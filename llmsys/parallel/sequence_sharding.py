"""The positions and heads of each rank, where several ranks work on the same sequences (tensor and
context axes).

With a ring the tokens of a row are first put in ring order (ring_context.py), and the shards are
cut from that.

In training each rank carries T / (tensor · context) positions of the residual stream: norms,
routers, experts and the loss see every token once, on one rank. In evaluation each rank carries all
positions, so that any length and a key-value cache are possible and logits are complete; matrices
stay sharded.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, assert_never

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmsys.config.moe import AuxiliaryLossConfig, BiasBalancingConfig, MoeConfig, NoBalancingConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.errors import LayoutError
from llmsys.model.embedding import TokenEmbedding
from llmsys.model.forward_context import ContextBuilder, ForwardContext
from llmsys.model.layer_stack import LayerStack
from llmsys.model.transformer import Transformer
from llmsys.parallel.collectives import Group, all_gather, all_reduce, all_to_all, reduce_scatter
from llmsys.parallel.device_mesh import DeviceMeshes

# B rows, T positions, L = T / (tensor · context) of them, W width of what is exchanged


class MeshAxis:
    """One axis of ranks; without a mesh, this rank alone."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.size = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self._group = None if mesh is None else mesh.get_group()

    @property
    def group(self) -> Group:
        """Process group of the axis; requires more than one rank."""
        assert self._group is not None
        return self._group


class SequenceSharding:
    """This rank's index on the axes, and the exchanges at the boundaries of attention and
    feed-forward.

    Position shard = context rank · tensor + tensor rank, so ranks of one context rank hold
    neighbouring shards. Head shard = tensor rank · ulysses + ulysses rank: the tensor axis splits
    the projections, the ulysses axis their outputs. Ranks of a ring have the same heads; a member
    of the ring is the ulysses · tensor ranks of one ring rank.
    """

    def __init__(self, model: Transformer, meshes: DeviceMeshes) -> None:
        self._model = model
        self.tensor = MeshAxis(meshes.tensor)
        self.context = MeshAxis(meshes.context)
        self.ring = MeshAxis(meshes.ring)
        self.ulysses = MeshAxis(meshes.ulysses)
        self.member = MeshAxis(meshes.member)
        self.sequence = MeshAxis(meshes.sequence)
        self._ring_order_PT: Tensor | None = None

    @property
    def is_sharded(self) -> bool:
        """True while positions are sharded: in training, where more than one rank holds the same
        sequences.
        """
        return self._model.training and self.sequence.size > 1

    @property
    def is_first_rank(self) -> bool:
        """True on the rank that counts for those with the same sequences, in sums over all
        ranks.
        """
        return self.sequence.rank == 0

    def shard_positions(self, x_BT: Tensor) -> Tensor:
        """Return the positions of this rank.

        Args:
            x_BT: A tensor of all positions, (B, T, …), equal on the ranks that share the sequences.

        Returns:
            (B, T / ranks, …) in training, in the order of a ring where there is one; else `x_BT`.

        Raises:
            LayoutError: T is no multiple of the ranks.
        """
        if not self.is_sharded:
            return x_BT
        length = x_BT.shape[1]
        if length % self.sequence.size:
            raise LayoutError(
                f"A sequence of {length} positions cannot be divided over "
                f"context={self.context.size} × tensor={self.tensor.size} ranks. Use "
                f"batch.sequence_length={length - length % self.sequence.size}, or another layout."
            )
        if self._ring_order_PT is None:
            return x_BT.chunk(self.sequence.size, dim=1)[self.sequence.rank].contiguous()
        own_PL = self._ring_order_PT.chunk(self.sequence.size, dim=1)[self.sequence.rank]
        if len(own_PL) == 1:
            return x_BT.index_select(1, own_PL[0])
        return x_BT.gather(1, own_PL)

    def set_ring_order(self, order_PT: Tensor) -> None:
        """Set the order of the tokens of the forward pass that begins, see `compute_ring_order`."""
        self._ring_order_PT = order_PT

    def get_ring_positions(self) -> Tensor:
        """Return the positions of each rank of the ring, (P, N, L)."""
        assert self._ring_order_PT is not None
        positions_PNL: Tensor = self._ring_order_PT.unflatten(1, (self.ring.size, -1))
        return positions_PNL

    def shard_targets(self, targets_BT: Tensor, batch: Batch) -> Tensor:
        """Return the targets of this rank's positions.

        Args:
            targets_BT: Targets of all positions. Those k positions ahead, (B, T - k), belong to the
                first T - k positions; the others get none.
            batch: The batch of these targets, for its number of positions.

        Returns:
            The targets in the order of `shard_positions`.
        """
        missing = batch.tokens_BT.shape[1] - targets_BT.shape[1] if self.is_sharded else 0
        return self.shard_positions(
            F.pad(targets_BT, (0, missing), value=IGNORED) if missing else targets_BT
        )

    def get_head_slice(self, total: int) -> slice:
        """Return the query heads that this rank attends with.

        Args:
            total: Query heads of the layer, a multiple of the ranks that share them.

        Returns:
            A slice of them. With Ulysses there are fewer in training than in evaluation, where only
            the tensor axis divides the heads.
        """
        ranks = self.tensor.size
        rank = self.tensor.rank
        if self.is_sharded:
            ranks = ranks * self.ulysses.size
            rank = rank * self.ulysses.size + self.ulysses.rank
        return slice(total // ranks * rank, total // ranks * (rank + 1))

    @property
    def heads_group(self) -> Group | None:
        """Ranks that attend with other heads of the same positions; None where there are none."""
        axis = self.member if self.is_sharded else self.tensor
        return axis.group if axis.size > 1 else None

    def enter_column_parallel(self, x: Tensor, dim: int) -> Tensor:
        """Gather the positions of all tensor ranks, before a linear layer whose outputs are
        split.
        """
        return (
            all_gather(x, self.tensor.group, dim) if self.is_sharded and self.tensor.size > 1 else x
        )

    def exit_row_parallel(self, y: Tensor, dim: int) -> Tensor:
        """Sum over tensor ranks, for this rank's positions, after a linear layer whose inputs
        are split.
        """
        if self.tensor.size == 1:
            return y
        return (
            reduce_scatter(y, self.tensor.group, dim)
            if self.is_sharded
            else all_reduce(y, self.tensor.group)
        )

    def all_to_all_heads(self, x_BTW: Tensor) -> Tensor:
        """Exchange positions for heads (adjacent in W) over the ulysses axis: fewer heads of all
        positions.
        """
        return (
            all_to_all(x_BTW, self.ulysses.group, 2, 1)
            if self.is_sharded and self.ulysses.size > 1
            else x_BTW
        )

    def all_to_all_positions(self, x_BTW: Tensor) -> Tensor:
        """Exchange heads for positions over the ulysses axis: all heads of fewer positions."""
        return (
            all_to_all(x_BTW, self.ulysses.group, 1, 2)
            if self.is_sharded and self.ulysses.size > 1
            else x_BTW
        )

    def gather_positions(self, x_BLW: Tensor) -> Tensor:
        """Gather the positions of all ranks of a member of the ring; without a ring, of the same
        sequences.
        """
        return (
            all_gather(x_BLW, self.member.group, 1)
            if self.is_sharded and self.member.size > 1
            else x_BLW
        )


def replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Call a function instead of a module's forward. Parameters, names and hooks stay.

    `module.forward = forward` would do, but torch.compile would compile every layer anew, for
    that object's identity.

    Args:
        module: The module; its class changes.
        forward: Gets the module's input and returns its output.
    """
    # Not `module.forward = forward`: torch.compile would compile every layer anew, for that
    # object's identity.
    kind: Any = type(module)
    module.__class__ = _build_replaced_class(kind)
    module.replaced_forward = forward  # type: ignore[assignment]


@cache
def _build_replaced_class(kind: Any) -> Any:
    """Build a subclass that calls the attribute `replaced_forward`.

    Its name is that of `kind`, so that printed modules do not change.
    """

    def forward(module: Any, x: Tensor) -> Tensor:
        result: Tensor = module.replaced_forward(x)
        return result

    return type(kind.__name__, (kind,), {"forward": forward})


def divide_positions(model: Transformer, sharding: SequenceSharding) -> None:
    """Make embeddings return this rank's positions, while masks, rotations and biases cover what
    attention sees.

    Args:
        model: The model, whose modules are changed.
        sharding: How positions are divided over tensor and context ranks.
    """
    for module in model.modules():
        if isinstance(module, TokenEmbedding):
            replace_forward(module, _ShardedEmbedding(module.forward, sharding))
        if isinstance(module, LayerStack):
            module.shared = _FullContextBuilder(module.shared, sharding)  # type: ignore[assignment]
    for layer in model.list_moe_layers():
        if _uses_sequence_balance(layer.config):
            layer.reduce_row_counts = _SequenceCountReducer(sharding)


def _uses_sequence_balance(config: MoeConfig) -> bool:
    match config.balance:
        case BiasBalancingConfig(sequence_weight=weight):
            return weight > 0
        case AuxiliaryLossConfig(scope=scope):
            return scope == "sequence"
        case NoBalancingConfig():
            return False
        case unreachable:
            assert_never(unreachable)


class _ShardedEmbedding:
    def __init__(self, embed: Callable[[Tensor], Tensor], sharding: SequenceSharding) -> None:
        self.embed = embed
        self.sharding = sharding

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        return self.embed(self.sharding.shard_positions(tokens_BT))


class _SequenceCountReducer:
    def __init__(self, sharding: SequenceSharding) -> None:
        self.sharding = sharding

    def __call__(self, counts_BE: Tensor) -> Tensor:
        return (
            all_reduce(counts_BE, self.sharding.sequence.group)
            if self.sharding.is_sharded
            else counts_BE
        )


class _FullContextBuilder:
    """A ContextBuilder for sharded positions: attention sees full sequences, all else this
    rank's positions.
    """

    def __init__(self, builder: ContextBuilder, sharding: SequenceSharding) -> None:
        self.builder = builder
        self.sharding = sharding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def __call__(self, length: int, like: Tensor, **rest: Any) -> ForwardContext:
        sharding = self.sharding
        # Set in each pass: evaluation attends with other heads than training.
        self.builder.heads = sharding.get_head_slice(self.builder.config.num_attention_heads)
        if not sharding.is_sharded:
            return self.builder(length, like, **rest)
        # `length` counts the positions of this rank.
        context = self.builder(length * sharding.sequence.size, like, **rest)
        real_BT = None if context.real_BT is None else sharding.shard_positions(context.real_BT)
        return replace(
            context, positions_BT=sharding.shard_positions(context.positions_BT), real_BT=real_BT
        )
