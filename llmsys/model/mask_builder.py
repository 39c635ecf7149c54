"""The masks of one stack, each in the form that the kernel of its layers takes.

On a CPU a mask is a table at most (attention_mask.py). On accelerators the kernel is chosen by
llmsys/kernels/attention_kernel.py, and the mask is built for it: lengths, key ranges, or nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import assert_never

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
from llmsys.kernels.attention_kernel import AttentionTraits, choose_attention_kernel
from llmsys.kernels.attention_layers import describe_cross_attention, describe_self_attention
from llmsys.model import attention_device
from llmsys.model.attention_mask import (
    EVERYTHING,
    AttentionMask,
    LayerMask,
    build_cross_attention_mask,
    build_self_attention_mask,
)
from llmsys.model.document_lengths import DocumentLengths, build_document_lengths, build_row_lengths
from llmsys.model.embedding import RelativePositionBias, compute_alibi_bias, compute_alibi_slopes
from llmsys.model.flex_attention import AlibiBias, DistanceBias, ScoreBias, build_flex_mask
from llmsys.model.key_ranges import build_cross_ranges, build_self_ranges
from llmsys.model.kv_cache import EncoderOutput, KeyValueCache
from llmsys.model.varlen_attention import build_varlen_mask

# B rows, T query positions, S key positions, H heads, R distances


@dataclass(frozen=True)
class MaskInputs:
    """The inputs of a forward pass that masks depend on.

    Attributes:
        length: Number of new tokens, T.
        like: The embedded tokens: rows, device and dtype.
        heads: The query heads of this rank.
        bias_table: T5's trained bias.
        documents_BT: Document number of each token.
        document_lengths: The lengths of these documents, where the loader counted them.
        cache: Key-value cache, in generation.
        training: Whether dropout is active.
    """

    length: int
    like: Tensor
    heads: slice
    bias_table: RelativePositionBias | None = None
    documents_BT: Tensor | None = None
    document_lengths: DocumentLengths | None = None
    cache: KeyValueCache | None = None
    training: bool = False

    @property
    def start(self) -> int:
        """Number of cached tokens."""
        return 0 if self.cache is None else self.cache.length

    def get_padding(self) -> Tensor | None:
        """Return the number of leading slots of each row of the cache that are empty, (B,);
        None: no row has any.
        """
        is_padded = self.cache is not None and self.cache.is_padded
        return (
            self.cache.padding_B.to(self.like.device)
            if self.cache is not None and is_padded
            else None
        )


class MaskBuilder:
    """Builder of the masks of one stack."""

    def __init__(self, config: ModelConfig) -> None:
        """Read the window of each layer type.

        Args:
            config: Config of the stack. Every stack but an encoder is causal.
        """
        self.config = config
        self.causal = config.family != "encoder"
        # Linear attention has no mask: it reads documents and padding itself.
        self.windows = {
            config.get_layer_type(i): config.get_attention_window(i)
            for i in range(config.num_hidden_layers)
            if config.has_attention(i)
        }

    def build_self_masks(self, inputs: MaskInputs) -> Mapping[LayerType, LayerMask]:
        """Return the masks of self-attention by layer type.

        Args:
            inputs: documents, positions, device and dtype of the batch.
        """
        if self.config.attention.has_own_mask:
            # Those attentions read documents and padding from the context.
            return dict.fromkeys(self.windows, EVERYTHING)
        if attention_device.describe_device(inputs.like.device) == attention_device.CPU:
            return self.build_tables(inputs, self.windows)
        masks: dict[LayerType, LayerMask] = {}
        for kind, window in self.windows.items():
            traits = describe_self_attention(
                self.config,
                kind,
                dtype=attention_device.get_attention_dtype(inputs.like),
                length=inputs.start + inputs.length,
                # Padded slots of a cache hide keys as documents do.
                has_documents=inputs.documents_BT is not None or inputs.get_padding() is not None,
                is_training=inputs.training,
                is_cached=inputs.cache is not None,
            )
            masks[kind] = self._build_chosen_mask(inputs, traits, kind, window)
        return masks

    def build_cross_mask(self, inputs: MaskInputs, memory: EncoderOutput | None) -> LayerMask:
        """Return the mask of the cross-attention.

        Args:
            inputs: documents, device and dtype of the targets.
            memory: states of the source, with its documents; None: no cross-attention.
        """
        if memory is None:
            return EVERYTHING
        sources = memory.hidden_BSD.shape[1]
        documents = (inputs.documents_BT, memory.documents_BS)
        device = attention_device.describe_device(inputs.like.device)
        if device != attention_device.CPU:
            traits = describe_cross_attention(
                self.config,
                dtype=attention_device.get_attention_dtype(inputs.like),
                length=sources,
                has_documents=any(numbers is not None for numbers in documents),
                is_training=inputs.training,
                is_cached=inputs.cache is not None,
            )
            if choose_attention_kernel(device, traits).kernel == "flex":
                return build_flex_mask(
                    build_cross_ranges(*documents, len(inputs.like), inputs.length, sources)
                )
        return build_cross_attention_mask(*documents, inputs.length, sources)

    def _build_chosen_mask(
        self, inputs: MaskInputs, traits: AttentionTraits, kind: LayerType, window: int | None
    ) -> LayerMask:
        device = inputs.like.device
        choice = choose_attention_kernel(attention_device.describe_device(device), traits)
        window = window if traits.has_window else None
        match choice.kernel:
            case "varlen":
                lengths = inputs.document_lengths
                if inputs.documents_BT is None:
                    lengths = build_row_lengths(len(inputs.like), inputs.length, device)
                elif lengths is None:
                    # A wait: the loader counts them before the batch travels, other callers may
                    # not.
                    lengths = build_document_lengths(inputs.documents_BT.cpu()).map_tensors(
                        lambda x: x.to(device)
                    )
                return build_varlen_mask(lengths, causal=self.causal, window=window)
            case "flex":
                ranges = build_self_ranges(
                    len(inputs.like),
                    inputs.length,
                    causal=self.causal,
                    start=inputs.start,
                    window=window,
                    documents_BT=inputs.documents_BT,
                    padding_B=inputs.get_padding(),
                    device=device,
                )
                return build_flex_mask(ranges, self._build_score_bias(inputs))
            case "sdpa" | "eager" | "chunked":
                return self.build_tables(inputs, {kind: window})[kind]
            case unreachable:
                assert_never(unreachable)

    def build_tables(
        self, inputs: MaskInputs, windows: Mapping[LayerType, int | None]
    ) -> dict[LayerType, AttentionMask]:
        """Return masks as tables at most, by layer type, for kernels that take one.

        Args:
            inputs: Inputs of the forward pass.
            windows: Window of each layer type to build; None: no limit.

        Returns:
            The masks, with ALiBi's or T5's bias in the dtype of the hidden states.
        """
        padding_B = inputs.get_padding()
        masks = {
            kind: build_self_attention_mask(
                inputs.length,
                causal=self.causal,
                start=inputs.start,
                window=window,
                documents_BT=inputs.documents_BT,
                padding_B=padding_B,
                device=inputs.like.device,
            )
            for kind, window in windows.items()
        }
        bias_HTS = self._compute_bias_table(inputs)
        if bias_HTS is not None:
            masks = {
                kind: mask.add_bias(bias_HTS.to(inputs.like.dtype)) for kind, mask in masks.items()
            }
        return masks

    def _compute_bias_table(self, inputs: MaskInputs) -> Tensor | None:
        """Return the ALiBi or T5 bias of the scores, (H, T, S).

        It depends on distances alone, so slots of the cache serve as positions, also where rows are
        padded or packed.
        """
        end = inputs.start + inputs.length
        device = inputs.like.device
        queries_T = torch.arange(inputs.start, end, device=device)
        keys_S = torch.arange(end, device=device)
        match self.config.position:
            case AlibiConfig() as position:
                slopes_H = compute_alibi_slopes(self.config.num_attention_heads)[inputs.heads].to(
                    device
                )
                return position.factor * compute_alibi_bias(slopes_H, queries_T, keys_S)
            case RelativeBiasConfig():
                assert inputs.bias_table is not None
                bias_HTS: Tensor = inputs.bias_table(
                    queries_T, keys_S, bidirectional=not self.causal
                )[inputs.heads]
                return bias_HTS
            case (
                RopeConfig()
                | LearnedPositionConfig()
                | SinusoidalPositionConfig()
                | TransformerXlPositionConfig()
                | NoPositionConfig()
            ):
                return None
            case unreachable:
                assert_never(unreachable)

    def _build_score_bias(self, inputs: MaskInputs) -> ScoreBias | None:
        """Return the same bias by distance, for a kernel that adds it to each score."""
        end = inputs.start + inputs.length
        device = inputs.like.device
        match self.config.position:
            case AlibiConfig() as position:
                slopes_H = compute_alibi_slopes(self.config.num_attention_heads)[inputs.heads]
                # non_blocking: the host must not wait for a copy of a few numbers.
                return AlibiBias(
                    (position.factor * slopes_H).to(device, non_blocking=True), inputs.start
                )
            case RelativeBiasConfig():
                assert inputs.bias_table is not None
                distances_R = torch.arange(1 - end, end, device=device)
                origin = torch.zeros(1, dtype=distances_R.dtype, device=device)
                bias_H1R = inputs.bias_table(origin, distances_R, bidirectional=not self.causal)[
                    inputs.heads
                ]
                # In float32: the gradient of a distance is a sum over all pairs at that distance.
                return DistanceBias(bias_H1R[:, 0].float().contiguous(), inputs.start)
            case (
                RopeConfig()
                | LearnedPositionConfig()
                | SinusoidalPositionConfig()
                | TransformerXlPositionConfig()
                | NoPositionConfig()
            ):
                return None
            case unreachable:
                assert_never(unreachable)
