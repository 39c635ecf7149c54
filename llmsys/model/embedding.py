"""The token embedding with its scale, and positions that are added to it or to the scores (ALiBi,
T5's relative bias).

Rotations are in rotary_embedding.py, Transformer-XL's relative attention in relative_attention.py.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.position import (
    LearnedPositionConfig,
    RelativeBiasConfig,
    SinusoidalPositionConfig,
)

# Factors of a token and of the one before it in the hash of a bigram, odd so that no bit is lost.
BIGRAM_FACTORS = (36313, 27191)


class TokenEmbedding(nn.Embedding):
    """An embedding whose gradient is summed in float32, also when the weight is bfloat16."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens.

        Args:
            tokens: ids, of any shape.

        Returns:
            (..., D) in the dtype of the weight.
        """
        return look_up_embedding(tokens, self.weight)


def look_up_embedding(rows: Tensor, table: Tensor) -> Tensor:
    """Look up rows of a trained table.

    Args:
        rows: Row numbers, integer, of any shape.
        table: The weights, (V, D).

    Returns:
        (..., D) in the dtype of the table. Gradients of a row are summed in float32.
    """
    if table.dtype == torch.float32 or table.device.type != "cpu":
        return F.embedding(rows, table)
    # On CPU the backward adds row by row in the dtype of the table, and a bfloat16 sum of a
    # frequent token's gradients stops growing after a few hundred terms. (CUDA adds in float32 by
    # itself.)
    return F.embedding(rows, table.float()).to(table.dtype)


def get_embedding_scale(config: ModelConfig) -> float:
    """Return the factor on the token embedding.

    Args:
        config: The model.

    Returns:
        `embedding.scale`: sqrt(d) in the original (Vaswani 2017, 3.4) and in Gemma, mostly 1.
    """
    scale = config.embedding.scale
    return math.sqrt(config.hidden_size) if scale == "sqrt_hidden_size" else float(scale)


# B rows, T positions (of queries), S positions of keys, H heads, D width


def compute_bigram_rows(
    tokens_BT: Tensor, previous_BT: Tensor, positions_BT: Tensor, config: ModelConfig
) -> Tensor:
    """Compute the row of each pair of a token and the one before it: a hash, so pairs share rows.

    Args:
        tokens_BT: Token ids.
        previous_BT: The token before each; any number at the first one of a document.
        positions_BT: Positions in documents, (B, T) or (1, T).
        config: The model, with `embedding.bigram_rows`.

    Returns:
        Row numbers, int64 (B, T).
    """
    assert config.embedding.bigram_rows is not None
    # The first token of a document follows a token that no other follows.
    previous_BT = previous_BT.long().where(positions_BT > 0, config.vocab_size)
    own, before = BIGRAM_FACTORS
    mixed_BT = torch.bitwise_xor(own * tokens_BT.long(), before * previous_BT)
    return mixed_BT.remainder(config.embedding.bigram_rows)


class LearnedPositionEmbedding(nn.Module):
    """A trained vector per position, after `offset` unused rows."""

    def __init__(self, config: ModelConfig, position: LearnedPositionConfig) -> None:
        super().__init__()
        self.offset = position.offset
        rows = config.max_position_embeddings + position.offset
        self.weight = nn.Parameter(
            torch.empty(rows, config.hidden_size).normal_(std=config.initializer_range)
        )

    def forward(self, positions_BT: Tensor) -> Tensor:
        """Return the vectors of positions.

        Args:
            positions_BT: positions counted from 0, (..., T) int64.

        Returns:
            (..., T, D) in the dtype of the weight.
        """
        return look_up_embedding(positions_BT + self.offset, self.weight)


class SinusoidalPositionEmbedding:
    """sin(pos · w_i) and cos(pos · w_i) with w_i = 10000^(-2i/D) (Vaswani 2017, 3.5), without
    parameters or buffers.
    """

    def __init__(self, config: ModelConfig, position: SinusoidalPositionConfig) -> None:
        self.width = config.hidden_size
        self.arrangement = position.arrangement

    def __call__(self, positions_BT: Tensor) -> Tensor:
        """Return the vectors of the positions, float32 (..., T, D)."""
        # In float64: at large positions float32 angles are off by more than the highest frequencies
        # allow.
        exponents = (
            torch.arange(0, self.width, 2, dtype=torch.float64, device=positions_BT.device)
            / self.width
        )
        angles = positions_BT.to(torch.float64)[..., None] * 10000.0**-exponents
        if self.arrangement == "halves":
            return torch.cat([angles.sin(), angles.cos()], dim=-1).float()
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).float()


def compute_alibi_slopes(heads: int) -> Tensor:
    """Return a geometric series from 2^(-8/h) (Press 2021); heads beyond a power of two take the
    slopes between.

    Args:
        heads: Number of query heads, H.

    Returns:
        The slopes, (H,).
    """
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    # Every second slope of the series for twice as many heads.
    between = [2.0 ** (-8.0 * (2 * i + 1) / (2 * power)) for i in range(heads - power)]
    return torch.tensor(first + between)


def compute_alibi_bias(slopes_H: Tensor, queries_T: Tensor, keys_S: Tensor) -> Tensor:
    """Compute ALiBi's bias on scores (Press 2022, arXiv:2108.12409).

    Args:
        slopes_H: Slope of each head.
        queries_T: Positions of queries, (..., T).
        keys_S: Positions of keys, (..., S).

    Returns:
        −slope · |distance|, float32 (..., H, T, S).
    """
    distance_TS = (queries_T[..., :, None] - keys_S[..., None, :]).abs().float()
    return -slopes_H.to(distance_TS.device)[:, None, None] * distance_TS[..., None, :, :]


class RelativePositionBias(nn.Module):
    """A trained bias per head and bucket of (key position − query position) (T5; Raffel 2020,
    2.1).
    """

    def __init__(self, position: RelativeBiasConfig, heads: int) -> None:
        super().__init__()
        self.position = position
        self.weight = nn.Parameter(torch.empty(position.buckets, heads).normal_(std=0.02))

    def forward(self, queries_T: Tensor, keys_S: Tensor, *, bidirectional: bool) -> Tensor:
        """Return the bias of each pair of a query and a key.

        Args:
            queries_T: positions of queries, (..., T).
            keys_S: positions of keys, (..., S).
            bidirectional: keys after a query have buckets too, as in an encoder.

        Returns:
            (..., H, T, S) in the dtype of the weight.
        """
        buckets_TS = self._compute_buckets(
            keys_S[..., None, :] - queries_T[..., :, None], bidirectional
        )
        return look_up_embedding(buckets_TS, self.weight).movedim(-1, -3)

    def _compute_buckets(self, distance_TS: Tensor, bidirectional: bool) -> Tensor:
        """Return the bucket of each distance: near distances have their own, far ones share them
        logarithmically.
        """
        count = self.position.buckets
        first = torch.zeros_like(distance_TS)
        if bidirectional:  # half of the buckets for later keys
            count //= 2
            first = torch.where(distance_TS > 0, count, 0)
            distance_TS = distance_TS.abs()
        else:
            distance_TS = (-distance_TS).clamp_min(0)
        exact = count // 2
        # The logarithm of 0 is not used: near distances have their own buckets.
        ratio = (distance_TS.float() / exact).clamp_min(1e-9).log() / math.log(
            self.position.max_distance / exact
        )
        far = (exact + (ratio * (count - exact)).long()).clamp_max(count - 1)
        return first + torch.where(distance_TS < exact, distance_TS, far)
