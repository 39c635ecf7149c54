"""A stack of blocks: position embeddings and a norm before the blocks, a norm after them.

A decoder or an encoder is one stack. An encoder-decoder is two, of the same class with different
configs.
"""

from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.config.norm import (
    DeepNormConfig,
    OutputNormConfig,
    ParallelBlockConfig,
    PostNormConfig,
    PreNormConfig,
    ReversibleConfig,
    SandwichNormConfig,
)
from llmsys.config.position import (
    AlibiConfig,
    LearnedPositionConfig,
    NoPositionConfig,
    RelativeBiasConfig,
    RopeConfig,
    SinusoidalPositionConfig,
    TransformerXlPositionConfig,
)
from llmsys.model.document_lengths import DocumentLengths
from llmsys.model.dropout import apply_dropout
from llmsys.model.embedding import (
    LearnedPositionEmbedding,
    RelativePositionBias,
    SinusoidalPositionEmbedding,
)
from llmsys.model.forward_context import ContextBuilder, ForwardContext
from llmsys.model.kv_cache import EncoderOutput, KeyValueCache
from llmsys.model.long_attention import LengthProjection, build_shared_length_projection
from llmsys.model.normalization import build_norm
from llmsys.model.patch_embedding import build_learned_positions
from llmsys.model.recurrence import build_recurrence
from llmsys.model.reversible import run_reversible_blocks
from llmsys.model.rnn import build_recurrent_stack
from llmsys.model.transformer_block import TransformerBlock

# B rows, T positions, D width


class LayerStack(nn.Module):
    """The layers between embedded tokens and the head. `alpha` is DeepNorm's, which depends on
    the full model.
    """

    def __init__(self, config: ModelConfig, *, alpha: float = 1.0) -> None:
        """Build the layers on the current default device.

        Args:
            config: Config of this stack: of an encoder-decoder's encoder that of the encoder.
            alpha: DeepNorm's weight of the stream, from `compute_deepnorm_alpha`. It depends on the
                depths of encoder and decoder, so a stack cannot compute it. Default: 1, no
                DeepNorm.
        """
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.positions: LearnedPositionEmbedding | None = None
        self.sinusoids: SinusoidalPositionEmbedding | None = None
        self.relative_bias: RelativePositionBias | None = None
        self._add_positions(config)
        self.length_proj: LengthProjection | None = build_shared_length_projection(config)
        self.embedding_norm = build_norm(config, width) if config.embedding.norm else None
        self.blocks = nn.ModuleList(_build_blocks(config, alpha))
        self.skip_scales: nn.Parameter | None = None
        if config.u_shaped_skips:
            self.skip_scales = nn.Parameter(torch.ones(config.num_hidden_layers // 2))
        self.recurrence = build_recurrence(config)
        self.norm = build_norm(config, width) if _has_final_norm(config) else None
        self.shared = ContextBuilder(config)

    def _add_positions(self, config: ModelConfig) -> None:
        match config.position:
            case LearnedPositionConfig() as position:
                self.positions = build_learned_positions(config, position)
            case SinusoidalPositionConfig() as position:
                self.sinusoids = SinusoidalPositionEmbedding(config, position)
            case RelativeBiasConfig() as position:
                self.relative_bias = RelativePositionBias(position, config.num_attention_heads)
            case RopeConfig() | AlibiConfig() | TransformerXlPositionConfig() | NoPositionConfig():
                pass  # Rotations and scores belong to attention: see ContextBuilder.
            case unreachable:
                assert_never(unreachable)

    def run_blocks(
        self,
        embedded_BTD: Tensor,
        *,
        documents_BT: Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        token_types_BT: Tensor | None = None,
        cache: KeyValueCache | None = None,
        memory: EncoderOutput | None = None,
        real_BT: Tensor | None = None,
        predicted_BP: Tensor | None = None,
        tokens_BT: Tensor | None = None,
        layers: range | None = None,
    ) -> tuple[Tensor, ForwardContext]:
        """Run the blocks, without the final norm and the head.

        Args:
            embedded_BTD: Embedded tokens. Hidden states where `layers` lacks the first layer.
            documents_BT: As in `Transformer.forward`.
            document_lengths: As in `Transformer.forward`.
            token_types_BT: Segment ids, for attention that compares segments (XLNet).
            cache: Keys and values of earlier calls; advanced by T after the last block.
            memory: Encoder output, for cross-attention.
            real_BT: False at padding. Default: padding is where `documents_BT` is negative.
            predicted_BP: Positions of the query stream (XLNet), whose states are appended to the
                others.
            tokens_BT: Token ids, for layers that look them up.
            layers: Layers to run: a stage of a pipeline. Default: all.

        Returns:
            Hidden states after the last of these blocks, (B, T, D), or (B, T + P, D) with a query
            stream; and the context that the blocks shared.
        """
        context = self.shared(
            embedded_BTD.shape[1],
            embedded_BTD,
            bias_table=self.relative_bias,
            documents_BT=documents_BT,
            document_lengths=document_lengths,
            token_types_BT=token_types_BT,
            cache=cache,
            memory=memory,
            real_BT=real_BT,
            predicted_BP=predicted_BP,
            training=self.training,
        )
        if self.length_proj is not None:
            context = replace(context, length_projection_NT=self.length_proj(embedded_BTD.shape[1]))
        if self.config.embedding.value_layers:
            context = replace(context, tokens_BT=tokens_BT)
        if predicted_BP is not None:
            embedded_BTD = self.get_submodule("mask_embedding")(embedded_BTD, predicted_BP.shape[1])
        positions_BTD = self._embed_positions(context.positions_BT, embedded_BTD.dtype)
        x_BTD = embedded_BTD
        if layers is None or 0 in layers:
            # A recurrence adds the positions itself, before every step.
            x_BTD = self._prepare_embedding(
                x_BTD, positions_BTD if self.recurrence is None else None
            )
        if self.recurrence is not None:
            x_BTD = self.recurrence(self.blocks[0], x_BTD, positions_BTD, context)
        elif self.config.residual.is_reversible:
            x_BTD = run_reversible_blocks(self.select_blocks(layers), x_BTD, context)
        elif self.skip_scales is not None:
            x_BTD = self._run_with_skips(self.skip_scales, x_BTD, context)
        else:
            for block in self.select_blocks(layers):
                x_BTD = block(x_BTD, context)
        # After the last layer: every layer writes at the cache's old length.
        if cache is not None:
            cache.advance(embedded_BTD.shape[1])
        return x_BTD, context

    def _run_with_skips(
        self, scales: nn.Parameter, x_BTD: Tensor, context: ForwardContext
    ) -> Tensor:
        """Run all blocks, with the outputs of the first half added to the inputs of their mirror
        images.
        """
        # Once: ZeRO-3 reduces a gradient after each use of a parameter.
        unused = list(scales.unbind())
        kept: list[Tensor] = []
        for layer, block in enumerate(self.blocks):
            if layer >= len(self.blocks) - len(scales):
                x_BTD = x_BTD + unused.pop() * kept.pop()
            x_BTD = block(x_BTD, context)
            if layer < len(scales):
                kept.append(x_BTD)
        return x_BTD

    def select_blocks(self, layers: range | None) -> list[nn.Module]:
        """Return the blocks of some layers. In a pipeline a rank lacks those of other stages.

        Args:
            layers: Indices of layers. None: all that are here.

        Returns:
            The blocks in depth order.
        """
        return [
            block
            for name, block in self.blocks.named_children()
            if layers is None or int(name) in layers
        ]

    def apply_final_norm(self, x_BTD: Tensor) -> Tensor:
        """Apply the final norm, followed in training by dropout."""
        x_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        return self._apply_stack_dropout(x_BTD, self.config.dropout.final)

    def _embed_positions(self, positions_BT: Tensor, dtype: torch.dtype) -> Tensor | None:
        positions = self.sinusoids if self.positions is None else self.positions
        return None if positions is None else positions(positions_BT).to(dtype)

    def _prepare_embedding(self, x_BTD: Tensor, positions_BTD: Tensor | None = None) -> Tensor:
        x_BTD = x_BTD if positions_BTD is None else x_BTD + positions_BTD
        x_BTD = x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)
        return self._apply_stack_dropout(x_BTD, self.config.dropout.embedding)

    def _apply_stack_dropout(self, x_BTD: Tensor, probability: float) -> Tensor:
        return apply_dropout(x_BTD, probability, self.training)


def _build_blocks(config: ModelConfig, alpha: float) -> list[nn.Module]:
    """Return the blocks with their own weights; recurrent layers are one block together."""
    if config.rnn is not None:
        return [build_recurrent_stack(config, config.rnn)]
    return [TransformerBlock(config, layer, alpha=alpha) for layer in range(config.num_blocks)]


def _has_final_norm(config: ModelConfig) -> bool:
    if config.rnn is not None:
        return False
    match config.residual:
        case PostNormConfig() | DeepNormConfig() as residual:
            return residual.final_norm
        case (
            PreNormConfig()
            | SandwichNormConfig()
            | OutputNormConfig()
            | ParallelBlockConfig()
            | ReversibleConfig()
        ):
            return True
        case unreachable:
            assert_never(unreachable)
