"""One layer of the Transformer: self-attention, cross-attention in an encoder-decoder, and a
feed-forward, as far as the layer has them.

Each is a branch around the residual stream; `model.residual` places the norms.
"""

from collections.abc import Callable
from functools import partial
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmsys.config.attention import LatentAttentionConfig, MultiHeadAttentionConfig
from llmsys.config.linear_attention import (
    GatedDeltaConfig,
    KimiDeltaConfig,
    LinearAttentionConfig,
    Mamba2Config,
)
from llmsys.config.long_attention import (
    AttentionConfig,
    LinformerAttentionConfig,
    LongformerAttentionConfig,
)
from llmsys.config.lsh_attention import LshAttentionConfig
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
from llmsys.config.position import TransformerXlPositionConfig
from llmsys.config.python_blocks import PythonAttentionConfig, PythonFeedForwardConfig
from llmsys.config.segment_memory import SegmentMemoryAttentionConfig
from llmsys.model.dropout import apply_dropout
from llmsys.model.feed_forward import build_feed_forward
from llmsys.model.forward_context import ForwardContext
from llmsys.model.gated_delta_net import GatedDeltaNet
from llmsys.model.kimi_delta_net import KimiDeltaNet
from llmsys.model.latent_attention import MultiHeadLatentAttention
from llmsys.model.linear_mixer import LinearMixer
from llmsys.model.long_attention import LinformerAttention, LongformerAttention
from llmsys.model.lsh_attention import LshAttention
from llmsys.model.mamba2_mixer import Mamba2Mixer
from llmsys.model.moe_layer import MoELayer
from llmsys.model.multi_head_attention import CrossAttention, MultiHeadAttention
from llmsys.model.multipliers import add_multipliers
from llmsys.model.normalization import build_norm
from llmsys.model.parametrization import compute_branch_factor
from llmsys.model.python_block_check import build_python_block, get_python_block
from llmsys.model.relative_attention import RelativeAttention
from llmsys.model.segment_memory import SegmentMemoryAttention

# B rows, T positions, D width

Branch = Callable[[Tensor], Tensor]
# Runs a module of the user's own code on states and the context.
Mix = Callable[[nn.Module, Tensor, ForwardContext], Tensor]


class TransformerBlock(nn.Module):
    """Branches one after another, or side by side in a parallel block. `alpha` is DeepNorm's
    weight of the stream.
    """

    def __init__(self, config: ModelConfig, layer: int, *, alpha: float = 1.0) -> None:
        """Build the branches on the current default device.

        Args:
            config: Config of the stack.
            layer: Index of the block, from 0. It decides on window and rotation, and on experts or
                a dense feed-forward.
            alpha: DeepNorm's weight of the stream, from `compute_deepnorm_alpha`. Default: 1, no
                DeepNorm.
        """
        super().__init__()
        self.residual = config.get_residual(layer)
        self.alpha = alpha
        self.dropout = config.dropout.residual
        self.branch_factor = compute_branch_factor(config)
        self.chunk_length = config.feed_forward_chunk
        self.mix = _build_python_mix(config, layer)
        self.attention: nn.Module | None = None
        self.linear_attention: nn.Module | None = None  # beside attention, in a hybrid layer
        if mixers := config.list_mixers(layer):
            self._add_norms(config, "attention")
            self.attention = build_attention(config, mixers[0], layer)
            if len(mixers) > 1:
                self.linear_attention = build_attention(config, mixers[1], layer)
        self.cross_attention: CrossAttention | None = None
        if config.family == "encoder_decoder":
            self._add_norms(config, "cross_attention")
            self.cross_attention = CrossAttention(config, layer)
        self.feed_forward: nn.Module | None = None
        if config.has_feed_forward(layer):
            self._add_norms(config, "feed_forward")
            self.feed_forward = _build_feed_forward_or_moe(config, layer)
        add_multipliers(config.multipliers, self._list_parts())

    def _list_parts(self) -> dict[str, nn.Module]:
        """Return the modules by the names of their sections."""
        mixers = [one for one in (self.attention, self.linear_attention) if one is not None]
        parts = {
            "linear_attention" if isinstance(one, LinearMixer) else "attention": one
            for one in mixers
        }
        return parts if self.feed_forward is None else parts | {"feed_forward": self.feed_forward}

    def forward(self, x_BTD: Tensor, context: ForwardContext, branch: str | None = None) -> Tensor:
        """Return the next states.

        Args:
            x_BTD: states of all positions.
            context: masks, rotation and cache that all layers share.
            branch: of a reversible stack, the branch to run.

        Returns:
            (B, T, D) in the dtype of the input; of a reversible stack the output of the branch.
        """
        if branch is not None:
            return self._run_reversible_branch(branch, x_BTD, context)
        if isinstance(self.residual, ParallelBlockConfig):
            return self._run_parallel_branches(x_BTD, context)
        return self.run_feed_forward_branch(self.run_attention_branches(x_BTD, context), context)

    def run_attention_branches(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Run self-attention and, in an encoder-decoder, cross-attention. Not used by a parallel
        block.

        Args:
            x_BTD: States of all positions.
            context: Masks, rotations and cache that all layers share.

        Returns:
            The stream with the outputs of these branches, (B, T, D).
        """
        cross = self.cross_attention
        if self.attention is not None:
            x_BTD = self._run_branch(
                "attention", x_BTD, lambda inner: self._run_attention(inner, context)
            )
        if cross is not None:
            x_BTD = self._run_branch("cross_attention", x_BTD, lambda inner: cross(inner, context))
        return x_BTD

    def run_feed_forward_branch(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        """Run the feed-forward or the experts, after attention. Not used by a parallel block.

        Args:
            x_BTD: Result of `run_attention_branches`.
            context: Of the same forward pass.

        Returns:
            The stream with the output of the branch, (B, T, D).
        """
        if self.feed_forward is None:
            return x_BTD
        return self._run_branch(
            "feed_forward", x_BTD, lambda inner: self._run_feed_forward(inner, context)
        )

    def _run_reversible_branch(self, branch: str, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        inner_BTD = self._apply_norm(f"{branch}_norm", x_BTD)
        y_BTD: Tensor = (
            self._run_attention(inner_BTD, context)
            if branch == "attention"
            else self._run_feed_forward(inner_BTD, context)
        )
        return y_BTD

    def _run_parallel_branches(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        inner_BTD = self._apply_norm("attention_norm", x_BTD)
        feed_BTD = (
            inner_BTD
            if "feed_forward_norm" not in self._modules
            else self._apply_norm("feed_forward_norm", x_BTD)
        )
        y_BTD = self._finish_branch(self._run_attention(inner_BTD, context)) + self._finish_branch(
            self._run_feed_forward(feed_BTD, context)
        )
        if self.cross_attention is not None:
            crossed_BTD = self.cross_attention(
                self._apply_norm("cross_attention_norm", x_BTD), context
            )
            y_BTD = y_BTD + self._finish_branch(crossed_BTD)
        return x_BTD + y_BTD

    def _run_branch(self, name: str, x_BTD: Tensor, branch: Branch) -> Tensor:
        """Run one branch with its norms, in the order that the classes in llmsys/config/norm.py
        document.
        """
        match self.residual:
            case PostNormConfig() | DeepNormConfig():
                stream_BTD = x_BTD if self.alpha == 1.0 else self.alpha * x_BTD
                return self._apply_norm(
                    f"{name}_norm", stream_BTD + self._finish_branch(branch(x_BTD))
                )
            case PreNormConfig() | ParallelBlockConfig() | ReversibleConfig():
                y_BTD = branch(self._apply_norm(f"{name}_norm", x_BTD))
            case SandwichNormConfig():
                y_BTD = self._apply_norm(
                    f"{name}_output_norm", branch(self._apply_norm(f"{name}_norm", x_BTD))
                )
            case OutputNormConfig():
                y_BTD = self._apply_norm(f"{name}_output_norm", branch(x_BTD))
            case unreachable:
                assert_never(unreachable)
        return x_BTD + self._finish_branch(y_BTD)

    def _run_attention(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        assert self.attention is not None  # the caller has asked
        y_BTD: Tensor = (
            self.attention(x_BTD, context)
            if self.mix is None
            else self.mix(self.attention, x_BTD, context)
        )
        if self.linear_attention is not None:
            y_BTD = y_BTD + self.linear_attention(x_BTD, context)
        return y_BTD

    def _run_feed_forward(self, x_BTD: Tensor, context: ForwardContext) -> Tensor:
        feed = self.feed_forward
        assert feed is not None  # the caller has asked
        if self.chunk_length is not None and not isinstance(feed, MoELayer):
            return _run_in_chunks(feed, x_BTD, self.chunk_length)
        given = (context.real_BT, context.documents_BT) if isinstance(feed, MoELayer) else ()
        y_BTD: Tensor = feed(x_BTD, *given)
        return y_BTD

    def _apply_norm(self, name: str, x_BTD: Tensor) -> Tensor:
        normed: Tensor = getattr(self, name)(x_BTD)
        return normed

    def _finish_branch(self, y_BTD: Tensor) -> Tensor:
        """Return the output of a branch as it is added to the stream: with dropout, and times
        its multiplier.
        """
        y_BTD = apply_dropout(y_BTD, self.dropout, self.training)
        return y_BTD if self.branch_factor == 1.0 else y_BTD * self.branch_factor

    def _add_norms(self, config: ModelConfig, branch: str) -> None:
        match self.residual:
            case PreNormConfig() | PostNormConfig() | DeepNormConfig() | ReversibleConfig():
                names = [f"{branch}_norm"]
            case SandwichNormConfig():
                names = [f"{branch}_norm", f"{branch}_output_norm"]
            case OutputNormConfig():
                names = [f"{branch}_output_norm"]
            case ParallelBlockConfig(norms=norms):
                # One norm for both branches is attention's.
                names = [] if norms == 1 and branch == "feed_forward" else [f"{branch}_norm"]
            case unreachable:
                assert_never(unreachable)
        for name in names:
            self.add_module(name, build_norm(config, config.hidden_size))


def _run_in_chunks(feed: nn.Module, x_BTD: Tensor, length: int) -> Tensor:
    """Run a feed-forward on `length` positions at a time; the backward pass computes a chunk
    again (Kitaev 2020, 3).
    """
    pieces = x_BTD.split(length, dim=1)
    if not torch.is_grad_enabled():
        return torch.cat([feed(piece) for piece in pieces], dim=1)
    return torch.cat([checkpoint(feed, piece, use_reentrant=False) for piece in pieces], dim=1)


def _build_python_mix(config: ModelConfig, layer: int) -> Mix | None:
    """Return what runs attention of the user's own code; None for a kind that is built in."""
    if not isinstance(config.attention, PythonAttentionConfig):
        return None
    block = get_python_block(config.attention)
    return partial(block.run_module, model=config, layer=layer)


def build_attention(
    config: ModelConfig, mixer: AttentionConfig | LinearAttentionConfig, layer: int
) -> nn.Module:
    """Build the self-attention of a block, or its linear attention.

    Args:
        config: The model.
        mixer: Its section.
        layer: Number of the block; its type, window, rotation and dilation depend on it.

    Returns:
        A module that maps (B, T, D) and the `ForwardContext` to (B, T, D).
    """
    match mixer:
        case GatedDeltaConfig() as attention:
            return GatedDeltaNet(config, attention, layer)
        case KimiDeltaConfig() as attention:
            return KimiDeltaNet(config, attention, layer)
        case Mamba2Config() as attention:
            return Mamba2Mixer(config, attention, layer)
        case LatentAttentionConfig() as attention:
            return MultiHeadLatentAttention(config, attention, layer)
        case LongformerAttentionConfig() as attention:
            return LongformerAttention(config, attention, layer)
        case LinformerAttentionConfig() as attention:
            return LinformerAttention(config, attention, layer)
        case LshAttentionConfig() as attention:
            return LshAttention(config, attention, layer)
        case SegmentMemoryAttentionConfig() as attention:
            return SegmentMemoryAttention(config, attention, layer)
        case PythonAttentionConfig() as attention:
            return build_python_block(attention, config, layer)
        case MultiHeadAttentionConfig() as attention:
            position = config.position
            if isinstance(position, TransformerXlPositionConfig):
                return RelativeAttention(config, attention, position, layer)
            return MultiHeadAttention(config, attention, layer)
        case unreachable:
            assert_never(unreachable)


def _build_feed_forward_or_moe(config: ModelConfig, layer: int) -> nn.Module:
    if config.moe is not None and config.is_moe_layer(layer):
        return MoELayer(config.hidden_size, config.moe)
    if isinstance(config.feed_forward, PythonFeedForwardConfig):
        return build_python_block(config.feed_forward, config, layer)
    width = config.intermediate_size
    return build_feed_forward(
        config.feed_forward, config.hidden_size, width, config.dropout.activation
    )
