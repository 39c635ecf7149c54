"""The Transformer: token ids to logits or hidden states. Loss and parallelism are applied from
outside.

Invariants:
- Parameter names are part of the checkpoint format and do not change. `llmsys estimate CONFIG
  --explain` lists them.
- A decoder or an encoder is one stack, without a prefix; that of an encoder-decoder's source is
  under `encoder.`.
- In a pipeline a rank has the modules of its stages, under the names that they have in the full
  model (llmsys/parallel/pipeline.py).
- Tied, `head.weight` is `embed.weight` itself, and so is the source embedding unless it has its own
  vocabulary.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.head import ClassificationHeadConfig
from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError
from llmsys.model.deepnorm import compute_deepnorm_alpha
from llmsys.model.document_lengths import DocumentLengths
from llmsys.model.dropout import apply_dropout
from llmsys.model.embedding import TokenEmbedding, compute_bigram_rows, get_embedding_scale
from llmsys.model.forward_context import ForwardContext, compute_positions
from llmsys.model.kv_cache import EncoderOutput, KeyValueCache
from llmsys.model.layer_stack import LayerStack
from llmsys.model.lightning_indexer import LightningIndexer
from llmsys.model.moe_layer import MoELayer
from llmsys.model.multi_token_prediction import MultiTokenPredictionModule, shift_tokens
from llmsys.model.output_head import (
    build_extras,
    build_head,
    get_next_sentence_head,
    pool_positions,
)
from llmsys.model.patch_embedding import build_input_embedding
from llmsys.model.recurrence import AdaptiveRecurrence

# B rows, T positions, S source positions, D width, V vocabulary

# Source token ids, their document ids and the lengths of the documents.
EncoderInput = tuple[Tensor | None, Tensor | None, DocumentLengths | None]

AuxiliaryLayer = MoELayer | AdaptiveRecurrence | LightningIndexer

# (head, hidden_BTD, places) → the result of the forward pass instead of logits, such as the loss of
# the targets `places` beyond the next token. For a classifier the head is None, and hidden_BTD
# holds its logits.
Finish = Callable[[nn.Module | None, Tensor, int], Tensor]


class Transformer(LayerStack):
    """A decoder, an encoder, or both, as the config composes it."""

    def __init__(self, config: ModelConfig) -> None:
        """Build the model on the current default device.

        On the meta device it has shapes only: `materialize_parameters` then allocates and fills
        parameters and buffers.

        Args:
            config: The `model:` section. Tied weights become one parameter.
        """
        super().__init__(config, alpha=compute_deepnorm_alpha(config))
        self.embed = build_input_embedding(config)
        self.embedding_scale = get_embedding_scale(config)
        source = config.embedding.source_vocab_size
        types = config.embedding.token_types
        self.source_embed = None if source is None else TokenEmbedding(source, config.hidden_size)
        types = types if config.family == "encoder" else 0
        self.token_types = TokenEmbedding(types, config.hidden_size) if types else None
        rows = config.embedding.bigram_rows
        self.bigram_embed = None if rows is None else TokenEmbedding(rows, config.hidden_size)
        self.encoder: LayerStack | None = None
        if config.family == "encoder_decoder":
            self.encoder = LayerStack(
                config.encoder_model, alpha=compute_deepnorm_alpha(config, encoder=True)
            )
        self.head = build_head(config)
        for name, module in build_extras(config).items():
            self.add_module(name, module)
        depth = 0 if config.multi_token_prediction is None else config.multi_token_prediction.depth
        self.prediction = nn.ModuleList(MultiTokenPredictionModule(config) for _ in range(depth))
        # An attribute, so that forward returns one tensor with and without prediction modules.
        self.predicted: list[Tensor] = []
        self.shapes_elsewhere: dict[str, torch.Size] = {}
        """Tensors of the training state that only other ranks of a pipeline hold."""
        self.run_pipeline: Callable[[Tensor, KeyValueCache], Tensor] | None = None
        """In a pipeline: returns the logits (B, V) after new tokens (B, T) that follow a cache,
        on all ranks.
        """
        self.num_moe_layers = len(moe_layers := self.list_moe_layers())
        for number, layer in enumerate(moe_layers):
            layer.number = number
        self._tie_weights()

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        documents_BT: Tensor | None = None,
        document_lengths: DocumentLengths | None = None,
        source_BS: Tensor | None = None,
        source_documents_BS: Tensor | None = None,
        source_document_lengths: DocumentLengths | None = None,
        token_types_BT: Tensor | None = None,
        next_sentence_B: Tensor | None = None,
        predicted_BP: Tensor | None = None,
        real_BT: Tensor | None = None,
        memory: EncoderOutput | None = None,
        cache: KeyValueCache | None = None,
        finish: Finish | None = None,
        layers: range | None = None,
        hidden_BTD: Tensor | None = None,
    ) -> Tensor:
        """Run the model and return its logits.

        In training mode `self.predicted` then holds the outputs of the modules of multi-token
        prediction, one tensor per module.

        Args:
            tokens_BT: Token ids, integer, (B, T). In an encoder-decoder: those of the target. In a
                model of images: the bytes of patches, (B, N, P).
            documents_BT: Document id of each token, integer, (B, T). Tokens attend only within
                their document, and position ids restart at each document. Padding has a negative
                id. Default: each row is one document.
            document_lengths: Lengths of the documents in `documents_BT`. Without them, kernels for
                packed documents wait for the accelerator to count them.
            source_BS: Token ids of the source, (B, S). Only for an encoder-decoder.
            source_documents_BS: Document ids of the source, (B, S). Target tokens attend to source
                tokens with the same id. Default: 0.
            source_document_lengths: Lengths of the documents in `source_documents_BS`.
            token_types_BT: Segment ids of an encoder (BERT), (B, T). Default: 0.
            next_sentence_B: Next-sentence label of each row. Its loss is recorded by
                `NextSentenceHead.record_loss` and is not part of the result.
            predicted_BP: Positions to predict, in this order; negative entries are padding (XLNet).
                The logits are those of these positions, (B, P, V).
            real_BT: False at padding, which experts neither route nor count. Default: padding is
                where `documents_BT` is negative.
            memory: Result of `encode_source`, instead of `source_BS`.
            cache: Keys and values of earlier calls, extended in place. `tokens_BT` then holds the
                new tokens only. The source or memory is given with the first call and kept.
            finish: Called with head and hidden states. Its result is returned instead of logits, so
                that a loss need not hold all logits at once.
            layers: Layers to run: a stage of a pipeline. Default: all.
            hidden_BTD: Hidden states of the pipeline stage before, instead of embedded tokens.

        Returns:
            Logits (B, T, V) in the dtype of the weights; (B, labels) of a classifier; hidden states
            (B, T, D) of a model without a head, and of a stage that lacks the last layer.

        Raises:
            ConfigError: More positions than the model or the cache has, documents together with a
                cache, or a source that is missing, given twice or not supported.
        """
        new = tokens_BT.shape[1]
        if layers is None:
            # Stages get what their runner has selected for all of them.
            tokens_BT = self.select_input_tokens(tokens_BT, cache)
        x_BTD, context = self.run_blocks(
            self._embed_tokens(tokens_BT, token_types_BT, documents_BT, cache)
            if hidden_BTD is None
            else hidden_BTD,
            documents_BT=documents_BT,
            document_lengths=document_lengths,
            token_types_BT=token_types_BT,
            cache=cache,
            memory=self._find_encoder_output(
                (source_BS, source_documents_BS, source_document_lengths), memory, cache
            ),
            real_BT=real_BT,
            predicted_BP=predicted_BP,
            tokens_BT=tokens_BT,
            layers=layers,
        )
        if not self.has_last_layer(layers):
            return x_BTD
        if self.training and self.prediction and self.head is not None:
            self.predicted = self._run_prediction_modules(
                self.head, tokens_BT, x_BTD, context, finish
            )
        return self._compute_output(
            x_BTD, context.num_predicted or new, next_sentence_B, finish, context.real_BT
        )

    def _compute_output(
        self,
        x_BTD: Tensor,
        new: int,
        labels_B: Tensor | None,
        finish: Finish | None,
        real_BT: Tensor | None,
    ) -> Tensor:
        """Return the result of `forward` for the last `new` positions; of images, for all."""
        if isinstance(self.config.head, ClassificationHeadConfig):
            hidden_BTD = self._compute_class_logits(x_BTD, self.config.head.pooling, real_BT)
        else:
            hidden_BTD = self.apply_final_norm(
                x_BTD if self.config.patches is not None else x_BTD[:, -new:]
            )
        if labels_B is not None:
            get_next_sentence_head(self).record_loss(self.pool_first_position(hidden_BTD), labels_B)
        if finish is not None:
            return finish(self.head, hidden_BTD, 0)
        return hidden_BTD if self.head is None else self.head(hidden_BTD)

    def encode_source(
        self,
        source_BS: Tensor,
        source_documents_BS: Tensor | None = None,
        source_document_lengths: DocumentLengths | None = None,
    ) -> EncoderOutput:
        """Encode a source once, for any number of forward passes.

        Args:
            source_BS: Token ids, integer, (B, S).
            source_documents_BS: Document ids, (B, S), kept for cross-attention. Default: 0.
            source_document_lengths: Lengths of these documents.

        Returns:
            The hidden states (B, S, D) after the final norm, with the document ids.

        Raises:
            ConfigError: The model has no encoder.
        """
        if self.encoder is None:
            raise ConfigError(
                f"A source was given, but model.family={self.config.family} has no encoder. Omit "
                "it."
            )
        embed = self.embed if self.source_embed is None else self.source_embed
        x_BSD, _ = self.encoder.run_blocks(
            self._scale_embedding(embed(source_BS)),
            documents_BT=source_documents_BS,
            document_lengths=source_document_lengths,
        )
        return EncoderOutput(self.encoder.apply_final_norm(x_BSD), source_documents_BS)

    def pool_first_position(self, hidden_BTD: Tensor) -> Tensor:
        """Return BERT's pooled vector: tanh of a linear layer over the first position, (B, T, D)
        to (B, D).
        """
        return torch.tanh(self.get_submodule("pooler")(hidden_BTD[:, 0]))

    def compute_next_sentence_logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return BERT's two logits: the second sentence follows, or it does not.

        Args:
            hidden_BTD: last hidden states, of which the first position is read.

        Returns:
            (B, 2).
        """
        logits_B2: Tensor = get_next_sentence_head(self)(self.pool_first_position(hidden_BTD))
        return logits_B2

    def has_last_layer(self, layers: range | None) -> bool:
        """Return whether a stage with these layers has the head and the loss."""
        return layers is None or self.config.num_hidden_layers - 1 in layers

    def list_moe_layers(self, layers: range | None = None) -> list[MoELayer]:
        """List the mixture-of-experts layers in depth order; prediction modules are last.

        Args:
            layers: blocks of a pipeline stage; None: all.
        """
        return [one for one in self._iter_stage_modules(layers) if isinstance(one, MoELayer)]

    def list_indexers(self, layers: range | None = None) -> list[LightningIndexer]:
        """List the indexers of sparse attention in depth order; prediction modules are last.

        Args:
            layers: blocks of a pipeline stage; None: all.
        """
        return [
            one for one in self._iter_stage_modules(layers) if isinstance(one, LightningIndexer)
        ]

    def list_auxiliary_layers(self, layers: range | None = None) -> list[AuxiliaryLayer]:
        """List the layers with their own losses and counters: experts, indexers, and positions that
        halt by themselves.

        Args:
            layers: Blocks of a pipeline stage, which select among layers with experts and indexers.
                Default: all.

        Returns:
            Layers with experts in depth order, then indexers, then the recurrence.
        """
        return [
            *self.list_moe_layers(layers),
            *self.list_indexers(layers),
            *(one for one in self.modules() if isinstance(one, AdaptiveRecurrence)),
        ]

    def _iter_stage_modules(self, layers: range | None) -> Iterator[nn.Module]:
        parts: list[nn.Module] = [self]
        if layers is not None:
            parts = [
                *self.select_blocks(layers),
                *(self.prediction if self.has_last_layer(layers) else ()),
            ]
        for part in parts:
            yield from part.modules()

    def compute_auxiliary_loss(self) -> Tensor:
        """Return the auxiliary losses of the last forward pass in training: balance of experts,
        router z-loss, indexers, pondering.

        Returns:
            A weighted sum over layers of means over tokens, ready to be added to a loss that is
            a mean over tokens; 0 without any. A scalar.
        """
        losses = [layer.compute_auxiliary_loss() for layer in self.list_auxiliary_layers()]
        return (
            torch.stack(losses).sum()
            if losses
            else torch.zeros((), device=self.embed.weight.device)
        )

    def compute_auxiliary_share(
        self, num_tokens: Tensor, num_source_tokens: Tensor, layers: range | None = None
    ) -> Tensor:
        """Return the share of the last training forward in the weighted auxiliary losses of the
        step; 0 without any.

        Every layer's loss is a mean over the tokens that it has seen: in an encoder-decoder the
        encoder sees the source.

        Args:
            num_tokens: Real tokens of the step, over all ranks and micro-batches.
            num_source_tokens: Real tokens of the source.
            layers: The layers that ran; None: all.
        """
        of_source = (
            set() if self.encoder is None else {id(module) for module in self.encoder.modules()}
        )
        shares = [
            layer.sum_auxiliary_losses()
            / (num_source_tokens if id(layer) in of_source else num_tokens)
            for layer in self.list_auxiliary_layers(layers)
        ]
        return torch.stack(shares).sum() if shares else torch.zeros_like(num_tokens)

    def reset_buffers(self) -> None:
        """Recompute every buffer, after `to_empty` has given a meta-device model storage without
        values.
        """
        # The model has this method too, and would call itself.
        for module in self.modules():
            reset = None if module is self else getattr(module, "reset_buffers", None)
            if reset is not None:
                reset()

    def _embed_tokens(
        self,
        tokens_BT: Tensor,
        token_types_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        x_BTD = self._scale_embedding(self.embed(tokens_BT))
        if self.bigram_embed is not None:
            x_BTD = x_BTD + self._embed_bigrams(self.bigram_embed, tokens_BT, documents_BT, cache)
        if self.token_types is not None:
            x_BTD = x_BTD + self.token_types(
                torch.zeros_like(tokens_BT) if token_types_BT is None else token_types_BT
            )
        return x_BTD

    def _embed_bigrams(
        self,
        embed: TokenEmbedding,
        tokens_BT: Tensor,
        documents_BT: Tensor | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        """Return the vectors of pairs of a token and the one before it in its document."""
        start, length = 0, tokens_BT.shape[1]
        known_BS = tokens_BT
        if cache is not None:
            start = cache.length
            (known_BS,) = cache.append_layer("bigrams", tokens_BT)
        previous_BT = F.pad(known_BS, (1, 0))[:, start : start + length]
        positions_BT = compute_positions(length, documents_BT, cache, tokens_BT.device)
        return embed(  # type: ignore[no-any-return]
            compute_bigram_rows(tokens_BT, previous_BT, positions_BT, self.config)
        )

    def _scale_embedding(self, x_BTD: Tensor) -> Tensor:
        return x_BTD if self.embedding_scale == 1.0 else x_BTD * self.embedding_scale

    def _find_encoder_output(
        self, source: EncoderInput, memory: EncoderOutput | None, cache: KeyValueCache | None
    ) -> EncoderOutput | None:
        """Return the encoder output to attend to; a cache keeps the one that it is given."""
        source_BS, documents_BS, lengths = source
        encoded = (
            None if source_BS is None else self.encode_source(source_BS, documents_BS, lengths)
        )
        if encoded is not None and memory is not None:
            raise ConfigError("Both a source and its encoder output were given. Give one of them.")
        memory = encoded if memory is None else memory
        if cache is not None and memory is not None:
            if cache.memory is not None:
                raise ConfigError(
                    "The cache already has a source. Give the source with the first call only."
                )
            cache.memory = memory
        memory = cache.memory if cache is not None else memory
        if (memory is None) != (self.encoder is None):
            family = self.config.family
            state = (
                "is missing. Give source_BS"
                if memory is None
                else "was given, but it has no encoder. Omit it"
            )
            raise ConfigError(f"The source of a model with family={family} {state}.")
        return memory

    def select_input_tokens(self, tokens_BT: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return the tokens to run: the new ones, or all where the rotation of the cached ones has
        changed with the length.

        Args:
            tokens_BT: The new tokens.
            cache: The cache, which is emptied where all tokens are returned; None: there is none.
        """
        rotations = self.shared.rotations
        if cache is None or rotations is None or not rotations.is_length_dependent:
            return tokens_BT
        cache.require_capacity(tokens_BT.shape[1])
        cache.append_layer("tokens", tokens_BT)
        must_recompute = rotations.must_recompute(cache, tokens_BT.shape[1])
        return cache.reset_and_get_tokens(tokens_BT) if must_recompute else tokens_BT

    def _run_prediction_modules(
        self,
        head: nn.Module,
        tokens_BT: Tensor,
        x_BTD: Tensor,
        context: ForwardContext,
        finish: Finish | None,
    ) -> list[Tensor]:
        """Return the logits of each prediction module, or the results of `finish`.

        Those of module k, counted from 1, belong to the targets k positions ahead, (B, T - k, V):
        entry t has seen tokens up to t + k and predicts the one after.
        """
        predicted = []
        length = tokens_BT.shape[1]
        for k, module in enumerate(self.prediction, start=1):
            x_BTD = module(x_BTD, self._embed_tokens(shift_tokens(tokens_BT, k)), context)
            hidden_BTD = module.get_submodule("norm")(x_BTD[:, : max(length - k, 0)])
            predicted.append(head(hidden_BTD) if finish is None else finish(head, hidden_BTD, k))
        return predicted

    def _compute_class_logits(
        self, x_BTD: Tensor, pooling: Literal["first", "mean"] | None, real_BT: Tensor | None
    ) -> Tensor:
        """Return class logits: one vector of the sequence, dropout, linear layer."""
        hidden_BTD = x_BTD if self.norm is None else self.norm(x_BTD)
        pooled_BD = (
            self.pool_first_position(hidden_BTD)
            if pooling is None
            else pool_positions(hidden_BTD, pooling, real_BT)
        )
        pooled_BD = apply_dropout(pooled_BD, self.config.dropout.final, self.training)
        logits: Tensor = self.get_submodule("classifier")(pooled_BD)
        return logits

    def _tie_weights(self) -> None:
        if self.config.tie_word_embeddings and self.head is not None:
            # Not through the attributes, which may return the weight in another dtype
            # (parallel/mixed_precision.py).
            self.head._parameters["weight"] = self.embed._parameters["weight"]

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # `to_empty` gives every module its own new parameter, which would untie the pair silently.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie_weights()
        return self
