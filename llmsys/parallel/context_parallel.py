"""Context parallel attention: each rank attends with some of the heads to full sequences, or to a
ring of ranks.

After the projections of queries, keys and values the context axis exchanges heads for positions,
before the output projection positions for heads (Ulysses, Jacobs 2023, arXiv:2309.14509, 3.1). The
tensor axis has its own heads from the start. So rotations, masks of packed documents, windows,
biases, sinks and caps are those of one process, for fewer heads. Latent attention exchanges
queries, and gathers the latents, which are narrower than the keys and values.

With `layout.context_kind=ring` nothing is exchanged here: keys and values are passed between ranks
in attention itself (ring_attention.py). With ulysses_ring heads are exchanged inside of each member
of the ring.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmsys.model.latent_attention import MultiHeadLatentAttention
from llmsys.model.linear_mixer import LinearMixer
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.multi_head_attention import AttentionProjections
from llmsys.model.normalization import RMSNorm
from llmsys.model.transformer import Transformer
from llmsys.model.transformer_block import TransformerBlock
from llmsys.parallel.collectives import all_reduce
from llmsys.parallel.fp8 import apply_linear
from llmsys.parallel.sequence_sharding import SequenceSharding, replace_forward
from llmsys.parallel.state_exchange import HeadExchange
from llmsys.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear

# B rows, T positions, W width of some heads side by side, G key-value heads


def divide_attention(model: Transformer, sharding: SequenceSharding) -> None:
    """Shard every self-attention: positions at its input and output, heads inside.

    Args:
        model: The model, whose modules are changed.
        sharding: How positions and heads are divided over tensor and context ranks.
    """
    blocks = [block for block in model.modules() if isinstance(block, TransformerBlock)]
    for attention in [one for block in blocks for one in (block.attention, block.linear_attention)]:
        if isinstance(attention, LinearMixer):
            attention.exchange = HeadExchange(sharding)
            continue
        if isinstance(attention, MultiHeadLatentAttention):
            _divide_latent_attention(attention, sharding)
        elif isinstance(attention, AttentionProjections):
            _divide_heads(attention, sharding)
        else:
            continue
        replace_forward(attention.o_proj, _OutputProjection(attention.o_proj, sharding))


def _divide_heads(attention: AttentionProjections, sharding: SequenceSharding) -> None:
    attention.register_forward_pre_hook(
        lambda _, inputs: (sharding.enter_column_parallel(inputs[0], 1), *inputs[1:])
    )
    # `out_features` is still that of all ranks: the tensor axis has replaced the weight only.
    groups = attention.k_proj.out_features // attention.head_dim
    shared = KeyValueHeadSharding(attention.heads, groups, attention.head_dim, sharding)
    replace_forward(attention.q_proj, _QueryProjection(attention.q_proj, sharding))
    if attention.has_output_gate:
        replace_forward(attention.g_proj, _QueryProjection(attention.g_proj, sharding))
    for linear in (attention.k_proj, attention.v_proj):
        replace_forward(linear, _KeyValueProjection(linear, sharding, shared))
    if attention.norms == "full":  # norms of single heads need no communication
        queries = KeyValueHeadSharding(
            attention.heads, attention.heads, attention.head_dim, sharding
        )
        replace_forward(attention.q_norm, _NormOverRanks(attention.q_norm, sharding, queries))
        replace_forward(attention.k_norm, _NormOverRanks(attention.k_norm, sharding, shared))


def _divide_latent_attention(
    attention: MultiHeadLatentAttention, sharding: SequenceSharding
) -> None:
    queries: nn.Linear = attention.q_b_proj if attention.has_query_latent else attention.q_proj
    queries.register_forward_pre_hook(
        lambda _, inputs: sharding.enter_column_parallel(inputs[0], 1)
    )
    replace_forward(queries, _QueryProjection(queries, sharding))
    attention.kv_a_proj.register_forward_hook(
        lambda _, inputs, latent_BLC: sharding.gather_positions(latent_BLC)
    )
    replace_forward(attention.kv_b_proj, _LatentKeyValueProjection(attention.kv_b_proj, sharding))


@dataclass(frozen=True)
class KeyValueHeadSharding:
    """The key-value heads that serve this rank's query heads, where `groups` of them serve
    `heads`.
    """

    heads: int
    groups: int
    head_dim: int
    sharding: SequenceSharding

    def get_local_slice(self) -> slice:
        """Return the key-value heads that this rank attends with; one may serve several ranks."""
        queries = self.sharding.get_head_slice(self.heads)
        # Rounded outward: the query heads of a rank may begin or end inside a group.
        return slice(
            queries.start * self.groups // self.heads, -(-queries.stop * self.groups // self.heads)
        )

    def get_channel_slice(self) -> slice:
        """Return the channels of these heads among those of all heads."""
        own = self.get_local_slice()
        return slice(own.start * self.head_dim, own.stop * self.head_dim)

    def select_tensor_rank_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of a weight or bias that this tensor rank uses: its shard, or one head
        of an unsplit one.
        """
        ranks = self.sharding.tensor.size
        rank = self.sharding.tensor.rank
        if self.groups % ranks == 0:
            return rows
        return rows.narrow(0, rank * self.groups // ranks * self.head_dim, self.head_dim)

    def repeat_heads(self, x_BTW: Tensor) -> Tensor:
        """Repeat heads so that every ulysses rank gets one, where there are fewer heads than
        ranks.
        """
        heads = x_BTW.shape[2] // self.head_dim
        ranks = self.sharding.ulysses.size
        if heads % ranks == 0 or not self.sharding.is_sharded:
            return x_BTW
        x_BTGK: Tensor = x_BTW.unflatten(2, (heads, -1))
        return x_BTGK.repeat_interleave(ranks // heads, dim=2).flatten(2)


class _QueryProjection(ColumnParallelLinear):
    """Query projection, followed by the exchange of positions for heads."""

    def __init__(self, linear: nn.Linear, sharding: SequenceSharding) -> None:
        super().__init__(linear)
        self.sharding = sharding

    def __call__(self, x: Tensor) -> Tensor:
        return self.sharding.all_to_all_heads(super().__call__(x))


class _KeyValueProjection(ColumnParallelLinear):
    """Key or value projection, followed by the exchange of positions for heads."""

    def __init__(
        self, linear: nn.Linear, sharding: SequenceSharding, shared: KeyValueHeadSharding
    ) -> None:
        super().__init__(linear)
        self.sharding = sharding
        self.shared = shared

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.shared.select_tensor_rank_rows(get_local_tensor(self.linear.weight))
        bias = self.linear.bias
        local_bias = (
            None if bias is None else self.shared.select_tensor_rank_rows(get_local_tensor(bias))
        )
        y_BTW = apply_linear(self.linear, x, weight, local_bias)
        return self.sharding.all_to_all_heads(self.shared.repeat_heads(y_BTW))


class _LatentKeyValueProjection(ColumnParallelLinear):
    """Projection of the latents of all positions to the keys and values of this rank's heads."""

    def __init__(self, linear: nn.Linear, sharding: SequenceSharding) -> None:
        super().__init__(linear)
        self.sharding = sharding

    def __call__(self, x: Tensor) -> Tensor:
        weight = get_local_tensor(self.linear.weight)
        ulysses = self.sharding.ulysses
        # Rows are ordered by head, so a chunk has whole heads.
        own: Tensor = (
            weight.chunk(ulysses.size)[ulysses.rank] if self.sharding.is_sharded else weight
        )
        return apply_linear(self.linear, x, own, None)


class _OutputProjection(RowParallelLinear):
    """Output projection, after the exchange of heads for positions."""

    def __init__(self, linear: nn.Linear, sharding: SequenceSharding) -> None:
        super().__init__(linear, sharding, 1)

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(self.sharding.all_to_all_positions(x))


class _NormOverRanks:
    """QK-norm over sharded heads; all-reduces the mean square."""

    def __init__(
        self, norm: nn.Module, sharding: SequenceSharding, heads: KeyValueHeadSharding
    ) -> None:
        self.norm = norm
        self.sharding = sharding
        self.heads = heads
        self.eps: float = norm.eps  # type: ignore[assignment]

    def __call__(self, x_BTW: Tensor) -> Tensor:
        x = x_BTW.float()
        own = self.heads.get_channel_slice()
        if not isinstance(self.norm, RMSNorm):
            x = x - self._compute_mean(x)
        x = x * torch.rsqrt(self._compute_mean(x.square()) + self.eps)
        weight: Tensor = self.norm.get_parameter("weight")[own].float()
        x = x * (1 + weight if getattr(self.norm, "unit_offset", False) else weight)
        bias = getattr(self.norm, "bias", None)
        return (x if bias is None else x + bias[own].float()).to(x_BTW.dtype)

    def _compute_mean(self, x_BTW: Tensor) -> Tensor:
        """Return the mean over the channels of all ranks.

        A head that several ranks share counts once per rank, in the sum and in the number of
        channels.
        """
        group = self.sharding.heads_group
        total = x_BTW.sum(-1, keepdim=True)
        ranks = 1 if group is None else group.size()
        return (total if group is None else all_reduce(total, group)) / (ranks * x_BTW.shape[-1])
