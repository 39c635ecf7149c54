"""Tensors that all layers of one stack share during a forward pass: masks, rotations, cache,
encoder output.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, assert_never

import torch
from torch import Tensor

from llmsys.config.layer_types import LayerType
from llmsys.config.model import ModelConfig
from llmsys.config.position import (
    AlibiConfig,
    LearnedPositionConfig,
    NoPositionConfig,
    RelativeBiasConfig,
    RopeConfig,
    SinusoidalPositionConfig,
    TransformerXlPositionConfig,
)
from llmsys.errors import ConfigError
from llmsys.model.attention_mask import (
    EVERYTHING,
    AttentionMask,
    LayerMask,
    compute_document_positions,
)
from llmsys.model.document_lengths import DocumentLengths
from llmsys.model.embedding import RelativePositionBias, SinusoidalPositionEmbedding
from llmsys.model.kv_cache import EncoderOutput, KeyValueCache
from llmsys.model.mask_builder import MaskBuilder, MaskInputs
from llmsys.model.query_stream import build_stream_mask
from llmsys.model.rotary_embedding import RotaryBuilder, RotaryCosSin

# B rows, T query positions, S key positions, H heads, D width, R distances

ALL_HEADS = slice(None)
Value = TypeVar("Value")


@dataclass(frozen=True)
class ForwardContext:
    """Shared inputs of the layers of one stack. Masks and rotations are keyed by layer type.

    Neither a tensor nor a module, so that no wrapper casts its contents.

    Attributes:
        masks: Self-attention masks.
        positions_BT: Positions that are added to the embedding.
        rotations: Rotary tables.
        distances_RD: Sinusoids of distances (Transformer-XL).
        segments: Segment numbers of queries and keys (XLNet).
        predicted_BP: Positions of the query stream, whose states follow the others (XLNet).
        cache: Key-value cache, in generation.
        memory: Encoder output, in an encoder-decoder.
        cross_mask: Mask of the cross-attention.
        real_BT: False where a token is padding, which experts do not count; None: no padding.
        heads: The query heads of this rank. Per-head parameters and biases are cut to them.
        step: Step of a block that repeats; the cache has an entry for each.
        documents_BT: Document numbers, for attention that masks by itself.
        length_projection_NT: Mixture of positions that all layers share (Linformer).
    """

    masks: Mapping[LayerType, LayerMask]
    positions_BT: Tensor
    rotations: Mapping[LayerType, RotaryCosSin] = field(default_factory=dict)
    distances_RD: Tensor | None = None
    segments: tuple[Tensor, Tensor] | None = None
    cache: KeyValueCache | None = None
    memory: EncoderOutput | None = None
    cross_mask: LayerMask = EVERYTHING
    real_BT: Tensor | None = None
    """False where a token is padding, which experts must not count. None: no padding."""
    heads: slice = field(default_factory=lambda: ALL_HEADS)
    """The query heads that attention is asked about here: what belongs to heads is cut to them."""
    step: int = 0
    documents_BT: Tensor | None = None
    length_projection_NT: Tensor | None = None
    predicted_BP: Tensor | None = None
    tokens_BT: Tensor | None = None
    """Token ids, for tables that layers look up."""
    kept: dict[str, Any] | None = None
    """What a repeated pass must not compute anew, by name; None: it computes the same."""

    @property
    def num_predicted(self) -> int:
        """Positions of the query stream; 0 without one."""
        return 0 if self.predicted_BP is None else self.predicted_BP.shape[1]

    def get_or_compute(self, name: str, compute: Callable[[], Value]) -> Value:
        """Compute once and reuse during activation recomputation.

        Args:
            name: Name of the value in this pass.
            compute: Called in the first pass only.

        Returns:
            The result of the first pass.
        """
        if self.kept is None:
            return compute()
        if name not in self.kept:
            self.kept[name] = compute()
        value: Value = self.kept[name]
        return value

    def rotate_and_cache(
        self,
        kind: LayerType,
        layer: int,
        rotated: bool,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        kept_BT: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate queries and keys, and append the keys and `kept_BT` of layer `layer` to the cache.

        Returns:
            The queries, and the keys and `kept_BT` of all positions so far.
        """
        rotation = self.rotations.get(kind) if rotated else None
        if rotation is not None:
            q_BTHK, k_BTGK = rotation(q_BTHK), rotation(k_BTGK)
        if self.cache is not None:
            k_BTGK, kept_BT = self.cache.append_layer(layer + self.step, k_BTGK, kept_BT)
        return q_BTHK, k_BTGK, kept_BT


class ContextBuilder:
    """Builder of the `ForwardContext` of one stack. Holds tables without parameters: rotations,
    slopes, sinusoids.

    `heads` may be set from outside, where this rank computes only some of the heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.heads = ALL_HEADS
        self.masks = MaskBuilder(config)
        self.rotations: RotaryBuilder | None = None
        self.sinusoids: SinusoidalPositionEmbedding | None = None
        match config.position:
            case RopeConfig() as position:
                self.rotations = RotaryBuilder(config, position)
            case TransformerXlPositionConfig():
                # Transformer-XL's sinusoids put all sines before all cosines (Dai 2019, released
                # code).
                halves = SinusoidalPositionConfig(arrangement="halves")
                self.sinusoids = SinusoidalPositionEmbedding(config, halves)
            case AlibiConfig() | RelativeBiasConfig():
                pass  # Added to the scores: see MaskBuilder.
            case LearnedPositionConfig() | SinusoidalPositionConfig() | NoPositionConfig():
                pass  # Added to the embedding by LayerStack, or absent.
            case unreachable:
                assert_never(unreachable)

    def __call__(
        self,
        length: int,
        like: Tensor,
        *,
        bias_table: RelativePositionBias | None = None,
        documents_BT: Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        token_types_BT: Tensor | None = None,
        cache: KeyValueCache | None = None,
        memory: EncoderOutput | None = None,
        real_BT: Tensor | None = None,
        predicted_BP: Tensor | None = None,
        training: bool = False,
    ) -> ForwardContext:
        """Build the context of a forward pass over new tokens.

        Args:
            length: Number of new tokens, T.
            like: Embedded tokens, (B, …): the masks get their device and dtype.
            bias_table: T5's trained bias. Default: None, the stack has none.
            documents_BT: Document id of each token; negative at padding. Not together with a cache.
                Default: each row is one document.
            document_lengths: Lengths of these documents, where the loader counted them.
            token_types_BT: Segment ids (XLNet).
            cache: Keys and values of earlier tokens: positions continue after them. Not advanced
                here.
            memory: Encoder output; without it there is no mask of cross-attention.
            real_BT: False at padding. Default: padding is where `documents_BT` is negative.
            predicted_BP: Positions of the query stream, for which masks get P more rows (XLNet).
            training: Whether dropout is active.

        Returns:
            The context, for one forward pass.

        Raises:
            ConfigError: More positions than the model or the cache has, or documents together with
                a cache.
        """
        start = 0 if cache is None else cache.length
        _check_inputs(self.config, start + length, documents_BT, cache)
        device = like.device
        inputs = MaskInputs(
            length,
            like,
            self.heads,
            bias_table,
            documents_BT,
            document_lengths,
            cache=cache,
            training=training,
        )
        if real_BT is None and documents_BT is not None:
            # Padding has negative document numbers.
            real_BT = documents_BT >= 0
        masks = self.masks.build_self_masks(inputs)
        segments = None
        if token_types_BT is not None:
            segments = _collect_segments(token_types_BT, cache, predicted_BP)
        if predicted_BP is not None:
            masks = {
                kind: build_stream_mask(_get_table(mask), predicted_BP, length)
                for kind, mask in masks.items()
            }
        return ForwardContext(
            masks=masks,
            positions_BT=compute_positions(length, documents_BT, cache, device),
            rotations=self._build_rotations(length, cache, device),
            distances_RD=self._compute_distance_sinusoids(
                start, length, like, is_cached=cache is not None
            ),
            segments=segments,
            cache=cache,
            memory=memory,
            cross_mask=self.masks.build_cross_mask(inputs, memory),
            real_BT=real_BT,
            heads=self.heads,
            documents_BT=documents_BT,
            predicted_BP=predicted_BP,
        )

    def _build_rotations(
        self, length: int, cache: KeyValueCache | None, device: torch.device
    ) -> Mapping[LayerType, RotaryCosSin]:
        if self.rotations is None:
            return {}
        if cache is not None and self.config.attention.recomputes_prefix:
            # Of all positions. Empty slots on the left move both of a pair, so no score changes.
            return self.rotations(cache.length + length, None, device)
        return self.rotations(length, cache, device)

    def _compute_distance_sinusoids(
        self, start: int, length: int, like: Tensor, *, is_cached: bool
    ) -> Tensor | None:
        """Return the sinusoids of distances start + length - 1 down to 1 - length, (R, D)."""
        if self.sinusoids is None:
            return None
        if not is_cached:
            _, length, start = self.config.attention.fold_row(length)
        distances_R = torch.arange(start + length - 1, -length, -1, device=like.device)
        return self.sinusoids(distances_R).to(like.dtype)


def _check_inputs(
    config: ModelConfig, length: int, documents_BT: Tensor | None, cache: KeyValueCache | None
) -> None:
    if cache is not None:
        if documents_BT is not None:
            raise ConfigError(
                "Documents and a key-value cache cannot be combined. Put each document into its "
                "own row."
            )
        cache.require_capacity(length - cache.length)
        # Positions count from the first real token of a row, so the row with the least padding is
        # the longest.
        length -= int(cache.padding_B.min())
    if length > config.max_position_embeddings and not config.interpolates_positions:
        limit = config.max_position_embeddings
        raise ConfigError(
            f"A sequence of {length} tokens exceeds model.max_position_embeddings={limit}. Use "
            f"batch.sequence_length={limit} or less, or raise model.max_position_embeddings."
        )


def compute_positions(
    length: int, documents_BT: Tensor | None, cache: KeyValueCache | None, device: torch.device
) -> Tensor:
    """Compute the positions of new tokens: every document, and every row of a cache, begins at 0.

    Args:
        length: Number of the tokens, T.
        documents_BT: Document id of each; None: a row is one document.
        cache: Cache of earlier tokens, which the new ones follow.
        device: Device of the result.

    Returns:
        (B, T), or (1, T) where rows do not differ. Padded slots of a cache have position 0.
    """
    if cache is not None:
        return cache.get_positions(cache.length, cache.length + length).to(device)
    return (
        torch.arange(length, device=device)[None]
        if documents_BT is None
        else compute_document_positions(documents_BT)
    )


def _get_table(mask: LayerMask) -> AttentionMask:
    assert isinstance(mask, AttentionMask), "choose_attention_kernel gives distance scores a table"
    return mask


def _collect_segments(
    token_types_BT: Tensor, cache: KeyValueCache | None, predicted_BP: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the segments of the queries (B, T), those of the query stream among them, and of
    the keys (B, S).
    """
    if predicted_BP is not None:
        return torch.cat(
            [token_types_BT, token_types_BT.gather(1, predicted_BP.clamp(min=0))], 1
        ), token_types_BT
    if cache is None:
        return token_types_BT, token_types_BT
    return token_types_BT, cache.append_layer("segments", token_types_BT)[0]
