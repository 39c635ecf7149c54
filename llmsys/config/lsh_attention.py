"""Reformer's attention (`model.attention.kind=lsh`): every position sees the positions that hash
alike.
"""

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from llmsys.config.attention import BaseAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    ActivationShape,
    ParameterTensor,
    SavedTensor,
    ScoreShape,
    iter_linear_parameters,
)
from llmsys.errors import Violation

# Directions of a hash that are compared at once.
MAX_DIRECTIONS = 64
# Sorted positions and the places of positions, in int64.
HASH_ORDER = "order of hashes"


class LshAttentionConfig(BaseAttentionConfig):
    """Locality-sensitive hashing attention with shared queries and keys (Kitaev 2020,
    arXiv:2001.04451).

    In each round the positions are sorted by hash and cut into chunks. A position sees its chunk
    and the chunk before it. Rows of at most one chunk see everything. The hash of a layer is fixed:
    every pass hashes alike.
    """

    kind: Literal["lsh"] = "lsh"
    has_own_mask: ClassVar[bool] = True
    recomputes_scores: ClassVar[bool] = True
    num_hashes: int = Field(4, ge=1, description="Number of hash rounds.")
    chunk_length: int = Field(
        64, ge=1, description="Positions of a chunk, and about twice those of a bucket."
    )
    qkv_bias: bool = Field(
        False, description="Add a bias to the projections of shared queries and keys, and values."
    )
    output_bias: bool = Field(False, description="Add a bias to the output projection.")

    @property
    def cross_attention(self) -> MultiHeadAttentionConfig:
        """Configuration of a cross-attention; no family with one has this attention."""
        return MultiHeadAttentionConfig(qkv_bias=self.qkv_bias, output_bias=self.output_bias)

    def list_directions(self, length: int) -> list[int]:
        """Return the directions of each hash of a row; a bucket is one of them or its opposite.

        Args:
            length: Positions of the row.

        Returns:
            One number; two numbers above MAX_DIRECTIONS, where a bucket is a pair of two hashes
            with about the root of the buckets each.
        """
        half = max(1, length // self.chunk_length)
        return [half] if half <= MAX_DIRECTIONS else [math.ceil(math.sqrt(2 * half) / 2)] * 2

    def count_directions(self, longest: int) -> int:
        """Count the directions that a layer draws, so that they serve every row.

        Args:
            longest: Positions of the longest row.

        Returns:
            The number for that row, and at least that of any shorter one.
        """
        return max(
            sum(self.list_directions(longest)), min(longest // self.chunk_length, MAX_DIRECTIONS)
        )

    def count_hashes(self, length: int) -> int:
        """Return the hashes of a row by one head, those that fill the last chunk included."""
        return (
            0
            if length <= self.chunk_length
            else -(-length // self.chunk_length) * self.chunk_length * self.num_hashes
        )

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the projections of shared queries and keys, of values, and of the output."""
        width, hidden = model.num_attention_heads * model.head_dim, model.hidden_size
        yield from iter_linear_parameters(
            "attention.qk_proj", width, hidden, self.qkv_bias, "attention"
        )
        yield from iter_linear_parameters(
            "attention.v_proj", width, hidden, self.qkv_bias, "attention"
        )
        yield from iter_linear_parameters(
            "attention.o_proj", hidden, width, self.output_bias, "attention"
        )

    def build_score_shape(self, model: ModelShape, keys: int, *, is_causal: bool) -> ScoreShape:
        """Return the shape of scores against `keys` keys."""
        return self.cross_attention.build_score_shape(model, keys, is_causal=is_causal)

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return 0: keys are normalized as they are multiplied."""
        return 0

    def count_products(
        self, model: ModelShape, layer: int, length: int, documents: Sequence[int] | None
    ) -> int:
        """Return the multiplications of hashes, scores and weighted sums of a row: all that chunks
        compute.

        Args:
            model: widths of the model.
            layer: the layer.
            length: positions of the row.
            documents: not used, since chunks are computed as they are.
        """
        width = model.num_attention_heads * model.head_dim
        if length <= self.chunk_length:
            return 2 * width * length**2
        padded = -(-length // self.chunk_length) * self.chunk_length
        hashing = width * length * self.num_hashes * sum(self.list_directions(length))
        return hashing + 2 * width * self.num_hashes * padded * 2 * self.chunk_length

    def iter_saved_tensors(
        self,
        model: ModelShape,
        scores: ScoreShape,
        shape: ActivationShape,
        *,
        is_rotated: bool,
        are_queries_saved: bool,
        are_keys_saved: bool,
    ) -> Iterator[SavedTensor]:
        """Yield shared queries and keys, values and the output: chunks are computed again in the
        backward pass.
        """
        size = shape.compute_sharded_bytes(scores.heads * scores.key_channels)
        yield SavedTensor("shared queries and keys", size, "product")
        yield SavedTensor("values", size, "product")
        yield SavedTensor("attention output", size, "pointwise")
        order = 2 * 8 * shape.sequences * scores.heads * self.count_hashes(shape.length)
        yield SavedTensor(HASH_ORDER, order, "input")

    def find_violations(
        self, model: ModelShape, *, family: str, position: str, window: int | None
    ) -> Iterator[Violation]:
        """Yield what the kind cannot be combined with."""
        if family == "encoder_decoder":
            yield Violation(
                "attention.kind",
                "lsh has no cross-attention. Use multi_head, or family=decoder or encoder.",
            )
        if window is not None:
            yield Violation(
                "sliding_window", "attention.kind=lsh chooses its keys itself. Leave it out."
            )
        if position not in ("learned", "sinusoidal", "none"):
            yield Violation(
                "position.kind",
                f"{position} is no position of attention.kind=lsh. Use learned, sinusoidal, none.",
            )
        if model.num_key_value_heads != model.num_attention_heads:
            heads = model.num_attention_heads
            yield Violation(
                "num_key_value_heads", f"lsh has a key for each of the {heads} heads. Leave it out."
            )
