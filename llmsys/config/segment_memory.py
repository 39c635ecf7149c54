"""Transformer-XL's attention (`model.attention.kind=segment_memory`): segments that see a memory
of those before.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field

from llmsys.config.attention import BaseAttentionConfig, FoldedRow, MultiHeadAttentionConfig
from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import ActivationShape, ParameterTensor, SavedTensor, ScoreShape
from llmsys.errors import Violation


class SegmentMemoryAttentionConfig(BaseAttentionConfig):
    """Causal attention within segments, and to the states before a segment, without a gradient (Dai
    2019, 3.2).

    A row is cut into segments. A position sees the earlier ones of its segment and the last
    `memory_length` before the segment, whose states come from the layer below and get no gradient.
    All segments of a row are computed at once, with the weights of one step; the memory begins
    empty with every row.
    """

    kind: Literal["segment_memory"] = "segment_memory"
    has_own_mask: ClassVar[bool] = True
    segment_length: int = Field(128, ge=1, description="Positions of a segment.")
    memory_length: int = Field(
        128,
        ge=0,
        description="Positions before a segment that it sees. May differ between training and "
        "evaluation.",
    )
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

    def fold_row(self, length: int) -> FoldedRow:
        """Return the segments of a row as calls of an attention kernel.

        Args:
            length: Positions of the row.

        Returns:
            Segments, positions of each, and keys before each. The memory is no longer than what
            precedes the last segment.
        """
        queries = min(self.segment_length, length)
        segments = -(-length // queries)
        return FoldedRow(segments, queries, min(self.memory_length, (segments - 1) * queries))

    def count_pairs(self, length: int, documents: Sequence[int] | None) -> int:
        """Return the visible pairs of a row, or all that its segments compute."""
        row = self.fold_row(length)
        if documents is None:
            return row.blocks * row.queries * (row.earlier + row.queries)
        pairs = begin = 0
        for size in documents:
            for segment in range(begin // row.queries, -(-(begin + size) // row.queries)):
                first, end = (
                    max(begin, segment * row.queries),
                    min(begin + size, (segment + 1) * row.queries),
                )
                # keys before the first query
                seen = first - max(begin, segment * row.queries - row.earlier)
                pairs += (end - first) * seen + (end - first) * (end - first + 1) // 2
            begin += size
        return pairs

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the projections. Keys and values are computed with a gradient, and for the
        memory without one.
        """
        for row in self.projections.iter_projection_parameters(
            model, "attention", keys_input="token"
        ):
            has_memory = self.memory_length > 0 and row.name.startswith(
                ("attention.k_proj", "attention.v_proj")
            )
            yield replace(row, steps=2, cut_steps=1) if has_memory else row

    def build_score_shape(self, model: ModelShape, keys: int, *, is_causal: bool) -> ScoreShape:
        """Return the shape of scores against `keys` keys."""
        return self.projections.build_score_shape(model, keys, is_causal=is_causal)

    def count_normed_channels(self, model: ModelShape) -> int:
        """Return 0."""
        return 0

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
        """Yield queries, keys and values, and the keys and values of segments with their memory."""
        queries = shape.compute_sharded_bytes(scores.heads * scores.key_channels)
        keys = shape.compute_sharded_bytes(scores.key_value_heads * scores.key_channels)
        yield SavedTensor("queries", queries, "product", is_saved=are_queries_saved)
        row = self.fold_row(shape.length)
        copies = 2 * keys * row.blocks * (row.earlier + row.queries) // shape.length
        yield SavedTensor(
            "keys and values", 4 * keys if row.earlier else 2 * keys, "product", is_saved=False
        )
        yield SavedTensor(
            "keys and values of segments", copies, "pointwise", is_saved=are_keys_saved
        )
        visible = shape.sequences * row.blocks * row.queries * (row.earlier + row.queries)
        yield SavedTensor("visible keys of segments", visible, "pointwise")
        # A fused kernel saves its output, which the last matmul reads as it is.
        yield SavedTensor(
            "output of segments", queries, "pointwise", is_saved=not are_queries_saved
        )

    def list_score_blocks(
        self, layer: int, scores: ScoreShape, shape: ActivationShape
    ) -> list[tuple[ScoreShape, ActivationShape, bool]]:
        """Return one call of the kernel, with a row for each segment."""
        row = self.fold_row(shape.length)
        own = replace(scores, keys=row.earlier + row.queries)
        return [
            (own, replace(shape, sequences=shape.sequences * row.blocks, length=row.queries), True)
        ]

    def find_violations(
        self, model: ModelShape, *, family: str, position: str, window: int | None
    ) -> Iterator[Violation]:
        """Yield what the kind cannot be combined with."""
        if family != "decoder":
            yield Violation(
                "attention.kind",
                f"segment_memory is causal and has no cross-attention, so family={family} cannot "
                "use it."
                " Use multi_head, or family=decoder.",
            )
        if window is not None:
            yield Violation(
                "sliding_window",
                "attention.kind=segment_memory limits keys by its memory. Leave it out, or use "
                "multi_head.",
            )
        if position != "transformer_xl":
            yield Violation(
                "position.kind",
                f"{position} is not relative to a memory. attention.kind=segment_memory needs "
                "transformer_xl.",
            )
