"""Configuration of the layers before and after the blocks: embedding, heads, dropout, encoder and MTP modules."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmsys.config.model_shape import ModelShape, iter_linear_parameters
from llmsys.config.module_tensors import ParameterTensor
from llmsys.config.section import Section


class EmbeddingConfig(Section):
    """The token embedding. An encoder-decoder shares it unless `source_vocab_size` is set."""

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


class _BaseHeadConfig(Section):
    """Base of the heads; each kind lists its parameters."""

    families: ClassVar[tuple[str, ...]] = ("encoder",)  # legal values of model.family
    has_logits: ClassVar[bool] = True  # the head returns logits over the vocabulary

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters after the last hidden states."""
        # A tied matrix is counted with the embedding.
        if self.has_logits and not model.tie_word_embeddings:
            yield ParameterTensor("head.weight", (model.vocab_size, model.hidden_size), "head", input="token")


def _iter_first_token_linear(name: str, hidden: int, outputs: int) -> Iterator[ParameterTensor]:
    """Yield the parameters of a linear map over the first token of each sequence."""
    yield from iter_linear_parameters(name, outputs, hidden, True, "head_other", "sequence")


class LmHeadConfig(_BaseHeadConfig):
    """Language-model head: next-token logits of decoders and encoder-decoders."""

    kind: Literal["lm"] = "lm"
    families: ClassVar[tuple[str, ...]] = ("decoder", "encoder_decoder")
    bias: Literal["none", "trained", "fixed"] = Field(
        "none", description="A bias on the logits; fixed: a saved buffer that is not a parameter (Marian, BART)."
    )
    softcap: float | None = Field(None, gt=0, description="Logits become cap · tanh(logit / cap) (Gemma 2).")
    scale: float | Literal["inverse_sqrt_hidden_size"] = Field(
        1.0, description="Factor on the last hidden state before the logits (T5 with tied embeddings)."
    )

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the output matrix unless it is tied, and a trained bias."""
        yield from super().iter_parameters(model)
        if self.bias == "trained":
            yield ParameterTensor("head.bias", (model.vocab_size,), "head_bias")


class MlmHeadConfig(_BaseHeadConfig):
    """Masked-language-model head: dense, activation, norm, then the token embedding with a bias (BERT)."""

    kind: Literal["mlm"] = "mlm"
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = Field("gelu", description="After the dense map.")
    pooler: bool = Field(False, description="Whether BERT's pooler is there too.")
    next_sentence: bool = Field(False, description="Whether BERT's two-way classifier on the pooler is there too.")

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the transform, the output matrix and bias, the pooler and the next-sentence classifier."""
        hidden = model.hidden_size
        yield from iter_linear_parameters("head.dense", hidden, hidden, True, "head_other")
        yield from model.norm.iter_parameters("head.norm", hidden)
        yield from super().iter_parameters(model)
        yield ParameterTensor("head.bias", (model.vocab_size,), "head_bias")
        if self.pooler:
            yield from _iter_first_token_linear("pooler", hidden, hidden)
        if self.next_sentence:
            yield from _iter_first_token_linear("next_sentence", hidden, 2)


class ClassificationHeadConfig(_BaseHeadConfig):
    """Sequence classification head over the first token: dense, tanh, dropout, linear."""

    kind: Literal["classification"] = "classification"
    has_logits: ClassVar[bool] = False
    num_labels: int = Field(ge=2, description="Classes.")

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the pooler and the classifier."""
        yield from _iter_first_token_linear("pooler", model.hidden_size, model.hidden_size)
        yield from _iter_first_token_linear("classifier", model.hidden_size, self.num_labels)


class FeaturesHeadConfig(_BaseHeadConfig):
    """No head: the last hidden states, and the pooled vector where BERT's pooler is enabled."""

    kind: Literal["features"] = "features"
    has_logits: ClassVar[bool] = False
    pooler: bool = Field(False, description="Whether the pooler is there.")

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the pooler where it is enabled."""
        if self.pooler:
            yield from _iter_first_token_linear("pooler", model.hidden_size, model.hidden_size)


class PermutationHeadConfig(_BaseHeadConfig):
    """XLNet's head: tied logits with a bias, and a trained mask embedding. Estimated only; it cannot be built."""

    kind: Literal["permutation"] = "permutation"

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the output matrix unless it is tied, the bias and the mask embedding."""
        yield from super().iter_parameters(model)
        yield ParameterTensor("head.bias", (model.vocab_size,), "head_bias")
        yield ParameterTensor("mask_embedding", (1, 1, model.hidden_size), "head_other")


HeadConfig = Annotated[
    LmHeadConfig | MlmHeadConfig | ClassificationHeadConfig | FeaturesHeadConfig | PermutationHeadConfig,
    Field(discriminator="kind"),
]


def list_head_kinds(family: str) -> list[str]:
    """Return the kinds of heads of a model family, in the order of definition."""
    heads = _BaseHeadConfig.__subclasses__()
    return [head.model_fields["kind"].default for head in heads if family in head.families]


class DropoutConfig(Section):
    """Dropout probabilities."""

    embedding: float = Field(0.0, ge=0, lt=1, description="On the sum of all embeddings.")
    residual: float = Field(0.0, ge=0, lt=1, description="On the output of each branch, before it is added.")
    attention: float = Field(0.0, ge=0, lt=1, description="On attention's probabilities.")
    activation: float = Field(0.0, ge=0, lt=1, description="Inside the feed-forward, after the activation.")
    final: float = Field(0.0, ge=0, lt=1, description="On the hidden states before the head (T5, classifiers).")


class EncoderConfig(Section):
    """The encoder of an encoder-decoder; null fields are the decoder's."""

    num_hidden_layers: int = Field(ge=1, description="Blocks of the encoder.")
    intermediate_size: int | None = Field(None, ge=1, description="Width of its feed-forward layers.")
    num_attention_heads: int | None = Field(None, ge=1, description="Its heads, of hidden_size / heads channels.")
    decoder_start_token_id: int = Field(0, ge=0, description="The token that opens every target.")


class MultiTokenPredictionConfig(Section):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2): module k predicts k + 1 tokens ahead."""

    depth: int = Field(1, ge=1, description="Modules, one after another; each predicts one token further.")
    weight: float = Field(0.3, ge=0, description="Weight of their mean loss beside the next token's.")
