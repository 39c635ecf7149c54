"""Reformer's attention: queries are keys, and see the positions that hash alike (Kitaev 2020,
arXiv:2001.04451, 2).

Invariants:
- The directions of a layer's hash are fixed by its number: training, evaluation and a repeated pass
  hash alike.
- The sorted copies and scores of all rounds are computed again in the backward pass: what is saved
  grows with the length, not with the number of rounds.
- A key-value cache holds queries and values of all positions; every new token hashes the whole row
  again.
- No position sees a later one, but chunks are cut among all positions of a row: which earlier ones
  a position sees depends on later ones too, in training as in the authors' code.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmsys.config.lsh_attention import LshAttentionConfig
from llmsys.config.model import ModelConfig
from llmsys.model.float32_buffers import Float32BufferModule
from llmsys.model.forward_context import ForwardContext
from llmsys.model.indexed_normal import draw_normal

# B rows, T positions, D width, H heads, K width of a head, R rounds, E half the buckets, N = R T
# sorted places, C chunks of L queries, M = 2 L keys of a chunk

# Document of what fills the last chunk, which sees itself alone.
OUTSIDE = -1 << 40
# Scores of hidden keys, and of a query as its own key: it sees itself only where it sees nothing
# else.
HIDDEN = -1e9
ITSELF = -1e5


class LshAttention(Float32BufferModule):
    """Attention within chunks of positions, sorted by hash; rounds are weighted by their
    normalizers.
    """

    directions_HKRE: Tensor

    def __init__(self, config: ModelConfig, attention: LshAttentionConfig, layer: int) -> None:
        super().__init__()
        self.attention = attention
        self.layer = layer
        self.dropout = config.dropout.attention
        self.heads = config.num_attention_heads
        self.head_dim = config.head_dim
        self.is_causal = config.family == "decoder"
        width = self.heads * self.head_dim
        bias = attention.qkv_bias
        self.qk_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=attention.output_bias)
        shape = self.heads, self.head_dim, attention.num_hashes
        longest = attention.count_directions(config.max_position_embeddings)
        self.register_buffer("directions_HKRE", torch.empty(*shape, longest), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Draw the directions of the hash, for instance after `to_empty`."""
        shape = self.directions_HKRE.shape
        if not self.directions_HKRE.is_meta:
            self.directions_HKRE.copy_(
                draw_normal(self.layer, shape, [(0, size) for size in shape])
            )

    def forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Mix positions.

        Args:
            x_BTD: states of all positions, normed.
            context: masks, rotation and cache that all layers share.

        Returns:
            (B, T, D) in the dtype of the input.
        """
        new = x_BTD.shape[1]
        documents_BT = context.documents_BT
        qk_BTHK, v_BTHK = (
            proj(x_BTD).unflatten(-1, (self.heads, -1)) for proj in (self.qk_proj, self.v_proj)
        )
        if context.cache is not None:
            qk_BTHK, v_BTHK = context.cache.append_layer(self.layer + context.step, qk_BTHK, v_BTHK)
            places_T = torch.arange(qk_BTHK.shape[1], device=x_BTD.device)
            padding_B = context.cache.padding_B.to(x_BTD.device)
            documents_BT = (
                torch.where(places_T < padding_B[:, None], -1, 0) if bool(padding_B.any()) else None
            )
        with torch.no_grad():
            order = context.get_or_compute(
                "order", lambda: self._sort_positions(qk_BTHK, documents_BT)
            )
        inputs = qk_BTHK, v_BTHK, documents_BT, order
        if torch.is_grad_enabled():
            drops = self.training and self.dropout > 0
            y_BTHK = checkpoint(
                self._compute_output, *inputs, use_reentrant=False, preserve_rng_state=drops
            )
        else:
            y_BTHK = self._compute_output(*inputs)
        mixed_BTD: Tensor = self.o_proj(y_BTHK[:, -new:].flatten(2))
        return mixed_BTD

    def _sort_positions(
        self, qk_BTHK: Tensor, documents_BT: Tensor | None
    ) -> "SortedPositions | None":
        """Return the positions of every round by hash, then by place; None for rows of at most
        one chunk.
        """
        length = qk_BTHK.shape[1]
        chunk = self.attention.chunk_length
        if length <= chunk:
            return None
        first = 0
        num_buckets = 1
        buckets_BHRT = torch.zeros(1, dtype=torch.int64, device=qk_BTHK.device)
        for count in self.attention.list_directions(length):
            directions_HKRE = self.directions_HKRE[..., first : first + count].to(qk_BTHK.dtype)
            turned_BHRTE = torch.einsum("bthk,hkre->bhrte", qk_BTHK, directions_HKRE)
            buckets_BHRT = buckets_BHRT + num_buckets * torch.cat(
                [turned_BHRTE, -turned_BHRTE], dim=-1
            ).argmax(-1)
            first = first + count
            num_buckets = num_buckets * 2 * count
        if documents_BT is not None:  # padding has its own bucket, the last
            buckets_BHRT = buckets_BHRT.masked_fill((documents_BT < 0)[:, None, None], num_buckets)
        buckets_BHRT = F.pad(buckets_BHRT, (0, -length % chunk), value=num_buckets + 1)
        order_BHRT = buckets_BHRT.argsort(dim=-1, stable=True)
        return SortedPositions(order_BHRT.flatten(2), order_BHRT.argsort(dim=-1))

    def _compute_output(
        self,
        qk_BTHK: Tensor,
        v_BTHK: Tensor,
        documents_BT: Tensor | None,
        order: "SortedPositions | None",
    ) -> Tensor:
        """Return the weighted sums of values, (B, T, H, K)."""
        length = qk_BTHK.shape[1]
        q_BHTK = qk_BTHK.transpose(1, 2)
        v_BHTK = v_BTHK.transpose(1, 2)
        k_BHTK = (
            q_BHTK * (q_BHTK.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.head_dim**-0.5
        )
        places_BHT = torch.arange(length, device=qk_BTHK.device).expand(*q_BHTK.shape[:2], -1)
        if order is None:
            y_BHTK, _ = self._compute_chunk_outputs(
                q_BHTK, k_BHTK, v_BHTK, places_BHT, places_BHT, documents_BT
            )
            return y_BHTK.transpose(1, 2)
        fill = -length % self.attention.chunk_length
        if fill:
            q_BHTK, k_BHTK, v_BHTK = (F.pad(x, (0, 0, 0, fill)) for x in (q_BHTK, k_BHTK, v_BHTK))
            documents_BT = (
                qk_BTHK.new_zeros(1, length, dtype=torch.int64)
                if documents_BT is None
                else documents_BT
            )
            documents_BT = F.pad(documents_BT, (0, fill), value=OUTSIDE)
        index_BHNK = order.sorted_BHN[..., None].expand(-1, -1, -1, self.head_dim)
        q_BHCLK, k_BHCLK, v_BHCLK = (
            self._cut(x.gather(2, index_BHNK)) for x in (q_BHTK, k_BHTK, v_BHTK)
        )
        places_BHCL = self._cut(order.sorted_BHN)
        y_BHCLK, weight_BHCL = self._compute_chunk_outputs(
            q_BHCLK,
            _look_back(k_BHCLK),
            _look_back(v_BHCLK),
            places_BHCL,
            _look_back(places_BHCL),
            documents_BT,
        )
        rounds = self.attention.num_hashes
        weight_BHRT = weight_BHCL.flatten(2).unflatten(2, (rounds, -1)).gather(3, order.places_BHRT)
        index_BHRTK = order.places_BHRT[..., None].expand(-1, -1, -1, -1, self.head_dim)
        y_BHRTK = y_BHCLK.flatten(2, 3).unflatten(2, (rounds, -1)).gather(3, index_BHRTK)
        shares_BHRT = weight_BHRT.softmax(2).to(y_BHRTK.dtype)
        y_BTHK: Tensor = (y_BHRTK * shares_BHRT[..., None]).sum(2)[:, :, :length].transpose(1, 2)
        return y_BTHK

    def _cut(self, x_BHNX: Tensor) -> Tensor:
        cut_BHCLX: Tensor = x_BHNX.unflatten(2, (-1, self.attention.chunk_length))
        return cut_BHCLX

    def _compute_chunk_outputs(
        self,
        q_BHCLK: Tensor,
        k_BHCMK: Tensor,
        v_BHCMK: Tensor,
        queries_BHCL: Tensor,
        keys_BHCM: Tensor,
        documents_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return weighted sums and the logarithm of their normalizer, (…, L), float32; places
        are of T.
        """
        scores = q_BHCLK @ k_BHCMK.transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.is_causal:
            scores = scores.where(queries_BHCL[..., :, None] >= keys_BHCM[..., None, :], HIDDEN)
        if documents_BT is not None:
            rows = documents_BT.expand(len(q_BHCLK), -1)[:, None].expand(-1, self.heads, -1)
            own, theirs = (
                rows.gather(2, one.flatten(2)).view_as(one) for one in (queries_BHCL, keys_BHCM)
            )
            scores = scores.where(own[..., :, None] == theirs[..., None, :], HIDDEN)
        scores = scores.where(queries_BHCL[..., :, None] != keys_BHCM[..., None, :], ITSELF)
        weight_BHCL = scores.logsumexp(-1)
        shares = scores.softmax(-1).to(v_BHCMK.dtype)
        if self.training and self.dropout:
            shares = F.dropout(shares, self.dropout)
        return shares @ v_BHCMK, weight_BHCL


class SortedPositions(NamedTuple):
    """Positions in the order of their hashes, (B, H, N), and the places of positions in each
    round, (B, H, R, T).
    """

    sorted_BHN: Tensor
    places_BHRT: Tensor


def _look_back(x_BHCLX: Tensor) -> Tensor:
    """Return each chunk with the one before it; before the first is the last, whose keys a mask
    hides or not.
    """
    return torch.cat([x_BHCLX.roll(1, dims=2), x_BHCLX], dim=3)
