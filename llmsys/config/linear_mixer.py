"""Base of the kinds of `model.linear_attention`: heads, a convolution, chunks and states.

A kind answers the same questions as one of `model.attention`: parameters, products, saved tensors.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from pydantic import Field

from llmsys.config.attention import BaseAttentionConfig
from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    FP32_BYTES,
    ActivationShape,
    ParameterTensor,
    SavedTensor,
    ScoreShape,
    iter_linear_parameters,
)


class BaseLinearAttentionConfig(BaseAttentionConfig):
    """Base of the kinds. A head of values has a state, keys by values, and several heads share
    their queries and keys.
    """

    has_own_mask: ClassVar[bool] = True
    recomputes_scores: ClassVar[bool] = True
    # Projections with a number for each value head, and what they are.
    head_numbers: ClassVar[dict[str, str]] = {"a_proj": "decays"}

    num_key_heads: int = Field(16, ge=1, description="Heads of queries and of keys.")
    num_value_heads: int = Field(
        32, ge=1, description="Heads of values, each with its state; several share a key."
    )
    key_head_dim: int = Field(128, ge=1, description="Channels of a query or key head.")
    value_head_dim: int = Field(128, ge=1, description="Channels of a value head.")
    conv_kernel_dim: int = Field(
        4, ge=1, description="Positions that the convolution reads, the own one included."
    )
    chunk_length: int = Field(
        64, ge=1, description="Positions computed at once; the state goes from chunk to chunk."
    )

    @property
    def key_channels(self) -> int:
        """Channels of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_channels(self) -> int:
        """Channels of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of queries, keys and values, in this order."""
        return 2 * self.key_channels + self.value_channels

    @property
    def head_channels(self) -> dict[str, int]:
        """Channels of value heads besides values and gates, by what they are."""
        return dict.fromkeys(self.head_numbers.values(), self.num_value_heads)

    @property
    @abstractmethod
    def map_channels(self) -> int:
        """Numbers by which positions change a row of a state: of the matrix, and what is added."""

    @abstractmethod
    def count_solve_products(self, length: int) -> int:
        """Return the multiplications of the triangular solves of a row, forward: half of those of
        full matrices.

        Args:
            length: positions of the row.
        """

    @abstractmethod
    def count_chunk_values(self, length: int) -> int:
        """Return the numbers of the largest tensors between the projections of a row.

        Args:
            length: positions of the row.
        """

    @abstractmethod
    def count_map_products(self, length: int) -> int:
        """Return the multiplications with which the members of a ring find how the positions of a
        row change its states.

        Args:
            length: positions of the row.
        """

    @abstractmethod
    def count_products(
        self, model: ModelShape, layer: int, length: int, documents: Sequence[int] | None
    ) -> int:
        """Return the multiplications of a row between the projections, without solves, which
        torch's counter leaves out.

        Args:
            model: widths of the model.
            layer: number of the layer.
            length: positions of the row.
            documents: not used: chunks are computed as they are.
        """

    def count_chunks(self, length: int) -> int:
        """Return the chunks of a row, the last of which may be filled up.

        Args:
            length: positions of the row.
        """
        return -(-length // self.chunk_length)

    def iter_projections(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the projections before the convolution, and it.

        Args:
            model: widths of the model.
        """
        outputs = {
            "q_proj": self.key_channels,
            "k_proj": self.key_channels,
            "v_proj": self.value_channels,
            "g_proj": self.value_channels,
        } | dict.fromkeys(self.head_numbers, self.num_value_heads)
        for name, width in outputs.items():
            yield from iter_linear_parameters(
                f"attention.{name}", width, model.hidden_size, False, "attention"
            )
        yield self.build_convolution()

    def build_convolution(self) -> ParameterTensor:
        """Return the weights of the convolution."""
        shape = (self.conv_channels, self.conv_kernel_dim)
        return ParameterTensor("attention.conv_weight", shape, "attention")

    def build_score_shape(self, model: ModelShape, keys: int, *, is_causal: bool) -> ScoreShape:
        """Return heads and channels; there are no scores of pairs.

        Args:
            model: widths of the model.
            keys: keys of each row.
            is_causal: always.
        """
        return ScoreShape(
            self.num_value_heads,
            self.num_key_heads,
            self.key_head_dim,
            self.value_head_dim,
            keys,
            is_causal,
        )

    def count_exchanged_channels(self, ranks: int) -> tuple[int, int]:
        """Return the channels of a position that go out before the rule and come back after it,
        where ranks exchange heads for positions.

        Args:
            ranks: ranks that exchange. Where they are more than the key heads, each gets one that
                others get too.
        """
        keys = max(ranks, self.num_key_heads) * self.key_head_dim
        rest = sum(self.head_channels.values())
        return 2 * (keys + self.value_channels) + rest, self.value_channels

    def count_tail_values(self, length: int, ranks: int) -> int:
        """Return the inputs of the convolution that a row of a ring's member sends to the others.

        Args:
            length: positions of a member.
            ranks: ranks that exchange heads for positions inside of a member.
        """
        keys = max(1, self.num_key_heads // ranks) * self.key_head_dim
        channels = 2 * keys + self.value_channels // ranks
        return min(self.conv_kernel_dim - 1, length) * channels

    def count_map_values(self, ranks: int) -> int:
        """Return the numbers by which the positions of a row of a ring's member change the states.

        Args:
            ranks: ranks that exchange heads for positions inside of a member.
        """
        return self.num_value_heads // ranks * self.key_head_dim * self.map_channels

    def count_state_values(self) -> int:
        """Return the numbers that generation keeps of a row: the states, and the last inputs of
        the convolution.
        """
        tail = (self.conv_kernel_dim - 1) * self.conv_channels
        return self.num_value_heads * self.key_head_dim * self.value_head_dim + tail

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
        """Yield the projections, what the backward pass makes of them again, and the output.

        The arguments are those of MultiHeadAttentionConfig.
        """
        # Of more ranks than key heads each has one that others have too.
        ranks = 1 if shape.has_ring else shape.context
        keys = max(ranks, self.num_key_heads) * self.key_head_dim
        widths = {
            "queries": keys,
            "keys": keys,
            "values": self.value_channels,
            "output gate": self.value_channels,
        } | self.head_channels
        for name, width in widths.items():
            yield SavedTensor(name, shape.compute_sharded_bytes(width), "product")
        chunks = FP32_BYTES * shape.sequences * self.count_chunk_values(shape.length)
        chunks //= shape.context
        yield SavedTensor(
            "chunks, computed again", chunks, "pointwise", is_saved=False, is_needed=False
        )
        output = shape.compute_sharded_bytes(self.value_channels)
        yield SavedTensor("attention output", output, "pointwise")
