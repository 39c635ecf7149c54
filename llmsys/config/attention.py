"""Configuration of attention (`model.attention`): multi-head and multi-head latent attention.

Head counts and widths are fields of ModelConfig under Hugging Face's names. A kind has the fields
in which families differ. It lists its parameters, the shape of its scores and its saved tensors:
llmsys/estimate has no code per kind.

To add a kind: a class here or in long_attention.py, which has the union `AttentionConfig`, its
module in llmsys/model, its dispatch in llmsys/model/transformer_block.py, and a row in
tests/helpers/model_sections.py.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    FP32_BYTES,
    ActivationShape,
    Input,
    ParameterTensor,
    SavedTensor,
    ScoreShape,
    iter_linear_parameters,
)
from llmsys.config.section import Section
from llmsys.config.sparse_attention import SparseAttentionConfig
from llmsys.errors import Violation


class FoldedRow(NamedTuple):
    """The calls of the kernel that a row becomes: `blocks` of `queries`, each with as many keys
    and `earlier` more.
    """

    blocks: int
    queries: int
    earlier: int


class BaseAttentionConfig(Section):
    """Base of the kinds of attention. By default every pair that the mask of the stack shows is
    computed.
    """

    # llmsys/parallel shards the module over the tensor and context axes; otherwise both axes must
    # be 1.
    can_shard_sequences: ClassVar[bool] = False
    # The module reads documents and padding itself: the stack builds no mask for it.
    has_own_mask: ClassVar[bool] = False
    # Scores are computed again in the backward pass: only what iter_saved_tensors yields is saved.
    recomputes_scores: ClassVar[bool] = False
    # The cache holds the inputs of the layer, which every step computes with anew.
    recomputes_prefix: ClassVar[bool] = False
    # Documents of one window see each other: nothing of the kind hides one from another.
    mixes_documents: ClassVar[bool] = False

    def iter_stack_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters that all layers of a stack share.

        Args:
            model: widths of the model.
        """
        yield from ()

    def list_score_blocks(
        self, layer: int, scores: ScoreShape, shape: ActivationShape
    ) -> list[tuple[ScoreShape, ActivationShape, bool]]:
        """Return the calls of the kernel in a layer where they are several.

        Args:
            layer: number of the layer.
            scores: shape of the scores of a whole row.
            shape: the micro-batch of one rank.

        Returns:
            For each call the shape of its scores, its micro-batch, and whether it has a table of
            biases;
            empty: one call over the whole row.
        """
        return []

    def count_products(
        self, model: ModelShape, layer: int, length: int, documents: Sequence[int] | None
    ) -> int | None:
        """Return the multiplications of scores and weighted sums of a row.

        Args:
            model: widths of the model.
            layer: number of the layer.
            length: positions of the row.
            documents: lengths of its documents, to count visible pairs; None: all that are
                computed.

        Returns:
            Multiplications over all heads; None where the pairs that the mask shows decide.
        """
        return None

    def count_backward_products(
        self, model: ModelShape, length: int, documents: Sequence[int] | None
    ) -> int:
        """Return the multiplications that the backward pass of a row has beyond two for each one of
        the forward pass; below 0 where it has fewer.

        Args:
            model: widths of the model.
            length: positions of the row.
            documents: as in `count_products`.
        """
        return 0

    def count_plain_products(self, model: ModelShape, length: int) -> int:
        """Return the multiplications of pairs of a row that no attention kernel computes, and that
        selective checkpointing repeats.

        Args:
            model: widths of the model.
            length: positions of the row.
        """
        return 0

    def fold_row(self, length: int) -> FoldedRow:
        """Return how queries and keys of a row meet.

        Args:
            length: positions of the row.
        """
        return FoldedRow(1, length, 0)

    def count_pairs(self, length: int, documents: Sequence[int] | None) -> int | None:
        """Return the pairs of a query and a key of a row; None where the mask of the stack decides.

        Args:
            length: positions of the row.
            documents: lengths of its documents, to count visible pairs; None: all that are
                computed.
        """
        return None

    def find_violations(
        self, model: ModelShape, *, family: str, position: str, window: int | None
    ) -> Iterator[Violation]:
        """Yield what the kind cannot be combined with, with keys below `model`.

        Args:
            model: widths of the model.
            family: `model.family`.
            position: kind of `model.position`.
            window: `model.sliding_window`.
        """
        yield from ()


class MultiHeadAttentionConfig(BaseAttentionConfig):
    """Multi-head attention (Vaswani et al. 2017); GQA or MQA where num_key_value_heads is below
    num_attention_heads.
    """

    kind: Literal["multi_head"] = "multi_head"
    can_shard_sequences: ClassVar[bool] = True
    qkv_bias: bool = Field(False, description="Add a bias to the query, key and value projections.")
    output_bias: bool = Field(False, description="Add a bias to the output projection.")
    qk_norm: Literal["none", "head", "full"] = Field(
        "none",
        description="Normalize queries and keys: per head (Qwen3), or over all heads (OLMo 2).",
    )
    scale: float | None = Field(
        None, gt=0, description="Scale of the scores. null: 1 / sqrt(head_dim). T5: 1."
    )
    logit_softcap: float | None = Field(
        None, gt=0, description="Soft cap: replace each score by cap · tanh(score / cap) (Gemma 2)."
    )
    sinks: bool = Field(
        False,
        description="Add one learned sink logit per head to the softmax denominator (gpt-oss).",
    )
    clip: float | None = Field(
        None, gt=0, description="Clamp queries, keys and values to ±clip (DBRX, OLMoE)."
    )
    output_gate: bool = Field(
        False,
        description="Multiply the outputs of the heads by the sigmoid of one more projection "
        "(Qiu 2025, arXiv:2505.06708; Qwen3-Next).",
    )

    @property
    def cross_attention(self) -> "MultiHeadAttentionConfig":
        """Configuration of the decoder's cross-attention."""
        return self

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters of self-attention."""
        yield from self.iter_projection_parameters(model, "attention", keys_input="token")
        if self.sinks:
            yield ParameterTensor("attention.sinks", (model.num_attention_heads,), "attention")

    def iter_projection_parameters(
        self, model: ModelShape, name: str, *, keys_input: Input
    ) -> Iterator[ParameterTensor]:
        """Yield the q, k, v and o projections and the QK norms.

        Args:
            model: widths of the model.
            name: prefix of the parameter names, such as `attention` or `cross_attention`.
            keys_input: input of the key and value projections, which is the source in
                cross-attention.
        """
        hidden, bias = model.hidden_size, self.qkv_bias
        queries = model.num_attention_heads * model.head_dim
        keys = model.num_key_value_heads * model.head_dim
        yield from iter_linear_parameters(f"{name}.q_proj", queries, hidden, bias, "attention")
        yield from iter_linear_parameters(
            f"{name}.k_proj", keys, hidden, bias, "attention", keys_input
        )
        yield from iter_linear_parameters(
            f"{name}.v_proj", keys, hidden, bias, "attention", keys_input
        )
        yield from iter_linear_parameters(
            f"{name}.o_proj", hidden, queries, self.output_bias, "attention"
        )
        if self.output_gate:
            yield from iter_linear_parameters(f"{name}.g_proj", queries, hidden, bias, "attention")
        if self.qk_norm != "none":
            is_full = self.qk_norm == "full"
            yield from model.norm.iter_parameters(
                f"{name}.q_norm", queries if is_full else model.head_dim
            )
            yield from model.norm.iter_parameters(
                f"{name}.k_norm", keys if is_full else model.head_dim
            )

    def build_score_shape(self, model: ModelShape, keys: int, *, is_causal: bool) -> ScoreShape:
        """Return the shape of scores.

        Args:
            model: widths of the model.
            keys: keys of each row.
            is_causal: a query sees the keys up to its own position only.
        """
        return ScoreShape(
            model.num_attention_heads,
            model.num_key_value_heads,
            model.head_dim,
            model.head_dim,
            keys,
            is_causal,
            self.logit_softcap is not None,
            self.sinks,
            self.scale,
        )

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return the query and key channels per token that the QK norms read; 0 without them.

        Args:
            model: widths of the model.
        """
        if self.qk_norm == "none":
            return 0
        return model.head_dim * (model.num_attention_heads + model.num_key_value_heads)

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
        """Yield the tensors from the projections to the kernel's inputs.

        Args:
            model: widths of the model.
            scores: shape that `build_score_shape` returned.
            shape: the micro-batch of one rank.
            is_rotated: RoPE is applied to queries and keys.
            are_queries_saved: the kernel saves its query input; otherwise it saves a copy of its
                own.
            are_keys_saved: the same for keys and values.
        """
        is_normed, share = self.qk_norm != "none", scores.keys / shape.length
        queries = shape.compute_sharded_bytes(scores.heads * scores.key_channels)
        keys = int(
            shape.compute_sharded_bytes(scores.key_value_heads * scores.key_channels) * share
        )
        inputs = (
            ("queries", queries, scores.heads, are_queries_saved),
            ("keys", keys, scores.key_value_heads, are_keys_saved),
        )
        for name, size, _, is_saved in inputs:
            yield SavedTensor(
                name, size, "product", is_saved=is_normed or (is_saved and not is_rotated)
            )
        yield SavedTensor("values", keys, "product", is_saved=are_keys_saved)
        for name, size, heads, is_saved in inputs:
            if is_normed:
                yield from self._iter_norm_tensors(
                    model, name, size, heads, shape, is_saved and not is_rotated
                )
            if is_rotated:
                yield SavedTensor(f"rotated {name}", size, "pointwise", is_saved=is_saved)
        if self.output_gate:
            gate = shape.compute_sharded_bytes(scores.heads * scores.value_channels)
            yield SavedTensor("output gate", gate, "product", is_saved=False)
            yield SavedTensor("sigmoid of the output gate", gate, "pointwise")
            yield SavedTensor("gated output", gate, "pointwise")

    def _iter_norm_tensors(
        self,
        model: ModelShape,
        name: str,
        size: int,
        heads: int,
        shape: ActivationShape,
        is_saved: bool,
    ) -> Iterator[SavedTensor]:
        """Yield the saved tensors of a QK norm over `size` bytes of queries or keys."""
        channels = model.head_dim if self.qk_norm == "head" else model.head_dim * heads
        rows = size // shape.value_bytes // channels
        statistics = rows * model.norm.compute_row_statistics_bytes(shape)
        yield SavedTensor(f"statistics of normed {name}", statistics, "pointwise")
        if model.norm.is_unscaled_input_saved(shape):
            yield SavedTensor(f"unscaled {name}", size, "fused")
        yield SavedTensor(f"normed {name}", size, "pointwise", is_saved=is_saved)


class LatentAttentionConfig(BaseAttentionConfig):
    """Multi-head latent attention: keys and values are projected up from one cached latent (MLA;
    DeepSeek-V2, 2.1).
    """

    kind: Literal["latent"] = "latent"
    can_shard_sequences: ClassVar[bool] = True
    q_lora_rank: int | None = Field(
        None, ge=1, description="Rank of the query latent. null: one full-rank projection."
    )
    kv_lora_rank: int = Field(512, ge=1, description="Rank of the key-value latent.")
    qk_nope_head_dim: int = Field(
        128, ge=1, description="Channels of a query or key head without rotary embedding."
    )
    qk_rope_head_dim: int = Field(
        64,
        ge=2,
        description="Channels with rotary embedding; all heads share this part of the key.",
    )
    v_head_dim: int = Field(128, ge=1, description="Channels of a value head.")
    bias: bool = Field(
        False,
        description="Add a bias to the projections into the latents and to the output projection.",
    )
    norm_eps: float = Field(1e-6, gt=0, description="Epsilon of the norms on the latents.")
    scale: float | None = Field(
        None,
        gt=0,
        description="Scale of the scores. null: 1 / sqrt(qk_nope_head_dim + qk_rope_head_dim).",
    )
    sparse: SparseAttentionConfig | None = Field(
        None,
        description="Attend to the keys that an indexer chooses (DeepSeek-V3.2). null: to all.",
    )

    @property
    def cross_attention(self) -> MultiHeadAttentionConfig:
        """Configuration of the decoder's cross-attention: plain multi-head attention."""
        # MLA's decoupled RoPE key needs queries and keys of one sequence.
        return MultiHeadAttentionConfig()

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the down-projections, the norms of the latents and the up-projections
        (DeepSeek-V2, 2.1).
        """
        heads, hidden, rank = model.num_attention_heads, model.hidden_size, self.kv_lora_rank
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        if self.q_lora_rank is None:
            yield from iter_linear_parameters(
                "attention.q_proj", queries, hidden, False, "attention"
            )
        else:
            yield from iter_linear_parameters(
                "attention.q_a_proj", self.q_lora_rank, hidden, self.bias, "attention"
            )
            yield ParameterTensor("attention.q_a_norm.weight", (self.q_lora_rank,), "norms")
            yield from iter_linear_parameters(
                "attention.q_b_proj", queries, self.q_lora_rank, False, "attention"
            )
        down = rank + self.qk_rope_head_dim
        yield from iter_linear_parameters(
            "attention.kv_a_proj", down, hidden, self.bias, "attention"
        )
        yield ParameterTensor("attention.kv_a_norm.weight", (rank,), "norms")
        up = heads * (self.qk_nope_head_dim + self.v_head_dim)
        yield from iter_linear_parameters("attention.kv_b_proj", up, rank, False, "attention")
        values = heads * self.v_head_dim
        yield from iter_linear_parameters(
            "attention.o_proj", hidden, values, self.bias, "attention"
        )
        if self.sparse is not None and self.q_lora_rank is not None:
            yield from self.sparse.iter_parameters(model, self.q_lora_rank)

    def count_products(
        self, model: ModelShape, layer: int, length: int, documents: Sequence[int] | None
    ) -> int | None:
        """Return the multiplications of a row with an indexer: its scores, and attention and its
        weights over the keys that it chooses. None without one.
        """
        if self.sparse is None:
            return None
        width = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        pairs = self.sparse.count_kernel_pairs(length, documents)
        own = self.sparse.count_index_products(length, documents)
        shares = self._count_share_products(model, pairs)
        return own + shares + pairs * model.num_attention_heads * width

    def count_backward_products(
        self, model: ModelShape, length: int, documents: Sequence[int] | None
    ) -> int:
        """Return minus what the weights that an indexer learns from cost: they have no gradient."""
        if self.sparse is None:
            return 0
        pairs = self.sparse.count_kernel_pairs(length, documents)
        return -2 * self._count_share_products(model, pairs)

    def count_plain_products(self, model: ModelShape, length: int) -> int:
        """Return the multiplications of an indexer's scores and of the weights that it learns
        from.
        """
        if self.sparse is None:
            return 0
        shares = self._count_share_products(model, length**2)
        return shares + self.sparse.count_index_products(length, None)

    def _count_share_products(self, model: ModelShape, pairs: int) -> int:
        """Return the multiplications of attention weights outside of the kernel, which does not
        return them.
        """
        return pairs * model.num_attention_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

    def build_score_shape(self, model: ModelShape, keys: int, *, is_causal: bool) -> ScoreShape:
        """Return the shape of scores against `keys` keys."""
        # The up-projection gives every query head its own key.
        heads, channels = model.num_attention_heads, self.qk_nope_head_dim + self.qk_rope_head_dim
        return ScoreShape(heads, heads, channels, self.v_head_dim, keys, is_causal)

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return 0."""
        return 0  # the norms read latents, not heads

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
        """Yield the latents, their norms, the full queries and keys, and the joint product of keys
        and values.

        The arguments are those of MultiHeadAttentionConfig. Rotation writes into the full queries
        and keys.
        """
        if self.q_lora_rank is not None:
            yield SavedTensor(
                "query latent", shape.compute_residual_bytes(self.q_lora_rank), "product"
            )
            yield from self._iter_norm_tensors("query latent", self.q_lora_rank, shape)
        queries = shape.compute_sharded_bytes(scores.heads * scores.key_channels)
        yield SavedTensor("query parts", queries, "product", is_saved=False)
        latent = shape.compute_residual_bytes(self.kv_lora_rank + self.qk_rope_head_dim)
        yield SavedTensor("key-value latent", latent, "product")
        yield from self._iter_norm_tensors("key-value latent", self.kv_lora_rank, shape)
        keys_values = shape.compute_sharded_bytes(
            scores.heads * (self.qk_nope_head_dim + self.v_head_dim)
        )
        yield SavedTensor("keys and values", keys_values, "product", is_saved=are_keys_saved)
        yield SavedTensor("whole queries", queries, "pointwise", is_saved=are_queries_saved)
        yield SavedTensor("whole keys", queries, "pointwise", is_saved=are_keys_saved)
        if self.sparse is not None:
            yield from self.sparse.iter_saved_tensors(shape)

    def _iter_norm_tensors(
        self, name: str, channels: int, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        yield SavedTensor(
            f"statistics of the {name}", shape.compute_residual_bytes(1, FP32_BYTES), "pointwise"
        )
        # In float32 a CPU runs several ops; latents have RMS norms whatever model.norm is.
        if shape.is_on_cpu and shape.value_bytes == FP32_BYTES:
            yield SavedTensor(f"unscaled {name}", shape.compute_residual_bytes(channels), "fused")
        yield SavedTensor(f"normed {name}", shape.compute_residual_bytes(channels), "pointwise")
