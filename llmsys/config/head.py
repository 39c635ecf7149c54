"""What stands before and after the blocks: the embedding, the heads, and the places of dropout."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class EmbeddingConfig(Section):
    """Token embedding. In an encoder-decoder both sides share it, unless the source has a vocabulary of its own."""

    scale: float | Literal["sqrt_hidden_size"] = Field(
        1.0, description="Factor on the token embedding; sqrt_hidden_size as in the original and in Gemma."
    )
    norm: bool = Field(False, description="Whether a norm follows the sum of all embeddings (BERT, BLOOM, BART).")
    token_types: int = Field(0, ge=0, description="Trained vectors for segments, added too (BERT: 2).")
    source_vocab_size: int | None = Field(
        None, ge=2, description="Rows of a separate source embedding in an encoder-decoder; null: shared."
    )
    initializer_range: float | None = Field(
        None, gt=0, description="Standard deviation of the starting table; null: model.initializer_range."
    )


class LmHeadConfig(Section):
    """Logits over the vocabulary: for the next token in decoders and encoder-decoders."""

    kind: Literal["lm"] = "lm"
    bias: Literal["none", "trained", "fixed"] = Field(
        "none", description="A bias on the logits; fixed: a saved buffer that is not a parameter (Marian, BART)."
    )
    softcap: float | None = Field(None, gt=0, description="Logits become cap · tanh(logit / cap) (Gemma 2).")
    scale: float | Literal["inverse_sqrt_hidden_size"] = Field(
        1.0, description="Factor on the last hidden state before the logits (T5 with tied embeddings)."
    )


class MlmHeadConfig(Section):
    """Logits for masked tokens: dense, activation, norm, then the token embedding with a bias (BERT)."""

    kind: Literal["mlm"] = "mlm"
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = Field("gelu", description="After the dense map.")
    pooler: bool = Field(False, description="Whether BERT's pooler is there too.")
    next_sentence: bool = Field(False, description="Whether BERT's two-way classifier on the pooler is there too.")


class ClassificationHeadConfig(Section):
    """Logits over labels from the first token: dense, tanh, dropout, linear."""

    kind: Literal["classification"] = "classification"
    num_labels: int = Field(ge=2, description="Classes.")


class FeaturesHeadConfig(Section):
    """The last hidden states themselves, with or without BERT's pooler (which then gives the pooled vector too)."""

    kind: Literal["features"] = "features"
    pooler: bool = Field(False, description="Whether the pooler is there.")


class PermutationHeadConfig(Section):
    """XLNet's: tied logits with a bias, and a trained vector that stands for the token to predict. Counted only."""

    kind: Literal["permutation"] = "permutation"


HeadConfig = Annotated[
    LmHeadConfig | MlmHeadConfig | ClassificationHeadConfig | FeaturesHeadConfig | PermutationHeadConfig,
    Field(discriminator="kind"),
]


class DropoutConfig(Section):
    """Probabilities of dropping; 0 everywhere is no dropout."""

    embedding: float = Field(0.0, ge=0, lt=1, description="On the sum of all embeddings.")
    residual: float = Field(0.0, ge=0, lt=1, description="On the output of each branch, before it is added.")
    attention: float = Field(0.0, ge=0, lt=1, description="On attention's probabilities.")
    activation: float = Field(0.0, ge=0, lt=1, description="Inside the feed-forward, after the activation.")
    final: float = Field(0.0, ge=0, lt=1, description="On the hidden states before the head (T5, classifiers).")


class EncoderConfig(Section):
    """The encoder of an encoder-decoder, where it differs from the decoder; null: as there."""

    num_hidden_layers: int = Field(ge=1, description="Blocks of the encoder.")
    intermediate_size: int | None = Field(None, ge=1, description="Width of its feed-forward layers.")
    num_attention_heads: int | None = Field(None, ge=1, description="Its heads, of hidden_size / heads channels.")
    decoder_start_token_id: int = Field(0, ge=0, description="The token that opens every target.")


class MultiTokenPredictionConfig(Section):
    """DeepSeek-V3's multi-token prediction (arXiv:2412.19437, 2.2): module k predicts the token after the next k."""

    depth: int = Field(1, ge=1, description="Modules, one after another; each predicts one token further.")
    weight: float = Field(0.3, ge=0, description="Weight of their mean loss beside the next token's.")
