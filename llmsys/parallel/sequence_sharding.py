"""Who holds which positions and which heads, where several ranks work on the same sequences.

Those are the ranks of the tensor and context axes. In training each of them carries T / (tensor · context) positions
of the residual stream: norms, routers, experts and the loss see every token once, on one rank. In evaluation each rank
carries all positions, so that any length and a cache of keys will do and logits are whole; matrices stay split.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, assert_never

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmsys.config.moe import AuxiliaryLossConfig, BiasBalancingConfig, MoeConfig, NoBalancingConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.errors import LayoutError
from llmsys.model.forward_context import ContextBuilder, ForwardContext
from llmsys.model.layer_stack import LayerStack
from llmsys.model.token_embedding import TokenEmbedding
from llmsys.model.transformer import Transformer
from llmsys.parallel.collectives import Group, all_gather, all_reduce, all_to_all, reduce_scatter
from llmsys.parallel.device_mesh import DeviceMeshes

# B rows, T positions, L = T / (tensor · context) of them, W width of what is exchanged


class MeshAxis:
    """One axis of ranks; without a mesh it is this rank alone."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.size = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self._group = None if mesh is None else mesh.get_group()

    @property
    def group(self) -> Group:
        """For collectives; ask only where there is more than one rank."""
        assert self._group is not None
        return self._group


class SequenceSharding:
    """This rank's place on the axes, and what travels along them at the edges of attention and feed-forward.

    Position part = context rank · tensor + tensor rank, so ranks of one context rank hold neighbouring parts. Head part
    = tensor rank · context + context rank: the tensor axis splits the maps, and the context axis what they give.
    """

    def __init__(self, model: Transformer, meshes: DeviceMeshes) -> None:
        self._model = model
        self.tensor, self.context, self.sequence = (
            MeshAxis(meshes.tensor),
            MeshAxis(meshes.context),
            MeshAxis(meshes.sequence),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether positions are divided now: in training, where more than one rank holds the same sequences."""
        return self._model.training and self.sequence.size > 1

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank speaks for those that hold the same sequences, in sums over all ranks."""
        return self.sequence.rank == 0

    def shard_positions(self, x_BT: Tensor) -> Tensor:
        """The positions of this rank, (B, L, …) of (B, T, …)."""
        if not self.is_sharded:
            return x_BT
        length = x_BT.shape[1]
        if length % self.sequence.size:
            raise LayoutError(
                f"A sequence of {length} positions cannot be divided over context={self.context.size} × "
                f"tensor={self.tensor.size} ranks. Use batch.sequence_length={length - length % self.sequence.size}, "
                f"or another layout."
            )
        return x_BT.chunk(self.sequence.size, dim=1)[self.sequence.rank].contiguous()

    def shard_targets(self, targets_BT: Tensor, batch: Batch) -> Tensor:
        """Those of this rank's positions; targets k places further, (B, T - k), are those of the first positions."""
        missing = batch.tokens_BT.shape[1] - targets_BT.shape[1] if self.is_sharded else 0
        return self.shard_positions(F.pad(targets_BT, (0, missing), value=IGNORED) if missing else targets_BT)

    def get_head_slice(self, total: int) -> slice:
        """Which of `total` query heads this rank attends with."""
        ranks, rank = self.tensor.size, self.tensor.rank
        if self.is_sharded:
            ranks, rank = ranks * self.context.size, rank * self.context.size + self.context.rank
        return slice(total // ranks * rank, total // ranks * (rank + 1))

    @property
    def heads_group(self) -> Group | None:
        """The ranks that attend with other heads of the same positions; None where there are none."""
        axis = self.sequence if self.is_sharded else self.tensor
        return axis.group if axis.size > 1 else None

    def enter_column_parallel(self, x: Tensor, dim: int) -> Tensor:
        """Before a map whose outputs the tensor axis splits: the positions of all its ranks."""
        return all_gather(x, self.tensor.group, dim) if self.is_sharded and self.tensor.size > 1 else x

    def exit_row_parallel(self, y: Tensor, dim: int) -> Tensor:
        """Behind a map whose inputs the tensor axis splits: the sum of what its ranks found, for own positions."""
        if self.tensor.size == 1:
            return y
        return reduce_scatter(y, self.tensor.group, dim) if self.is_sharded else all_reduce(y, self.tensor.group)

    def all_to_all_heads(self, x_BTW: Tensor) -> Tensor:
        """Fewer heads (side by side in W) of the positions of all context ranks."""
        return all_to_all(x_BTW, self.context.group, 2, 1) if self.is_sharded and self.context.size > 1 else x_BTW

    def all_to_all_positions(self, x_BTW: Tensor) -> Tensor:
        """The other way round."""
        return all_to_all(x_BTW, self.context.group, 1, 2) if self.is_sharded and self.context.size > 1 else x_BTW

    def gather_positions(self, x_BLW: Tensor) -> Tensor:
        """The positions of all ranks that hold the same sequences."""
        return all_gather(x_BLW, self.sequence.group, 1) if self.is_sharded else x_BLW


def replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Compute `forward` where `module` is called; its parameters, names and hooks stay."""
    module.forward = forward


def divide_positions(model: Transformer, sharding: SequenceSharding) -> None:
    """Let embeddings give this rank's positions, and masks, rotations and biases be those of what attention sees."""
    for module in model.modules():
        if isinstance(module, TokenEmbedding):
            replace_forward(module, _ShardedEmbedding(module.forward, sharding))
        if isinstance(module, LayerStack):
            module.shared = _FullContextBuilder(module.shared, sharding)  # type: ignore[assignment]
    for layer in model.list_moe_layers():
        if _uses_sequence_balance(layer.config):
            layer.whole_rows = _SequenceCountReducer(sharding)


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
        self.embed, self.sharding = embed, sharding

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        return self.embed(self.sharding.shard_positions(tokens_BT))


class _SequenceCountReducer:
    def __init__(self, sharding: SequenceSharding) -> None:
        self.sharding = sharding

    def __call__(self, counts_BE: Tensor) -> Tensor:
        return all_reduce(counts_BE, self.sharding.sequence.group) if self.sharding.is_sharded else counts_BE


class _FullContextBuilder:
    """Stands for a ContextBuilder: attention sees whole sequences, all else this rank's positions."""

    def __init__(self, builder: ContextBuilder, sharding: SequenceSharding) -> None:
        self.builder, self.sharding = builder, sharding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def __call__(self, length: int, like: Tensor, **rest: Any) -> ForwardContext:
        sharding = self.sharding
        self.builder.heads = sharding.get_head_slice(self.builder.config.num_attention_heads)
        if not sharding.is_sharded:
            return self.builder(length, like, **rest)
        context = self.builder(length * sharding.sequence.size, like, **rest)
        real_BT = None if context.real_BT is None else sharding.shard_positions(context.real_BT)
        return replace(context, positions_BT=sharding.shard_positions(context.positions_BT), real_BT=real_BT)
