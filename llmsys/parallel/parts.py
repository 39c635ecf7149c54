"""Who holds which positions and which heads, where several ranks work on the same sequences.

Those are the ranks of the tensor and context axes. In training each of them carries T / (tensor · context) positions
of the residual stream: norms, routers, experts and the loss see every token once, on one rank. In evaluation each rank
carries all positions, so that any length and a cache of keys will do and logits are whole; matrices stay split.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from llmsys.config.moe import AuxiliaryLossBalance, BiasBalance, MoeConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.errors import LayoutError
from llmsys.model.context import ContextBuilder, StackContext
from llmsys.model.embedding import TokenEmbedding
from llmsys.model.stack import Stack
from llmsys.model.transformer import Transformer
from llmsys.parallel.exchange import Group, exchange, gather, scatter_sum, sum_over
from llmsys.parallel.mesh import Meshes

# B rows, T positions, L = T / (tensor · context) of them, W width of what is exchanged


class Axis:
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


class Parts:
    """This rank's place on the axes, and what travels along them at the edges of attention and feed-forward.

    Position part = context rank · tensor + tensor rank, so ranks of one context rank hold neighbouring parts. Head part
    = tensor rank · context + context rank: the tensor axis splits the maps, and the context axis what they give.
    """

    def __init__(self, model: Transformer, meshes: Meshes) -> None:
        self._model = model
        self.tensor, self.context, self.all = Axis(meshes.tensor), Axis(meshes.context), Axis(meshes.parts)

    @property
    def divided(self) -> bool:
        """Whether positions are divided now: in training, where more than one rank holds the same sequences."""
        return self._model.training and self.all.size > 1

    @property
    def first(self) -> bool:
        """Whether this rank speaks for those that hold the same sequences, in sums over all ranks."""
        return self.all.rank == 0

    def here(self, x_BT: Tensor) -> Tensor:
        """The positions of this rank, (B, L, …) of (B, T, …)."""
        if not self.divided:
            return x_BT
        length = x_BT.shape[1]
        if length % self.all.size:
            raise LayoutError(
                f"A sequence of {length} positions cannot be divided over context={self.context.size} × "
                f"tensor={self.tensor.size} ranks. Use batch.sequence_length={length - length % self.all.size}, "
                f"or another layout."
            )
        return x_BT.chunk(self.all.size, dim=1)[self.all.rank].contiguous()

    def targets_here(self, targets_BT: Tensor, batch: Batch) -> Tensor:
        """Those of this rank's positions; targets k places further, (B, T - k), are those of the first positions."""
        missing = batch.tokens_BT.shape[1] - targets_BT.shape[1] if self.divided else 0
        return self.here(F.pad(targets_BT, (0, missing), value=IGNORED) if missing else targets_BT)

    def heads(self, total: int) -> slice:
        """Which of `total` query heads this rank attends with."""
        parts, part = self.tensor.size, self.tensor.rank
        if self.divided:
            parts, part = parts * self.context.size, part * self.context.size + self.context.rank
        return slice(total // parts * part, total // parts * (part + 1))

    @property
    def heads_group(self) -> Group | None:
        """The ranks that attend with other heads of the same positions; None where there are none."""
        axis = self.all if self.divided else self.tensor
        return axis.group if axis.size > 1 else None

    def into_columns(self, x: Tensor, dim: int) -> Tensor:
        """Before a map whose outputs the tensor axis splits: the positions of all its ranks."""
        return gather(x, self.tensor.group, dim) if self.divided and self.tensor.size > 1 else x

    def out_of_rows(self, y: Tensor, dim: int) -> Tensor:
        """Behind a map whose inputs the tensor axis splits: the sum of what its ranks found, for own positions."""
        if self.tensor.size == 1:
            return y
        return scatter_sum(y, self.tensor.group, dim) if self.divided else sum_over(y, self.tensor.group)

    def to_heads(self, x_BTW: Tensor) -> Tensor:
        """Fewer heads (side by side in W) of the positions of all context ranks."""
        return exchange(x_BTW, self.context.group, 2, 1) if self.divided and self.context.size > 1 else x_BTW

    def to_positions(self, x_BTW: Tensor) -> Tensor:
        """The other way round."""
        return exchange(x_BTW, self.context.group, 1, 2) if self.divided and self.context.size > 1 else x_BTW

    def all_positions(self, x_BLW: Tensor) -> Tensor:
        """The positions of all ranks that hold the same sequences."""
        return gather(x_BLW, self.all.group, 1) if self.divided else x_BLW


def put_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """Compute `forward` where `module` is called; its parameters, names and hooks stay."""
    module.forward = forward


def divide_positions(model: Transformer, parts: Parts) -> None:
    """Let embeddings give this rank's positions, and masks, rotations and biases be those of what attention sees."""
    for module in model.modules():
        if isinstance(module, TokenEmbedding):
            put_forward(module, _EmbedHere(module.forward, parts))
        if isinstance(module, Stack):
            module.shared = _WholeContext(module.shared, parts)  # type: ignore[assignment]
    for layer in model.moe_layers():
        if _judges_sequences(layer.config):
            layer.whole_rows = _WholeRows(parts)


def _judges_sequences(config: MoeConfig) -> bool:
    balance = config.balance
    if isinstance(balance, BiasBalance):
        return balance.sequence_weight > 0
    return isinstance(balance, AuxiliaryLossBalance) and balance.scope == "sequence"


class _EmbedHere:
    def __init__(self, embed: Callable[[Tensor], Tensor], parts: Parts) -> None:
        self.embed, self.parts = embed, parts

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        return self.embed(self.parts.here(tokens_BT))


class _WholeRows:
    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __call__(self, counts_BE: Tensor) -> Tensor:
        return sum_over(counts_BE, self.parts.all.group) if self.parts.divided else counts_BE


class _WholeContext:
    """Stands for a ContextBuilder: attention sees whole sequences, all else this rank's positions."""

    def __init__(self, builder: ContextBuilder, parts: Parts) -> None:
        self.builder, self.parts = builder, parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def __call__(self, length: int, like: Tensor, **rest: Any) -> StackContext:
        parts = self.parts
        self.builder.heads = parts.heads(self.builder.config.num_attention_heads)
        if not parts.divided:
            return self.builder(length, like, **rest)
        context = self.builder(length * parts.all.size, like, **rest)
        real_BT = None if context.real_BT is None else parts.here(context.real_BT)
        return replace(context, positions_BT=parts.here(context.positions_BT), real_BT=real_BT)
