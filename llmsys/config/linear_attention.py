"""Linear attention by layer (`model.linear_attention`): mixers with a state of fixed size, for the
layers that `model.layer_types` calls linear_attention.

Their modules are in llmsys/model/gated_delta_net.py and mamba2_mixer.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmsys.config.linear_mixer import BaseLinearAttentionConfig
from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import ParameterTensor, iter_linear_parameters
from llmsys.config.section import find_nearest, list_divisors
from llmsys.errors import Violation

# Kinds of `model.attention` that the other layers of a stack may have.
ATTENTION_KINDS = ("multi_head", "latent")


class GatedDeltaConfig(BaseLinearAttentionConfig):
    """The gated delta rule (Yang 2024, arXiv:2412.06464), as Qwen3-Next has it.

    A head keeps a matrix of keys by values. Each position lets it decay, and replaces a share of
    what it holds for the position's key. Keys, queries and values go through a short causal
    convolution. The backward pass computes all between the projections again.
    """

    kind: Literal["gated_delta"] = "gated_delta"
    head_numbers: ClassVar[dict[str, str]] = {"b_proj": "shares of updates", "a_proj": "decays"}

    max_initial_decay: float = Field(
        16.0,
        gt=0,
        description="Initial rates of decay are uniform from 0 to this. A position multiplies a "
        "state by exp(-1.3 · rate) at first.",
    )

    @property
    def map_channels(self) -> int:
        """Return those of a matrix of keys by keys, and of what is added."""
        return self.key_head_dim + self.value_head_dim

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield projections, convolution, decays and the norm of the outputs.

        Args:
            model: widths of the model.
        """
        yield from self.iter_projections(model)
        yield ParameterTensor("attention.A_log", (self.num_value_heads,), "attention")
        yield ParameterTensor("attention.dt_bias", (self.num_value_heads,), "attention")
        yield ParameterTensor("attention.o_norm.weight", (self.value_head_dim,), "norms")
        yield from iter_linear_parameters(
            "attention.o_proj", model.hidden_size, self.value_channels, False, "attention"
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

    def count_map_products(self, length: int) -> int:
        """Return the multiplications that the members of a ring do to find these numbers of a row.

        Args:
            length: positions of the row.
        """
        return 2 * self.count_chunks(length) * self.chunk_length * self.count_map_values(1)

    @property
    def _solved_channels(self) -> int:
        return self.num_value_heads * (self.key_head_dim + self.value_head_dim)


class Mamba2Config(BaseLinearAttentionConfig):
    """Mamba-2, the state space dual (Dao and Gu 2024, arXiv:2405.21060).

    A head keeps a matrix of keys by values. Each position lets it decay by exp(-rate · step), and
    adds its key times its value, times the step. Queries, keys and values (C, B and x there) go
    through a short causal convolution; outputs have a share of the value, a gate, and a norm over
    the heads of a key. The backward pass computes all between the projections again.
    """

    kind: Literal["mamba2"] = "mamba2"
    head_numbers: ClassVar[dict[str, str]] = {"a_proj": "steps"}

    num_key_heads: int = Field(
        1, ge=1, description="Heads of queries and of keys: groups of C and B (n_groups)."
    )
    num_value_heads: int = Field(
        64, ge=1, description="Heads of values, each with its state; several share a key."
    )
    key_head_dim: int = Field(
        128, ge=1, description="Channels of a query or key head: size of the state (d_state)."
    )
    value_head_dim: int = Field(64, ge=1, description="Channels of a value head (headdim).")
    conv_bias: bool = Field(True, description="The convolution adds a trained vector.")
    max_initial_decay: float = Field(
        16.0,
        gt=0,
        description="Initial rates of decay are uniform from 0 to this. A position multiplies a "
        "state by exp(-step · rate), with steps of 0.001 to 0.1 at first.",
    )

    @property
    def map_channels(self) -> int:
        """Return that of one decay, and those of what is added."""
        return 1 + self.value_head_dim

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield projections, convolution, decays, shares of values and the norm of the outputs.

        Args:
            model: widths of the model.
        """
        yield from self.iter_projections(model)
        if self.conv_bias:
            yield ParameterTensor("attention.conv_bias", (self.conv_channels,), "attention")
        for name in ("A_log", "dt_bias", "D"):
            yield ParameterTensor(f"attention.{name}", (self.num_value_heads,), "attention")
        yield ParameterTensor("attention.o_norm.weight", (self.value_channels,), "norms")
        yield from iter_linear_parameters(
            "attention.o_proj", model.hidden_size, self.value_channels, False, "attention"
        )

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return the channels per token of the norm of the outputs.

        Args:
            model: widths of the model.
        """
        return self.value_channels

    def count_products(
        self, model: ModelShape, layer: int, length: int, documents: Sequence[int] | None
    ) -> int:
        """Return the multiplications of a row between the projections.

        Products of queries with keys belong to key heads. Within a chunk every value head has a
        weighted sum; from the second one on a product with its state, and of all but the last one a
        product that changes it.

        Args:
            model: widths of the model.
            layer: number of the layer.
            length: positions of the row.
            documents: not used: chunks are computed as they are.
        """
        chunks, size = self.count_chunks(length), self.chunk_length
        pairs = chunks * size**2 * (self.key_channels + self.value_channels)
        return pairs + (chunks - 1) * size * 2 * self.value_channels * self.key_head_dim

    def count_solve_products(self, length: int) -> int:
        """Return 0: nothing is solved.

        Args:
            length: positions of the row.
        """
        return 0

    def count_chunk_values(self, length: int) -> int:
        """Return the numbers of the largest tensors between the projections of a row: queries, keys
        and values by chunk, those with decays of each head, tables of pairs, and outputs.

        Args:
            length: positions of the row.
        """
        heads, positions = self.num_value_heads, self.count_chunks(length) * self.chunk_length
        inputs = 3 * self.conv_channels + 2 * self.value_channels
        return positions * (inputs + 2 * heads * self.key_head_dim + 3 * heads * self.chunk_length)

    def count_map_products(self, length: int) -> int:
        """Return those of the last chunk of each member; other products are those of its scan.

        Args:
            length: positions of the row.
        """
        return self.chunk_length * self.value_channels * self.key_head_dim


LinearAttentionConfig = Annotated[GatedDeltaConfig | Mamba2Config, Field(discriminator="kind")]


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
            "linear_attention.kind=gated_delta or mamba2.",
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
