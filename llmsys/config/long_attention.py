"""Attention over long sequences (`model.attention`): Longformer and Linformer, and the union of all
kinds.

Linformer is bidirectional. Both read documents and padding themselves, without a table of all
pairs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmsys.config.attention import (
    BaseAttentionConfig,
    LatentAttentionConfig,
    MultiHeadAttentionConfig,
)
from llmsys.config.lsh_attention import LshAttentionConfig
from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    ActivationShape,
    ParameterTensor,
    SavedTensor,
    ScoreShape,
    iter_linear_parameters,
)
from llmsys.config.python_blocks import PythonAttentionConfig
from llmsys.config.segment_memory import SegmentMemoryAttentionConfig
from llmsys.errors import Violation


class _LongAttentionConfig(BaseAttentionConfig):
    """Projections as in multi-head attention, with an own rule for the pairs."""

    has_own_mask: ClassVar[bool] = True
    families: ClassVar[tuple[str, ...]] = ("encoder",)
    positions: ClassVar[tuple[str, ...]] = ("learned", "sinusoidal", "none")
    qkv_bias: bool = Field(False, description="Add a bias to the query, key and value projections.")
    output_bias: bool = Field(False, description="Add a bias to the output projection.")

    @property
    def projections(self) -> MultiHeadAttentionConfig:
        """Configuration of the four projections."""
        return MultiHeadAttentionConfig(qkv_bias=self.qkv_bias, output_bias=self.output_bias)

    @property
    def cross_attention(self) -> MultiHeadAttentionConfig:
        """Configuration of a cross-attention; no family with one has this attention."""
        return self.projections

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters of self-attention."""
        yield from self.projections.iter_projection_parameters(
            model, "attention", keys_input="token"
        )

    def build_score_shape(self, model: ModelShape, keys: int, *, is_causal: bool) -> ScoreShape:
        """Return the shape of scores against `keys` keys."""
        return self.projections.build_score_shape(model, keys, is_causal=is_causal)

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return 0."""
        return 0

    def find_violations(
        self, model: ModelShape, *, family: str, position: str, window: int | None
    ) -> Iterator[Violation]:
        """Yield what the kind cannot be combined with."""
        kind: str = type(self).model_fields["kind"].default
        if family not in self.families:
            reason = "has no cross-attention" if "decoder" in self.families else "is bidirectional"
            yield Violation(
                "attention.kind",
                f"{kind} {reason}, so family={family} cannot use it. Use multi_head, or "
                f"{self.families[-1]}.",
            )
        if window is not None:
            yield Violation(
                "sliding_window", f"attention.kind={kind} chooses its keys itself. Leave it out."
            )
        if position not in self.positions:
            yield Violation(
                "position.kind",
                f"{position} is no position of attention.kind={kind}. Use "
                f"{', '.join(self.positions)}.",
            )


class LongformerAttentionConfig(_LongAttentionConfig):
    """Sliding windows, dilated by head, and global tokens (Beltagy 2020, arXiv:2004.05150).

    The first `num_global_tokens` positions of a row see every position, with projections of their
    own, and every position sees them. A decoder has none of these, and sees the first half of a
    window and itself (4.1).
    """

    kind: Literal["longformer"] = "longformer"
    families: ClassVar[tuple[str, ...]] = ("encoder", "decoder")
    windows: tuple[int, ...] = Field(
        (512,),
        min_length=1,
        description="Positions of a window, half of them on each side; repeated over the layers.",
    )
    dilations: tuple[int, ...] = Field(
        (1,),
        min_length=1,
        description="Distance between the positions of a window; repeated over the heads.",
    )
    num_global_tokens: int = Field(
        1, ge=0, description="Leading positions of a row that see and are seen by all."
    )

    def get_radius(self, layer: int) -> int:
        """Return the positions of a layer's window on each side.

        Args:
            layer: Index of the layer, from 0; `windows` repeats over the layers.
        """
        return self.windows[layer % len(self.windows)] // 2

    def count_block_keys(self, layer: int, *, is_causal: bool) -> int:
        """Return the keys of a block of half a window: its own, those before, and in an encoder
        those after.
        """
        return (2 if is_causal else 3) * self.get_radius(layer) + self.num_global_tokens

    def list_dilations(self, heads: int) -> list[int]:
        """Return the dilation of every head.

        Args:
            heads: Query heads of the layer; `dilations` repeats over them.

        Returns:
            Positions from one key of a window to the next, by head.
        """
        return [self.dilations[head % len(self.dilations)] for head in range(heads)]

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the projections, and those of global tokens."""
        yield from super().iter_parameters(model)
        if not self.num_global_tokens:
            return
        width, hidden, bias = (
            model.num_attention_heads * model.head_dim,
            model.hidden_size,
            self.qkv_bias,
        )
        for row in iter_linear_parameters(
            "attention.global_q_proj", width, hidden, bias, "attention", "sequence"
        ):
            yield replace(row, steps=self.num_global_tokens)
        yield from iter_linear_parameters(
            "attention.global_k_proj", width, hidden, bias, "attention"
        )
        yield from iter_linear_parameters(
            "attention.global_v_proj", width, hidden, bias, "attention"
        )

    def count_products(
        self, model: ModelShape, layer: int, length: int, documents: Sequence[int] | None
    ) -> int:
        """Return the multiplications of scores and weighted sums of a row.

        Args:
            model: widths of the model.
            layer: the layer.
            length: positions of the row.
            documents: lengths of its documents, to count visible pairs; None: all that the blocks
                of a window compute.
        """
        radius, tokens, is_causal = (
            self.get_radius(layer),
            self.num_global_tokens,
            model.family == "decoder",
        )
        keys, pairs = self.count_block_keys(layer, is_causal=is_causal), 0
        for dilation in self.list_dilations(model.num_attention_heads):
            if documents is None:
                padded = -(-length // (radius * dilation)) * radius * dilation
                pairs += padded * keys + tokens * length
            else:
                seen = min(tokens, documents[0])
                local = [documents[0] - seen, *documents[1:]]
                pairs += sum(
                    _count_band_pairs(one, radius, dilation, 1 if is_causal else 2) for one in local
                )
                pairs += seen * (local[0] + documents[0])
        return 2 * model.head_dim * pairs

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
        """Yield the queries, the keys and values of windows, and what global tokens add;
        arguments as elsewhere.
        """
        tokens = shape.compute_sharded_bytes(scores.heads * scores.key_channels)
        yield SavedTensor("queries", tokens, "product", is_saved=are_queries_saved)
        yield SavedTensor("keys and values", 2 * tokens, "product", is_saved=False)
        leading, keys = self.num_global_tokens, self.count_block_keys(0, is_causal=scores.is_causal)
        windows = int(2 * keys / self.get_radius(0) * tokens)
        yield SavedTensor(
            "keys and values of windows", windows, "pointwise", is_saved=are_keys_saved
        )
        calls = len(set(self.list_dilations(scores.heads)))
        yield SavedTensor(
            "visible keys of windows", calls * shape.sequences * shape.length * keys, "pointwise"
        )
        if leading:
            own = tokens * leading // shape.length
            yield SavedTensor("global queries", own, "product", is_saved=are_queries_saved)
            yield SavedTensor(
                "global keys and values", 2 * tokens, "product", is_saved=are_keys_saved
            )
        if leading or calls > 1:
            yield SavedTensor("output of global tokens and windows", tokens, "pointwise")

    def list_score_blocks(
        self, layer: int, scores: ScoreShape, shape: ActivationShape
    ) -> list[tuple[ScoreShape, ActivationShape, bool]]:
        """Return blocks of half a window, for each dilation, and the global tokens."""
        radius, dilations = self.get_radius(layer), self.list_dilations(scores.heads)
        blocks = []
        for dilation in dict.fromkeys(dilations):
            heads, keys = (
                dilations.count(dilation),
                self.count_block_keys(layer, is_causal=scores.is_causal),
            )
            count = -(-shape.length // (radius * dilation)) * dilation * shape.sequences
            own = replace(scores, heads=heads, key_value_heads=heads, keys=keys)
            blocks.append((own, replace(shape, sequences=count, length=radius), True))
        if self.num_global_tokens:
            blocks.append((scores, replace(shape, length=self.num_global_tokens), False))
        return blocks

    def find_violations(
        self, model: ModelShape, *, family: str, position: str, window: int | None
    ) -> Iterator[Violation]:
        """Yield what the kind cannot be combined with, and windows without a middle."""
        yield from super().find_violations(model, family=family, position=position, window=window)
        if family == "decoder" and self.num_global_tokens:
            yield Violation(
                "attention.num_global_tokens",
                f"{self.num_global_tokens} would see later tokens, which family=decoder predicts. "
                "Use 0.",
            )
        if odd := [one for one in self.windows if one < 2 or one % 2]:
            yield Violation(
                "attention.windows", f"{odd[0]} has no two halves. Use {max(2, odd[0] + 1)}."
            )
        if min(self.dilations) < 1:
            yield Violation(
                "attention.dilations", f"{min(self.dilations)} is no distance. Use 1 or more."
            )
        if model.num_key_value_heads != model.num_attention_heads:
            heads = model.num_attention_heads
            yield Violation(
                "num_key_value_heads",
                f"longformer has a key for each of the {heads} heads. Leave it out.",
            )


def _count_band_pairs(length: int, radius: int, dilation: int, sides: int) -> int:
    """Return the pairs of positions at distances 0, dilation, …, radius · dilation, on one side
    or on two.
    """
    reach = min(radius, max(0, length - 1) // dilation)
    return length + sides * (reach * length - dilation * reach * (reach + 1) // 2)


class LinformerAttentionConfig(_LongAttentionConfig):
    """Keys and values of fixed number: trained mixtures of all positions (Wang 2020,
    arXiv:2006.04768).

    A mixture contains every position of a row, so packed documents would see each other, and a
    decoder the future.
    """

    kind: Literal["linformer"] = "linformer"
    mixes_documents: ClassVar[bool] = True
    positions: ClassVar[tuple[str, ...]] = ("learned", "sinusoidal", "rope", "none")
    projected_length: int = Field(256, ge=1, description="Number of mixed keys and values, k.")
    sharing: Literal["none", "heads", "key_value", "layers"] = Field(
        "layers",
        description="One mixture for each key-value head; for all heads; for keys and values too; "
        "for all layers too.",
    )

    @property
    def mixtures(self) -> tuple[str, ...]:
        """Names of the mixtures of one layer."""
        own = ("k_length_proj", "v_length_proj")
        return {"none": own, "heads": own, "key_value": ("length_proj",), "layers": ()}[
            self.sharing
        ]

    def count_mixture_rows(self, key_value_heads: int) -> int:
        """Count the rows of one mixture.

        Args:
            key_value_heads: Key-value heads of the layer.

        Returns:
            Mixed keys, for each head where heads share none.
        """
        return self.projected_length * (key_value_heads if self.sharing == "none" else 1)

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the projections and the mixtures of one layer; products with mixtures are
        scores' (count_products).
        """
        yield from super().iter_parameters(model)
        shape = (self.count_mixture_rows(model.num_key_value_heads), model.max_position_embeddings)
        for name in self.mixtures:
            yield ParameterTensor(f"attention.{name}.weight", shape, "attention")

    def iter_stack_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the mixture that all layers share."""
        if self.sharing == "layers":
            shape = (self.projected_length, model.max_position_embeddings)
            yield ParameterTensor("length_proj.weight", shape, "attention")

    def build_score_shape(self, model: ModelShape, keys: int, *, is_causal: bool) -> ScoreShape:
        """Return the shape of scores against the mixed keys."""
        return super().build_score_shape(model, self.projected_length, is_causal=is_causal)

    def count_products(
        self, model: ModelShape, layer: int, length: int, documents: Sequence[int] | None
    ) -> int:
        """Return the multiplications of mixtures, scores and weighted sums of a row; arguments
        as in Longformer.
        """
        mixed = 2 * model.num_key_value_heads * model.head_dim
        return (
            self.projected_length
            * length
            * (mixed + 2 * model.num_attention_heads * model.head_dim)
        )

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
        """Yield queries, keys and values of all positions, the mixtures in use, and the mixed
        keys and values.
        """
        queries = shape.compute_sharded_bytes(scores.heads * scores.key_channels)
        keys = shape.compute_sharded_bytes(scores.key_value_heads * scores.key_channels)
        yield SavedTensor(
            "queries", queries, "product", is_saved=are_queries_saved and not is_rotated
        )
        if is_rotated:
            yield SavedTensor("rotated queries", queries, "pointwise", is_saved=are_queries_saved)
        yield SavedTensor("keys", keys, "product", is_saved=not is_rotated)
        if is_rotated:
            yield SavedTensor("rotated keys", keys, "pointwise")
        yield SavedTensor("values", keys, "product")
        rows = self.count_mixture_rows(scores.key_value_heads)
        used = len(self.mixtures) * rows * shape.length * shape.value_bytes
        yield SavedTensor("mixtures of positions", used, "pointwise")
        mixed = int(2 * keys * self.projected_length / shape.length)
        yield SavedTensor("mixed keys and values", mixed, "pointwise", is_saved=are_keys_saved)


AttentionConfig = Annotated[
    MultiHeadAttentionConfig
    | LatentAttentionConfig
    | LongformerAttentionConfig
    | LinformerAttentionConfig
    | LshAttentionConfig
    | SegmentMemoryAttentionConfig
    | PythonAttentionConfig,
    Field(discriminator="kind"),
]
