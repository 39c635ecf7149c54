"""The architecture: what a `model:` section or a file under configs/model can say.

Names follow Hugging Face's config.json, which is accepted too (see llmsys/config/hugging_face). Read by estimate
(counts), model (modules) and convert; promises that every value accepted here can be built, and that one which cannot
is refused with the nearest value that can.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.attention import AttentionConfig, MultiHeadAttentionConfig
from llmsys.config.base import Section
from llmsys.config.feed_forward import FeedForwardConfig, SwigluConfig
from llmsys.config.head import DropoutConfig, EmbeddingConfig, EncoderConfig, HeadConfig, LmHeadConfig, MultiTokenPredictionConfig
from llmsys.config.model_rules import find_model_violations
from llmsys.config.moe import MoeConfig
from llmsys.config.norm import NormConfig, PreNormConfig, ResidualConfig, RmsNormConfig
from llmsys.config.position import PositionConfig, RopeConfig
from llmsys.config.rule import raise_violations

Family = Literal["decoder", "encoder", "encoder_decoder"]
LayerType = Literal["full_attention", "sliding_attention"]


def _compute_head_dim(values: dict[str, Any]) -> int:
    return max(1, int(values["hidden_size"]) // int(values["num_attention_heads"]))


def _get_key_value_heads(values: dict[str, Any]) -> int:
    return int(values["num_attention_heads"])


class ModelConfig(Section):
    """A Transformer: a decoder, an encoder, or an encoder and a decoder that looks at it.

    `intermediate_size` is the width of the dense feed-forward layers and may be left out when there are none. In an
    encoder-decoder, layers and heads are the decoder's, and the encoder has the same unless `encoder` says otherwise.
    """

    family: Family = Field("decoder", description="Causal decoder, bidirectional encoder, or both.")
    vocab_size: int = Field(ge=2, description="Rows of the token embedding and of the head.")
    hidden_size: int = Field(ge=1, description="Width of the residual stream, in channels.")
    intermediate_size: int = Field(0, ge=0, description="Width of a dense feed-forward layer, in channels.")
    num_hidden_layers: int = Field(ge=1, description="Number of blocks.")
    num_attention_heads: int = Field(ge=1, description="Query heads of each attention layer.")
    num_key_value_heads: int = Field(
        default_factory=_get_key_value_heads,
        ge=1,
        description="Key and value heads; each serves num_attention_heads / num_key_value_heads query heads. "
        "Left out: as many as num_attention_heads.",
    )
    head_dim: int = Field(
        default_factory=_compute_head_dim,
        ge=1,
        description="Channels of one head. Left out: hidden_size / num_attention_heads.",
    )
    max_position_embeddings: int = Field(2048, ge=1, description="Longest sequence, in positions.")
    sliding_window: int | None = Field(
        None, ge=1, description="Positions that a token sees in sliding-window layers, itself included."
    )
    layer_types: tuple[LayerType, ...] = Field(
        (),
        description="Kinds of the layers' attention, repeated over depth. Left out: all slide, if there is a window.",
    )
    tie_word_embeddings: bool = Field(False, description="Whether the head uses the embedding matrix.")
    initializer: Literal["normal", "xavier"] = Field("normal", description="Distribution of the starting matrices.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of normal starting weights.")
    norm: NormConfig = Field(RmsNormConfig(), description="The kind of normalisation.")
    residual: ResidualConfig = Field(PreNormConfig(), description="Where norms stand around attention and feed-forward.")
    position: PositionConfig = Field(RopeConfig(), description="How positions reach attention.")
    attention: AttentionConfig = Field(MultiHeadAttentionConfig(), description="How tokens look at each other.")
    feed_forward: FeedForwardConfig = Field(SwigluConfig(), description="Dense feed-forward layers.")
    moe: MoeConfig | None = Field(None, description="Mixture of experts; null builds a dense model.")
    embedding: EmbeddingConfig = Field(EmbeddingConfig(), description="From token ids to vectors.")
    head: HeadConfig = Field(LmHeadConfig(), description="From the last hidden states to the output.")
    dropout: DropoutConfig = Field(DropoutConfig(), description="What training drops at random.")
    encoder: EncoderConfig | None = Field(None, description="Of an encoder-decoder; null: as the decoder.")
    multi_token_prediction: MultiTokenPredictionConfig | None = Field(None, description="Modules that predict further tokens.")

    @model_validator(mode="after")
    def _check_architecture(self) -> Self:
        raise_violations(find_model_violations(self))
        return self

    def get_layer_type(self, layer: int) -> LayerType:
        """The kind of attention in block `layer`."""
        if not self.layer_types:
            return "full_attention" if self.sliding_window is None else "sliding_attention"
        return self.layer_types[layer % len(self.layer_types)]

    def get_attention_window(self, layer: int) -> int | None:
        """Positions that block `layer` sees, itself included; None: all."""
        return self.sliding_window if self.get_layer_type(layer) == "sliding_attention" else None

    def uses_rope(self, layer: int) -> bool:
        """Whether block `layer` rotates queries and keys."""
        position = self.position
        return position.kind == "rope" and position.layers[layer % len(position.layers)]

    def is_moe_layer(self, layer: int) -> bool:
        """Whether block `layer` (of the decoder, or of an encoder-only model) has experts."""
        return self.moe is not None and self.moe.is_moe_layer(layer)

    @property
    def moe_layers(self) -> list[int]:
        """Blocks with a mixture of experts, by number."""
        return [layer for layer in range(self.num_hidden_layers) if self.is_moe_layer(layer)]

    @property
    def num_moe_layers(self) -> int:
        """Blocks with a mixture of experts."""
        return len(self.moe_layers)

    @property
    def num_dense_layers(self) -> int:
        """Blocks with a dense feed-forward."""
        return self.num_hidden_layers - self.num_moe_layers

    @property
    def encoder_model(self) -> "ModelConfig":
        """The encoder of an encoder-decoder as a model of its own: what its blocks are built from.

        Dense and without windows; the encoder-decoders of the literature have neither experts nor windows there.
        """
        changes: dict[str, Any] = {"family": "encoder", "encoder": None, "moe": None, "multi_token_prediction": None}
        changes |= {"sliding_window": None, "layer_types": ()}
        if (own := self.encoder) is not None:
            changes["num_hidden_layers"] = own.num_hidden_layers
            changes["intermediate_size"] = own.intermediate_size or self.intermediate_size
            if own.num_attention_heads is not None:
                changes["num_attention_heads"] = changes["num_key_value_heads"] = own.num_attention_heads
                changes["head_dim"] = self.hidden_size // own.num_attention_heads
        return self.model_copy(update=changes)
