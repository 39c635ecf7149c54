"""The Transformer: token ids in, next-token logits out. Loss, optimizer and parallelism are other rooms' business.

Parameter names are part of the checkpoint format and do not change:

    embed.weight
    blocks.{i}.attention_norm.weight            (and .bias for layernorm, here and in every norm)
    blocks.{i}.attention.{q,k,v,o}_proj.weight
    blocks.{i}.feed_forward_norm.weight
    blocks.{i}.feed_forward.{gate,up,down}_proj.weight                dense; gelu and relu have no gate
    blocks.{i}.feed_forward.router.weight                             mixture of experts
    blocks.{i}.feed_forward.experts.{gate,up,down}_proj               stacked: (experts, in, out)
    blocks.{i}.feed_forward.shared.{gate,up,down}_proj.weight
    norm.weight
    head.weight                                                       the same parameter as embed.weight when tied

and one saved buffer, blocks.{i}.feed_forward.balance_bias_E.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError
from llmsys.model.attention import AttentionContext
from llmsys.model.block import Block
from llmsys.model.cache import KeyValueCache
from llmsys.model.embedding import TokenEmbedding
from llmsys.model.mask import document_mask
from llmsys.model.moe import MoE
from llmsys.model.norm import build_norm
from llmsys.model.rotary import RotaryTable

# B rows, T positions, D width, V vocabulary


class Transformer(nn.Module):
    """A decoder-only Transformer, dense or mixture of experts, as `config` composes it."""

    def __init__(self, config: ModelConfig) -> None:
        """Build on the current default device, the meta device included (see `reset_buffers`)."""
        super().__init__()
        self.config = config
        self.embed = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.rotary: RotaryTable | None = _rotary(config)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = build_norm(config, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._tie()

    def forward(
        self, tokens_BT: Tensor, *, documents_BT: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Logits for the token after each position, shape (B, T, V), in the dtype of the weights.

        Args:
            tokens_BT: token ids, integer.
            documents_BT: a number per token; a token sees earlier tokens of equal number only. None: all earlier ones.
            cache: keys and values of earlier calls, extended in place; tokens_BT then holds the new tokens only.

        Raises:
            ConfigError: more positions than the model or the cache has, or documents together with a cache.
        """
        context = self._context(tokens_BT, documents_BT, cache)
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, context)
        if cache is not None:
            cache.advance(tokens_BT.shape[1])
        logits_BTV: Tensor = self.head(self.norm(x_BTD))
        return logits_BTV

    def moe_layers(self) -> list[MoE]:
        """The mixture-of-experts layers in depth order."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def auxiliary_loss(self) -> Tensor:
        """The balance losses of the last training forward, weighted and summed over layers; 0 when there are none.

        A mean over tokens, ready to be added to a loss that is a mean over tokens too.
        """
        losses = [layer.weighted_balance_loss() for layer in self.moe_layers()]
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.embed.weight.device)

    def reset_buffers(self) -> None:
        """Recompute every buffer, after `to_empty` has given a meta-device model memory without values."""
        for layer in self.moe_layers():
            layer.reset_buffers()

    def _context(self, tokens_BT: Tensor, documents_BT: Tensor | None, cache: KeyValueCache | None) -> AttentionContext:
        length, device = tokens_BT.shape[1], tokens_BT.device
        if cache is None:
            _check_length(length, self.config.max_position_embeddings)
            mask_B1TS = None if documents_BT is None else document_mask(documents_BT)
            rotation = None if self.rotary is None else self.rotary(None, length, device=device)
            return AttentionContext(rotation, mask_B1TS, None)
        if documents_BT is not None:
            raise ConfigError("Documents and a key-value cache cannot be combined. Put each document into its own row.")
        cache.check(length)
        positions_BT = cache.positions(length)
        _check_length(int(positions_BT.max()) + 1, self.config.max_position_embeddings)
        rotation = None if self.rotary is None else self.rotary(positions_BT, int(positions_BT.max()) + 1, device=device)
        return AttentionContext(rotation, cache.mask(length).to(device), cache)

    def _tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.head.weight = self.embed.weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # `to_empty` gives every module its own new parameter, which would part the tied pair without a word.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self


def _rotary(config: ModelConfig) -> RotaryTable | None:
    return RotaryTable(config, config.position) if config.position.kind == "rope" else None


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise ConfigError(
            f"A sequence of {length} tokens is longer than model.max_position_embeddings={limit}. "
            f"Use batch.sequence_length={limit} or less, or raise model.max_position_embeddings."
        )
