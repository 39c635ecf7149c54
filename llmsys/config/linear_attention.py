"""Linear attention by layer (`model.linear_attention`): mixers with a state of fixed size, for the
layers that `model.layer_types` calls linear_attention.

Their modules are in llmsys/model/gated_delta_net.py, kimi_delta_net.py and mamba2_mixer.py.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmsys.config.layer_types import ATTENTION_KINDS
from llmsys.config.linear_mixer import BaseLinearAttentionConfig
from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    ActivationShape,
    ParameterTensor,
    SavedTensor,
    ScoreShape,
    iter_linear_parameters,
)
from llmsys.config.section import find_nearest, list_divisors
from llmsys.errors import Violation


class BaseDeltaConfig(BaseLinearAttentionConfig):
    """Base of the kinds of the delta rule, whose chunks are triangular systems."""

    allow_neg_eigval: bool = Field(
        False,
        description="Shares of updates go from 0 to 2 instead of 1, so that a position can turn "
        "what a state holds for its key (Grazzi 2024, arXiv:2411.12537; OLMo Hybrid).",
    )
    norm_eps: float | None = Field(
        None, gt=0, description="Epsilon of the norm of outputs. null: that of the model's norms."
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
        yield ParameterTensor("attention.dt_bias", (self.count_decays(),), "attention")
        yield ParameterTensor("attention.o_norm.weight", (self.value_head_dim,), "norms")
        yield from iter_linear_parameters(
            "attention.o_proj", model.hidden_size, self.value_channels, False, "attention"
        )

    @abstractmethod
    def count_decays(self) -> int:
        """Return the offsets of decays."""

    @abstractmethod
    def count_pair_products(self, length: int) -> int:
        """Return the multiplications of queries and keys of a row with keys.

        Args:
            length: positions of the row.
        """

    @abstractmethod
    def count_pair_values(self, length: int) -> int:
        """Return the numbers that these products need besides queries and keys.

        Args:
            length: positions of the row.
        """

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

        Within a chunk every value head has a weighted sum, and from the second one on three
        products with its state.

        Args:
            model: widths of the model.
            layer: number of the layer.
            length: positions of the row.
            documents: not used: chunks are computed as they are.
        """
        chunks, size = self.count_chunks(length), self.chunk_length
        sums = chunks * size**2 * self.value_channels
        states = (chunks - 1) * size * 3 * self.value_channels * self.key_head_dim
        return self.count_pair_products(length) + sums + states

    def count_backward_products(
        self, model: ModelShape, length: int, documents: Sequence[int] | None
    ) -> int:
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
        own = positions * (inputs + keys + 2 * self._solved_channels + tables)
        return own + self.count_pair_values(length)

    def count_map_products(self, length: int) -> int:
        """Return the multiplications that the members of a ring do to find these numbers of a row.

        Args:
            length: positions of the row.
        """
        return 2 * self.count_chunks(length) * self.chunk_length * self.count_map_values(1)

    @property
    def _solved_channels(self) -> int:
        return self.num_value_heads * (self.key_head_dim + self.value_head_dim)


class GatedDeltaConfig(BaseDeltaConfig):
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

    def count_decays(self) -> int:
        """Return one for each value head."""
        return self.num_value_heads

    def count_pair_products(self, length: int) -> int:
        """Return the multiplications of queries and keys with keys, which are those of key heads.

        Args:
            length: positions of the row.
        """
        return self.count_chunks(length) * self.chunk_length**2 * 2 * self.key_channels

    def count_pair_values(self, length: int) -> int:
        """Return 0: tables of pairs are decayed as a whole.

        Args:
            length: positions of the row.
        """
        return 0


class KimiDeltaConfig(BaseDeltaConfig):
    """Kimi delta attention (Kimi Linear, arXiv:2510.26692, 3): the gated delta rule with a decay
    for each channel of a key.

    Decays and the gates of the outputs are projected through a few channels. The backward pass
    computes all between the projections again.
    """

    kind: Literal["kimi_delta"] = "kimi_delta"
    head_numbers: ClassVar[dict[str, str]] = {"b_proj": "shares of updates"}

    num_key_heads: int = Field(32, ge=1, description="Heads of queries and of keys.")
    decay_rank: int = Field(
        128, ge=1, description="Channels through which decays are projected. A head's, usually."
    )
    gate_rank: int = Field(
        128, ge=1, description="Channels through which gates are projected. A head's, usually."
    )
    max_initial_decay: float = Field(
        16.0,
        ge=1,
        description="Initial rates of decay are uniform from 1 to this. A position multiplies a "
        "channel by exp(-step · rate), with steps of 0.001 to 0.1 at first.",
    )

    @property
    def decay_channels(self) -> int:
        """Channels of the decays of all value heads."""
        return self.num_value_heads * self.key_head_dim

    @property
    def head_channels(self) -> dict[str, int]:
        """Implement `BaseLinearAttentionConfig.head_channels`, in the order of the module."""
        return super().head_channels | {"decays": self.decay_channels}

    def iter_projections(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the projections before the convolution, and it.

        Args:
            model: widths of the model.
        """
        hidden = model.hidden_size
        sizes = {
            "q_proj": (self.key_channels, hidden),
            "k_proj": (self.key_channels, hidden),
            "v_proj": (self.value_channels, hidden),
            "g_a_proj": (self.gate_rank, hidden),
            "g_b_proj": (self.value_channels, self.gate_rank),
            "b_proj": (self.num_value_heads, hidden),
            "f_a_proj": (self.decay_rank, hidden),
            "f_b_proj": (self.decay_channels, self.decay_rank),
        }
        for name, (out_features, in_features) in sizes.items():
            yield from iter_linear_parameters(
                f"attention.{name}", out_features, in_features, False, "attention"
            )
        yield self.build_convolution()

    def count_decays(self) -> int:
        """Return the offsets of decays: one for each channel."""
        return self.decay_channels

    def iter_saved_tensors(
        self, model: ModelShape, scores: ScoreShape, shape: ActivationShape, **options: bool
    ) -> Iterator[SavedTensor]:
        """Yield the channels through which gates and decays go, too.

        The arguments are those of MultiHeadAttentionConfig.
        """
        for name, width in {"gate": self.gate_rank, "decay": self.decay_rank}.items():
            saved = shape.compute_residual_bytes(width)
            yield SavedTensor(f"inner channels of the {name}s", saved, "product")
        yield from super().iter_saved_tensors(model, scores, shape, **options)

    def count_pair_products(self, length: int) -> int:
        """Return the multiplications of queries and keys with keys: of each value head, because of
        its decays, and of earlier positions alone.

        Args:
            length: positions of the row.
        """
        size = self.chunk_length
        return self.count_chunks(length) * size * (size - 1) * self.decay_channels

    def count_pair_values(self, length: int) -> int:
        """Return the numbers of decayed queries and keys, of each halving of a chunk.

        Args:
            length: positions of the row.
        """
        halvings = self.chunk_length.bit_length() - 1
        positions = self.count_chunks(length) * self.chunk_length
        # Half of the positions as queries and twice as keys, and their decays.
        return positions * halvings * self.decay_channels * 5 // 2


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
    output_norm: Literal["after_gate", "before_gate", "none"] = Field(
        "after_gate", description="The norm of outputs: of gated ones, before the gate, or none."
    )
    conv_bias: bool = Field(True, description="The convolution adds a trained vector.")
    min_step: float = Field(
        0.0, ge=0, description="Smallest step; shorter ones are made as long (Nemotron-H: 0.001)."
    )
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
        if self.output_norm != "none":
            yield ParameterTensor("attention.o_norm.weight", (self.value_channels,), "norms")
        yield from iter_linear_parameters(
            "attention.o_proj", model.hidden_size, self.value_channels, False, "attention"
        )

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return the channels per token of the norm of the outputs.

        Args:
            model: widths of the model.
        """
        return 0 if self.output_norm == "none" else self.value_channels

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


LinearAttentionConfig = Annotated[
    GatedDeltaConfig | KimiDeltaConfig | Mamba2Config, Field(discriminator="kind")
]


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
            "layer_types has layers of linear attention, but the section is missing. Set "
            "linear_attention.kind=gated_delta, kimi_delta or mamba2.",
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
    size = linear.chunk_length
    if linear.kind == "kimi_delta" and size.bit_count() != 1:
        legal = find_nearest(size, [2**power for power in range(size.bit_length() + 1)])
        yield Violation(
            "linear_attention.chunk_length",
            f"{size} is no power of two, and kimi_delta computes a chunk by halves. Use {legal}.",
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
