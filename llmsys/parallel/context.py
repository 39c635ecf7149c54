"""Attention on several ranks: each attends to whole sequences with some of the heads.

Behind the maps of queries, keys and values the context axis exchanges heads for positions, before the map of the output
positions for heads (Ulysses, Jacobs 2023, arXiv:2309.14509, 3.1); the tensor axis has its own heads from the start. So
rotations, masks of packed documents, windows, biases, sinks and caps are those of one process, for fewer heads. Latent
attention exchanges queries, and gathers the latents, which are narrower than the keys and values of all heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.model.attention import MultiHeadMaps
from llmsys.model.block import Block
from llmsys.model.latent_attention import LatentAttention
from llmsys.model.norm import RMSNorm
from llmsys.model.spread import local
from llmsys.model.transformer import Transformer
from llmsys.parallel.exchange import sum_over
from llmsys.parallel.parts import Parts, put_forward
from llmsys.parallel.tensor import ByInputs, ByOutputs

# B rows, T positions, W width of some heads side by side, G key-value heads


def divide_attention(model: Transformer, parts: Parts) -> None:
    """Every self-attention: positions in, heads inside, positions out."""
    for block in model.modules():
        attention = block.attention if isinstance(block, Block) else None
        if isinstance(attention, LatentAttention):
            _divide_latent(attention, parts)
        elif isinstance(attention, MultiHeadMaps):
            _divide_heads(attention, parts)
        else:
            continue
        put_forward(attention.o_proj, _FromHeads(attention.o_proj, parts))


def _divide_heads(attention: MultiHeadMaps, parts: Parts) -> None:
    attention.register_forward_pre_hook(lambda _, inputs: (parts.into_columns(inputs[0], 1), *inputs[1:]))
    groups = attention.k_proj.out_features // attention.head_dim
    shared = KeyValueHeads(attention.heads, groups, attention.head_dim, parts)
    put_forward(attention.q_proj, _ToHeads(attention.q_proj, parts))
    for linear in (attention.k_proj, attention.v_proj):
        put_forward(linear, _ToSharedHeads(linear, parts, shared))
    if attention.norms == "full":
        queries = KeyValueHeads(attention.heads, attention.heads, attention.head_dim, parts)
        put_forward(attention.q_norm, _NormOverRanks(attention.q_norm, parts, queries))
        put_forward(attention.k_norm, _NormOverRanks(attention.k_norm, parts, shared))


def _divide_latent(attention: LatentAttention, parts: Parts) -> None:
    queries: nn.Linear = attention.q_b_proj if attention.has_query_latent else attention.q_proj
    queries.register_forward_pre_hook(lambda _, inputs: parts.into_columns(inputs[0], 1))
    put_forward(queries, _ToHeads(queries, parts))
    attention.kv_a_proj.register_forward_hook(lambda _, inputs, latent_BLC: parts.all_positions(latent_BLC))
    put_forward(attention.kv_b_proj, _OwnHeads(attention.kv_b_proj, parts))


@dataclass(frozen=True)
class KeyValueHeads:
    """Which key-value heads serve the query heads of this rank, where `groups` of them serve `heads`."""

    heads: int
    groups: int
    head_dim: int
    parts: Parts

    def own(self) -> slice:
        """Those that this rank attends with; one may serve several ranks."""
        queries = self.parts.heads(self.heads)
        return slice(queries.start * self.groups // self.heads, -(-queries.stop * self.groups // self.heads))

    def channels(self) -> slice:
        """Their channels among those of all."""
        own = self.own()
        return slice(own.start * self.head_dim, own.stop * self.head_dim)

    def of_tensor_rank(self, rows: Tensor) -> Tensor:
        """The part of a weight or bias that this tensor rank uses: all it has, or one head of a whole one."""
        ranks, rank = self.parts.tensor.size, self.parts.tensor.rank
        if self.groups % ranks == 0:
            return rows
        return rows.narrow(0, rank * self.groups // ranks * self.head_dim, self.head_dim)

    def repeated(self, x_BTW: Tensor) -> Tensor:
        """Heads as often as there are context ranks to take one each, where there are fewer of them."""
        heads, ranks = x_BTW.shape[2] // self.head_dim, self.parts.context.size
        if heads % ranks == 0 or not self.parts.divided:
            return x_BTW
        x_BTGK: Tensor = x_BTW.unflatten(2, (heads, -1))
        return x_BTGK.repeat_interleave(ranks // heads, dim=2).flatten(2)


class _ToHeads(ByOutputs):
    """The map of the queries."""

    def __init__(self, linear: nn.Linear, parts: Parts) -> None:
        super().__init__(linear)
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return self.parts.to_heads(super().__call__(x))


class _ToSharedHeads(ByOutputs):
    """The map of keys or values."""

    def __init__(self, linear: nn.Linear, parts: Parts, shared: KeyValueHeads) -> None:
        super().__init__(linear)
        self.parts, self.shared = parts, shared

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.shared.of_tensor_rank(local(self.linear.weight)), self.linear.bias
        y_BTW = F.linear(x, weight, None if bias is None else self.shared.of_tensor_rank(local(bias)))
        return self.parts.to_heads(self.shared.repeated(y_BTW))


class _OwnHeads(ByOutputs):
    """The map from latents of all positions to keys and values of the heads that this rank attends with."""

    def __init__(self, linear: nn.Linear, parts: Parts) -> None:
        super().__init__(linear)
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        weight, context = local(self.linear.weight), self.parts.context
        own: Tensor = weight.chunk(context.size)[context.rank] if self.parts.divided else weight
        return F.linear(x, own)


class _FromHeads(ByInputs):
    """The map of the output."""

    def __init__(self, linear: nn.Linear, parts: Parts) -> None:
        super().__init__(linear, parts, 1)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(self.parts.to_positions(x))


class _NormOverRanks:
    """A norm over all heads at once, of which this rank has some: its means are sums over ranks."""

    def __init__(self, norm: nn.Module, parts: Parts, heads: KeyValueHeads) -> None:
        self.norm, self.parts, self.heads = norm, parts, heads
        self.eps: float = norm.eps  # type: ignore[assignment]

    def __call__(self, x_BTW: Tensor) -> Tensor:
        x, own = x_BTW.float(), self.heads.channels()
        if not isinstance(self.norm, RMSNorm):
            x = x - self._mean(x)
        x = x * torch.rsqrt(self._mean(x.square()) + self.eps)
        weight: Tensor = self.norm.get_parameter("weight")[own].float()
        x = x * (1 + weight if getattr(self.norm, "unit_offset", False) else weight)
        bias = getattr(self.norm, "bias", None)
        return (x if bias is None else x + bias[own].float()).to(x_BTW.dtype)

    def _mean(self, x_BTW: Tensor) -> Tensor:
        """Over the channels of all ranks; where ranks share a head, it is counted by each, and so is the number."""
        group, total = self.parts.heads_group, x_BTW.sum(-1, keepdim=True)
        ranks = 1 if group is None else group.size()
        return (total if group is None else sum_over(total, group)) / (ranks * x_BTW.shape[-1])
