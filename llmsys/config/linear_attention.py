"""Linear attention by layer (`model.linear_attention`): mixers with a state of fixed size, for the
layers that `model.layer_types` calls linear_attention.

A kind answers the same questions as one of `model.attention`: parameters, products, saved tensors.
Its module is in llmsys/model/gated_delta_net.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

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
from llmsys.config.section import find_nearest, list_divisors
from llmsys.errors import Violation

# Kinds of `model.attention` that the other layers of a stack may have.
ATTENTION_KINDS = ("multi_head", "latent")


class GatedDeltaConfig(BaseAttentionConfig):
    """The gated delta rule (Yang 2024, arXiv:2412.06464), as Qwen3-Next has it.

    A head keeps a matrix of keys by values. Each position lets it decay, and replaces a share of
    what it holds for the position's key. Keys, queries and values go through a short causal
    convolution. The backward pass computes all between the projections again.
    """

    kind: Literal["gated_delta"] = "gated_delta"
    has_own_mask: ClassVar[bool] = True
    recomputes_scores: ClassVar[bool] = True
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

    max_initial_decay: float = Field(
        16.0,
        gt=0,
        description="Initial rates of decay are uniform from 0 to this. A position multiplies a "
        "state by exp(-1.3 · rate) at first.",
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

    def count_chunks(self, length: int) -> int:
        """Return the chunks of a row, the last of which may be filled up.

        Args:
            length: positions of the row.
        """
        return -(-length // self.chunk_length)

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield projections, convolution, decays and the norm of the outputs.

        Args:
            model: widths of the model.
        """
        hidden, heads = model.hidden_size, self.num_value_heads
        outputs = {
            "q_proj": self.key_channels,
            "k_proj": self.key_channels,
            "v_proj": self.value_channels,
            "g_proj": self.value_channels,
            "b_proj": heads,
            "a_proj": heads,
        }
        for name, width in outputs.items():
            yield from iter_linear_parameters(
                f"attention.{name}", width, hidden, False, "attention"
            )
        yield ParameterTensor(
            "attention.conv_weight", (self.conv_channels, self.conv_kernel_dim), "attention"
        )
        yield ParameterTensor("attention.A_log", (heads,), "attention")
        yield ParameterTensor("attention.dt_bias", (heads,), "attention")
        yield ParameterTensor("attention.o_norm.weight", (self.value_head_dim,), "norms")
        yield from iter_linear_parameters(
            "attention.o_proj", hidden, self.value_channels, False, "attention"
        )

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

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return the channels per token of the norms: queries, keys and outputs.

        Args:
            model: widths of the model.
        """
        return self.conv_channels

    def count_products(
        self, model: ModelShape, layer: int, length: int, documents: Sequence[int] | None
    ) -> int:
        """Return the multiplications of a row between the projections, without the solve of each
        chunk, which torch's counter leaves out.

        Products of queries and keys with keys belong to key heads. Within a chunk every value head
        has a weighted sum, and from the second one on three products with its state.

        Args:
            model: widths of the model.
            layer: number of the layer.
            length: positions of the row.
            documents: not used: chunks are computed as they are.
        """
        chunks, size = self.count_chunks(length), self.chunk_length
        pairs = chunks * size**2 * (2 * self.key_channels + self.value_channels)
        states = (chunks - 1) * size * 3 * self.value_channels * self.key_head_dim
        return pairs + states

    def count_backward_products(self, model: ModelShape, length: int) -> int:
        """Return the multiplications that the backward pass of the solve of each chunk has, beyond
        two for each one of the forward pass.

        Args:
            model: widths of the model.
            length: positions of the row.
        """
        return self.count_chunks(length) * self.chunk_length**2 * self._solved_channels

    def count_solve_products(self, length: int) -> int:
        """Return the multiplications of the triangular solves of a row, forward: half of those of
        full matrices.

        Args:
            length: positions of the row.
        """
        return self.count_chunks(length) * self.chunk_length**2 * self._solved_channels // 2

    def count_chunk_values(self, length: int) -> int:
        """Return the numbers of the largest tensors between the projections of a row: queries, keys
        and values by chunk, the solve with its inputs, tables of pairs, and outputs.

        Args:
            length: positions of the row.
        """
        heads, positions = self.num_value_heads, self.count_chunks(length) * self.chunk_length
        inputs = 3 * self.conv_channels + 2 * self.value_channels
        keys = 2 * heads * self.key_head_dim
        tables = 4 * heads * self.chunk_length
        return positions * (inputs + keys + 2 * self._solved_channels + tables)

    @property
    def _solved_channels(self) -> int:
        return self.num_value_heads * (self.key_head_dim + self.value_head_dim)

    def count_exchanged_channels(self, ranks: int) -> tuple[int, int]:
        """Return the channels of a position that go out before the rule and come back after it,
        where ranks exchange heads for positions.

        Args:
            ranks: ranks that exchange. Where they are more than the key heads, each gets one that
                others get too.
        """
        keys = max(ranks, self.num_key_heads) * self.key_head_dim
        out = 2 * (keys + self.value_channels + self.num_value_heads)
        return out, self.value_channels

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
        """Return the numbers by which the positions of a row of a ring's member change the states:
        of each a matrix, and what is added.

        Args:
            ranks: ranks that exchange heads for positions inside of a member.
        """
        width = self.key_head_dim + self.value_head_dim
        return self.num_value_heads // ranks * self.key_head_dim * width

    def count_map_products(self, length: int) -> int:
        """Return the multiplications that the members of a ring do to find these numbers of a row.

        Args:
            length: positions of the row.
        """
        return 2 * self.count_chunks(length) * self.chunk_length * self.count_map_values(1)

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
            "shares of updates": self.num_value_heads,
            "decays": self.num_value_heads,
        }
        for name, width in widths.items():
            yield SavedTensor(name, shape.compute_sharded_bytes(width), "product")
        chunks = FP32_BYTES * shape.sequences * self.count_chunk_values(shape.length)
        chunks //= shape.context
        yield SavedTensor(
            "chunks, computed again", chunks, "pointwise", is_saved=False, is_needed=False
        )
        output = shape.compute_sharded_bytes(self.value_channels)
        yield SavedTensor("attention output", output, "pointwise")


LinearAttentionConfig = GatedDeltaConfig


def find_linear_violations(
    linear: LinearAttentionConfig | None,
    is_named: bool,
    layers: Sequence[int],
    layer_types: Sequence[str],
    family: str,
    attention: str,
    given: Mapping[str, str | None],
) -> Iterator[Violation]:
    """Yield what layers of linear attention cannot be combined with, with keys below `model`.

    Args:
        linear: `model.linear_attention`.
        is_named: `model.layer_types` has linear_attention.
        layers: the layers that are of this type.
        layer_types: `model.layer_types`.
        family: `model.family`.
        attention: `model.attention.kind`.
        given: kinds by the dotted keys of choices of which only the usual one is proven.
    """
    if is_named and linear is None:
        yield Violation(
            "linear_attention",
            "layer_types has linear_attention, but the section is missing. Set "
            "linear_attention.kind=gated_delta.",
        )
    if linear is None:
        return
    if not layers:
        yield Violation(
            "linear_attention",
            f"no layer of layer_types={list(layer_types)} has it. Add linear_attention to "
            "layer_types, or leave the section out.",
        )
        return
    if linear.num_value_heads % linear.num_key_heads:
        legal = find_nearest(linear.num_key_heads, list_divisors(linear.num_value_heads))
        yield Violation(
            "linear_attention.num_key_heads",
            f"{linear.num_key_heads} does not divide num_value_heads={linear.num_value_heads}. "
            f"Use {legal}.",
        )
    if family != "decoder":
        yield Violation(
            "linear_attention",
            f"a state sees earlier positions only, so family={family} cannot use it. Use "
            "family=decoder, or leave linear_attention out of layer_types.",
        )
    if attention not in ATTENTION_KINDS:
        yield Violation(
            "attention.kind",
            f"{attention} is not proven beside layers of linear_attention. Use "
            f"{' or '.join(ATTENTION_KINDS)}.",
        )
    for key, kind in given.items():
        if kind not in (None, "standard"):
            yield Violation(
                key, f"{kind} is not proven with layers of linear_attention. Leave it out."
            )
