"""Configuration of the architecture (`model:`, or a file under configs/model).

Field names follow Hugging Face's config.json, which is accepted too (llmsys/hugging_face).

Invariants:
- Every accepted value can be estimated.
- Each violation names the field, the rule and the nearest legal value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.attention import MultiHeadAttentionConfig
from llmsys.config.embedding import EmbeddingConfig
from llmsys.config.feed_forward import DenseFeedForwardConfig, SwigluConfig
from llmsys.config.head import (
    DropoutConfig,
    EncoderConfig,
    HeadConfig,
    LmHeadConfig,
    MultiTokenPredictionConfig,
    RecurrenceConfig,
    list_head_kinds,
)
from llmsys.config.layer_types import (
    ATTENTION_TYPES,
    LINEAR_TYPES,
    LayerType,
    find_layer_violations,
    has_feed_forward,
)
from llmsys.config.linear_attention import LinearAttentionConfig, find_linear_violations
from llmsys.config.long_attention import AttentionConfig
from llmsys.config.moe import MoeConfig
from llmsys.config.multipliers import MultipliersConfig
from llmsys.config.norm import (
    NormConfig,
    OutputNormConfig,
    PreNormConfig,
    ResidualConfig,
    ReversibleConfig,
    RmsNormConfig,
)
from llmsys.config.parametrization import ParametrizationConfig
from llmsys.config.parametrization import StandardParametrizationConfig as Standard
from llmsys.config.patches import PatchesConfig
from llmsys.config.position import PositionConfig, RopeConfig
from llmsys.config.python_blocks import find_python_violations
from llmsys.config.rnn import RnnConfig
from llmsys.config.section import (
    Section,
    find_nearest,
    find_nearest_multiples,
    list_divisors,
    raise_violations,
)
from llmsys.config.skips import find_skip_violations
from llmsys.config.sparse_attention import find_sparse_violations
from llmsys.errors import Violation, format_choices

Family = Literal["decoder", "encoder", "encoder_decoder"]


@lru_cache(maxsize=64)  # a plan asks thousands of times
def _list_moe_layers(
    moe: MoeConfig, num_layers: int, feed_forwards: tuple[bool, ...]
) -> tuple[int, ...]:
    return tuple(
        layer
        for layer in range(num_layers)
        if moe.is_moe_layer(layer) and has_feed_forward(feed_forwards, layer)
    )


class ModelConfig(Section):
    """A Transformer: decoder, encoder or encoder-decoder.

    In an encoder-decoder, fields are the decoder's; `encoder` overrides them. `intermediate_size`
    is for dense layers.
    """

    family: Family = Field("decoder", description="Causal decoder, bidirectional encoder, or both.")
    vocab_size: int = Field(
        ge=2, le=10**12, description="Vocabulary: rows of the token embedding and of the head."
    )
    hidden_size: int = Field(ge=1, description="Width of the residual stream, in channels.")
    intermediate_size: int = Field(
        0, ge=0, le=10**12, description="Width of a dense feed-forward layer, in channels."
    )
    num_hidden_layers: int = Field(ge=1, le=100_000, description="Number of blocks.")
    num_attention_heads: int = Field(ge=1, description="Query heads of each attention layer.")
    num_key_value_heads: int = Field(
        default_factory=lambda values: int(values["num_attention_heads"]),
        ge=1,
        description="Key and value heads. Default: num_attention_heads.",
    )
    head_dim: int = Field(
        default_factory=lambda values: max(
            1, int(values["hidden_size"]) // int(values["num_attention_heads"])
        ),
        ge=1,
        description="Channels per head. Default: hidden_size / heads.",
    )
    max_position_embeddings: int = Field(
        2048, ge=1, description="Maximum sequence length, in positions."
    )
    sliding_window: int | None = Field(
        None, ge=1, description="Attended positions in sliding-window layers, including the token."
    )
    layer_types: tuple[LayerType, ...] = Field(
        (),
        description="Attention type by layer, repeated over the depth. Default: all sliding if "
        "sliding_window is set. linear_attention takes model.linear_attention, hybrid adds up "
        "full and linear attention, feed_forward has neither.",
    )
    feed_forward_layers: tuple[bool, ...] = Field(
        (),
        description="Whether a layer has a feed-forward, repeated over the depth. Default: all.",
    )
    tie_word_embeddings: bool = Field(
        False, description="Share the embedding matrix with the head."
    )
    initializer: Literal["normal", "xavier"] = Field(
        "normal", description="Distribution of the initial weights."
    )
    initializer_range: float = Field(
        0.02, gt=0, description="Standard deviation of the initial weights."
    )
    norm: NormConfig = Field(RmsNormConfig(), description="Norm layer.")
    residual: ResidualConfig = Field(
        PreNormConfig(),
        description="Placement of norms and residual connections around attention and "
        "feed-forward.",
    )
    u_shaped_skips: bool = Field(False, description="Add layers' outputs to their mirror images.")
    position: PositionConfig = Field(RopeConfig(), description="Position encoding.")
    attention: AttentionConfig = Field(MultiHeadAttentionConfig(), description="Attention layer.")
    linear_attention: LinearAttentionConfig | None = Field(
        None, description="Mixer of the layers of type linear_attention. null: no such layers."
    )
    feed_forward: DenseFeedForwardConfig = Field(
        SwigluConfig(), description="Dense feed-forward layers."
    )
    feed_forward_chunk: int | None = Field(
        None, ge=1, description="Positions of a feed-forward at a time. null: all."
    )
    moe: MoeConfig | None = Field(None, description="Mixture of experts. null: dense model.")
    embedding: EmbeddingConfig = Field(EmbeddingConfig(), description="Token embedding.")
    head: HeadConfig = Field(LmHeadConfig(), description="Output head.")
    dropout: DropoutConfig = Field(
        DropoutConfig(), description="Dropout probabilities in training."
    )
    encoder: EncoderConfig | None = Field(
        None, description="Encoder of an encoder-decoder. null: as the decoder."
    )
    multi_token_prediction: MultiTokenPredictionConfig | None = Field(
        None, description="Modules for later tokens."
    )
    recurrence: RecurrenceConfig | None = Field(
        None, description="One block for all layers. null: a block for each."
    )
    rnn: RnnConfig | None = Field(
        None, description="Recurrent layers instead of blocks. null: a Transformer."
    )
    patches: PatchesConfig | None = Field(
        None, description="Image patches instead of token ids. null: token ids."
    )
    multipliers: MultipliersConfig | None = Field(
        None, description="Factors on the outputs of projections. null: none."
    )
    parametrization: ParametrizationConfig = Field(
        Standard(), description="Values and rates by the size of the model."
    )

    @model_validator(mode="after")
    def _check_architecture(self) -> Self:
        raise_violations(find_model_violations(self))
        return self

    def get_layer_type(self, layer: int) -> LayerType:
        """Return the attention type of a block.

        Args:
            layer: number of the block, counted from 0; `layer_types` repeats.
        """
        default: LayerType = (
            "full_attention" if self.sliding_window is None else "sliding_attention"
        )
        return self.layer_types[layer % len(self.layer_types)] if self.layer_types else default

    def get_attention_window(self, layer: int) -> int | None:
        """Return the attention window of a block.

        Args:
            layer: number of the block, counted from 0.

        Returns:
            Positions that a query sees, itself included; None: unlimited.
        """
        return self.sliding_window if self.get_layer_type(layer) == "sliding_attention" else None

    @property
    def mixes_documents(self) -> bool:
        """True if the documents of a window read each other, whatever they are told."""
        is_recurrent = self.rnn is not None and self.family != "encoder_decoder"
        return self.attention.mixes_documents or is_recurrent

    def is_linear_layer(self, layer: int) -> bool:
        """Return whether a block has linear attention.

        Args:
            layer: number of the block, counted from 0.
        """
        return self.get_layer_type(layer) in LINEAR_TYPES

    def has_attention(self, layer: int) -> bool:
        """Return whether a block has full or sliding attention.

        Args:
            layer: number of the block, counted from 0.
        """
        return self.get_layer_type(layer) in ATTENTION_TYPES

    def has_feed_forward(self, layer: int) -> bool:
        """Return whether a block has a feed-forward or experts.

        Args:
            layer: number of the block, counted from 0.
        """
        return has_feed_forward(self.feed_forward_layers, layer)

    def get_residual(self, layer: int) -> ResidualConfig:
        """Return the placement of norms in a block.

        Args:
            layer: number of the block, counted from 0.
        """
        residual = self.residual
        if isinstance(residual, OutputNormConfig) and self.is_linear_layer(layer):
            return residual if residual.linear_layers == "output" else PreNormConfig()
        return residual

    def list_mixers(self, layer: int) -> list[AttentionConfig | LinearAttentionConfig]:
        """Return the sections of what mixes positions in a block: attention, linear attention, or
        none.

        Args:
            layer: number of the block, counted from 0.
        """
        found: list[AttentionConfig | LinearAttentionConfig] = []
        if self.has_attention(layer):
            found.append(self.attention)
        if self.linear_attention is not None and self.is_linear_layer(layer):
            found.append(self.linear_attention)
        return found

    @property
    def linear_layers(self) -> list[int]:
        """Indices of the blocks with linear attention."""
        return [layer for layer in range(self.num_hidden_layers) if self.is_linear_layer(layer)]

    @property
    def num_attention_layers(self) -> int:
        """Number of blocks with full or sliding attention."""
        return sum(self.has_attention(layer) for layer in range(self.num_hidden_layers))

    @property
    def has_linear_layers(self) -> bool:
        """Some blocks have linear attention."""
        return not LINEAR_TYPES.isdisjoint(self.layer_types)

    def uses_rope(self, layer: int) -> bool:
        """Return whether a block applies RoPE.

        Args:
            layer: number of the block, counted from 0.
        """
        return (
            self.position.kind == "rope"
            and self.position.layers[layer % len(self.position.layers)]
            and self.has_attention(layer)
        )

    @property
    def rotary_channels(self) -> int:
        """Channels per head that RoPE rotates (Su et al. 2021, arXiv:2104.09864); 0 without
        RoPE.
        """
        if self.position.kind != "rope":
            return 0
        if self.attention.kind == "latent":
            return self.attention.qk_rope_head_dim
        return int(self.head_dim * self.position.fraction)

    @property
    def interpolates_positions(self) -> bool:
        """Sequences may have another length than the table of positions, which is interpolated."""
        return self.patches is not None and self.position.kind == "learned"

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether a block of the decoder, or of an encoder-only model, has experts.

        Args:
            layer: number of the block, counted from 0.
        """
        has_experts = self.moe is not None and self.moe.is_moe_layer(layer)
        return has_experts and self.has_feed_forward(layer)

    @property
    def has_python_blocks(self) -> bool:
        """Attention or feed-forward is of the user's own code."""
        return "python" in (self.attention.kind, self.feed_forward.kind)

    @property
    def num_blocks(self) -> int:
        """Number of blocks with separate weights."""
        return self.num_hidden_layers if self.recurrence is None and self.rnn is None else 1

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the blocks with experts."""
        if self.moe is None:
            return []
        return list(_list_moe_layers(self.moe, self.num_hidden_layers, self.feed_forward_layers))

    @property
    def num_moe_layers(self) -> int:
        """Number of blocks with experts."""
        return len(self.moe_layers)

    @property
    def num_dense_layers(self) -> int:
        """Number of blocks with a dense feed-forward layer."""
        layers = range(self.num_hidden_layers)
        return sum(self.has_feed_forward(layer) for layer in layers) - self.num_moe_layers

    @property
    def num_branches(self) -> int:
        """Number of branches of a decoder or encoder that are added to the residual stream."""
        layers = range(self.num_hidden_layers)
        mixing = sum(self.get_layer_type(layer) != "feed_forward" for layer in layers)
        return mixing + sum(self.has_feed_forward(layer) for layer in layers)

    @property
    def encoder_model(self) -> ModelConfig:
        """Configuration of the encoder of an encoder-decoder, as a separate model."""
        # Published encoder-decoders have neither experts nor attention windows in the encoder.
        changes: dict[str, Any] = {
            "family": "encoder",
            "encoder": None,
            "moe": None,
            "multi_token_prediction": None,
        }
        changes |= {"sliding_window": None, "layer_types": (), "linear_attention": None}
        if (own := self.encoder) is not None:
            changes["num_hidden_layers"] = own.num_hidden_layers
            changes["intermediate_size"] = own.intermediate_size or self.intermediate_size
            if own.num_attention_heads is not None:
                changes["num_attention_heads"] = changes["num_key_value_heads"] = (
                    own.num_attention_heads
                )
                changes["head_dim"] = self.hidden_size // own.num_attention_heads
        return self.model_copy(update=changes)


def find_model_violations(model: ModelConfig) -> Iterator[Violation]:
    """Yield the violations between fields of a model."""
    yield from _find_shape_violations(model)
    yield from _find_position_violations(model)
    yield from _find_family_violations(model)
    yield from find_layer_violations(dict(model))
    yield from _find_linear_violations(model)
    if model.multipliers is not None:
        yield from model.multipliers.find_violations(dict(model))
    if model.moe is not None:
        yield from model.moe.find_layer_violations(model.num_hidden_layers, model.num_moe_layers)
        yield from model.moe.find_model_violations(model.residual.kind, model.parametrization.kind)
    yield from _find_recurrence_violations(model)
    if model.embedding.value_layers or model.embedding.bigram_rows:
        depth = range(model.num_hidden_layers)
        others = [layer for layer in depth if model.list_mixers(layer) != [model.attention]]
        yield from model.embedding.find_violations(dict(model), others)
    yield from find_skip_violations(dict(model)) if model.u_shaped_skips else ()
    if model.has_python_blocks:
        yield from find_python_violations(dict(model))
    yield from () if model.rnn is None else model.rnn.find_violations(model)
    if isinstance(model.residual, ReversibleConfig):
        yield from model.residual.find_violations(dict(model))
    if model.parametrization.kind != "standard":
        yield from model.parametrization.find_violations(dict(model))
    if model.patches is not None:
        yield from model.patches.find_violations(
            model, model.family, model.head.kind, model.position
        )


def _find_shape_violations(model: ModelConfig) -> Iterator[Violation]:
    heads, pairs = model.num_attention_heads, model.num_key_value_heads
    latent = model.attention.kind == "latent"
    if "head_dim" not in model.model_fields_set and model.hidden_size % heads and not latent:
        width, legal = model.hidden_size, list_divisors(model.hidden_size)
        near = [max(n for n in legal if n < heads), *[n for n in legal if n > heads][:1]]
        yield Violation(
            "num_attention_heads",
            f"{heads} does not divide hidden_size={width}. Use {format_choices(near)}, or "
            f"hidden_size={format_choices(find_nearest_multiples(width, heads))}, or set head_dim.",
        )
    if heads % pairs:
        yield Violation(
            "num_key_value_heads",
            f"{pairs} does not divide num_attention_heads={heads}. Use "
            f"{find_nearest(pairs, list_divisors(heads))}.",
        )
    elif latent and pairs != heads:
        yield Violation(
            "num_key_value_heads",
            f"latent attention has a key for each of the {heads} heads. Leave it out.",
        )
    dense = model.num_dense_layers + (model.family == "encoder_decoder")
    if dense and not model.intermediate_size and model.rnn is None:
        yield Violation(
            "intermediate_size",
            f"{model.num_dense_layers} dense layers need a width above 0. "
            f"Set it, for example to {4 * model.hidden_size}.",
        )


def _find_position_violations(model: ModelConfig) -> Iterator[Violation]:
    is_latent = model.attention.kind == "latent"
    if is_latent and model.position.kind not in ("rope", "none"):
        yield Violation(
            "position.kind", f"latent attention supports rope, not {model.position.kind}. Use rope."
        )
    yield from model.position.find_violations(model, model.rotary_channels, is_latent=is_latent)


def _find_family_violations(model: ModelConfig) -> Iterator[Violation]:
    if model.family not in model.head.families:
        legal = list_head_kinds(model.family)
        yield Violation(
            "head.kind",
            f"{model.head.kind} is not a head of family={model.family}. Use "
            f"{format_choices(legal)}.",
        )
    if model.head.kind in ("mlm", "permutation"):
        yield from model.head.find_violations(dict(model))
    if model.encoder is not None:
        yield from model.encoder.find_violations(model.family, model.hidden_size)
    if model.embedding.source_vocab_size is not None and model.family != "encoder_decoder":
        yield Violation(
            "embedding.source_vocab_size", f"family={model.family} has no source. Leave it out."
        )
    position, window = model.position.kind, model.sliding_window
    yield from model.attention.find_violations(
        model, family=model.family, position=position, window=window
    )
    if model.multi_token_prediction is not None:
        yield from model.multi_token_prediction.find_violations(model.family, model.residual.kind)


def _find_linear_violations(model: ModelConfig) -> Iterator[Violation]:
    given = {
        "recurrence": None if model.recurrence is None else model.recurrence.kind,
        "residual.kind": "reversible" if model.residual.is_reversible else None,
        "parametrization.kind": model.parametrization.kind,
    }
    layers = (model.has_linear_layers, model.linear_layers, model.layer_types)
    yield from find_linear_violations(
        model.linear_attention, *layers, model.family, model.attention.kind, given
    )
    if (latent := model.attention).kind == "latent":
        sizes = (latent.sparse, latent.q_lora_rank, latent.qk_rope_head_dim)
        yield from find_sparse_violations(*sizes, model.family, given, model.layer_types)


def _find_recurrence_violations(model: ModelConfig) -> Iterator[Violation]:
    layers = range(model.num_hidden_layers if model.recurrence is not None else 0)
    parts = {
        "moe": model.moe is not None,
        "multi_token_prediction": model.multi_token_prediction is not None,
        "layer_types": len({model.get_layer_type(layer) for layer in layers}) > 1,
        "position.layers": len({model.uses_rope(layer) for layer in layers}) > 1,
        "attention.windows": len(getattr(model.attention, "windows", ())) > 1,
    }
    if model.recurrence is not None:
        yield from model.recurrence.find_violations(
            model.hidden_size, [key for key, found in parts.items() if found]
        )
