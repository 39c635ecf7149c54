"""Configuration around the blocks: heads, dropout, encoder, MTP modules, and blocks that repeat."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmsys.config.model_shape import ModelShape
from llmsys.config.module_tensors import (
    FP32_BYTES,
    ActivationShape,
    Input,
    ParameterTensor,
    SavedTensor,
    iter_linear_parameters,
)
from llmsys.config.section import Section, find_nearest, list_divisors
from llmsys.errors import Violation


class _BaseHeadConfig(Section):
    """Base of the heads; each kind lists its parameters."""

    families: ClassVar[tuple[str, ...]] = ("encoder",)  # legal values of model.family
    has_logits: ClassVar[bool] = True  # the head returns logits over the vocabulary
    logits_input: ClassVar[Input] = "token"

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters after the last hidden states."""
        # A tied matrix is counted with the embedding.
        if self.has_logits and not model.tie_word_embeddings:
            shape = (model.vocab_size, model.hidden_size)
            yield ParameterTensor("head.weight", shape, "head", input=self.logits_input)

    def find_violations(self, model: dict[str, Any]) -> Iterator[Violation]:
        """Yield what the head cannot be combined with, by the fields of a model."""
        yield from ()


def _iter_first_token_linear(name: str, hidden: int, outputs: int) -> Iterator[ParameterTensor]:
    """Yield the parameters of a linear map over the first token of each sequence."""
    yield from iter_linear_parameters(name, outputs, hidden, True, "head_other", "sequence")


class LmHeadConfig(_BaseHeadConfig):
    """Language-model head: next-token logits of decoders and encoder-decoders."""

    kind: Literal["lm"] = "lm"
    families: ClassVar[tuple[str, ...]] = ("decoder", "encoder_decoder")
    bias: Literal["none", "trained", "fixed"] = Field(
        "none",
        description="Bias of the logits. fixed: a saved buffer instead of a parameter (Marian, "
        "BART).",
    )
    softcap: float | None = Field(
        None, gt=0, description="Soft cap: replace each logit by cap · tanh(logit / cap) (Gemma 2)."
    )
    scale: float | Literal["inverse_sqrt_hidden_size"] = Field(
        1.0,
        description="Scale of the last hidden state before the logits (T5 with tied embeddings).",
    )

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the output matrix unless it is tied, and a trained bias."""
        yield from super().iter_parameters(model)
        if self.bias == "trained":
            yield ParameterTensor("head.bias", (model.vocab_size,), "head_bias")


class MlmHeadConfig(_BaseHeadConfig):
    """Masked-language-model head: dense, activation, norm, then the token embedding with a bias
    (BERT).
    """

    kind: Literal["mlm"] = "mlm"
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = Field(
        "gelu", description="Activation after the dense layer."
    )
    pooler: bool = Field(False, description="Also build BERT's pooler.")
    next_sentence: bool = Field(
        False, description="Also build BERT's next-sentence classifier on the pooler."
    )

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the transform, the output matrix and bias, the pooler and the next-sentence
        classifier.
        """
        hidden = model.hidden_size
        yield from iter_linear_parameters("head.dense", hidden, hidden, True, "head_other")
        yield from model.norm.iter_parameters("head.norm", hidden)
        yield from super().iter_parameters(model)
        yield ParameterTensor("head.bias", (model.vocab_size,), "head_bias")
        if self.pooler:
            yield from _iter_first_token_linear("pooler", hidden, hidden)
        if self.next_sentence:
            yield from _iter_first_token_linear("next_sentence", hidden, 2)

    def find_violations(self, model: dict[str, Any]) -> Iterator[Violation]:
        """Yield a next-sentence classifier without its input."""
        if self.next_sentence and not self.pooler:
            yield Violation(
                "head.next_sentence", "it needs the pooler, which is missing. Set head.pooler=true."
            )


class ClassificationHeadConfig(_BaseHeadConfig):
    """Sequence classification head: BERT's dense layer and tanh over the first token, dropout,
    linear layer.
    """

    kind: Literal["classification"] = "classification"
    has_logits: ClassVar[bool] = False
    num_labels: int = Field(ge=2, description="Number of classes.")
    pooling: Literal["first", "mean"] | None = Field(
        None,
        description="Classify the vector of the first position, or the mean over all but padding, "
        "without dense layer and tanh (ViT). null: as BERT.",
    )

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield BERT's pooler where it is used, and the classifier."""
        if self.pooling is None:
            yield from _iter_first_token_linear("pooler", model.hidden_size, model.hidden_size)
        yield from _iter_first_token_linear("classifier", model.hidden_size, self.num_labels)


class FeaturesHeadConfig(_BaseHeadConfig):
    """No head: the last hidden states, and the pooled vector where BERT's pooler is enabled."""

    kind: Literal["features"] = "features"
    has_logits: ClassVar[bool] = False
    pooler: bool = Field(False, description="Build the pooler.")

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the pooler where it is enabled."""
        if self.pooler:
            yield from _iter_first_token_linear("pooler", model.hidden_size, model.hidden_size)


class PermutationHeadConfig(_BaseHeadConfig):
    """XLNet's head: logits with a bias, and the trained vector that its query stream begins with
    (Yang 2019).
    """

    kind: Literal["permutation"] = "permutation"
    logits_input: ClassVar[Input] = "predicted"

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the output matrix unless it is tied, the bias and the mask embedding."""
        yield from super().iter_parameters(model)
        yield ParameterTensor("head.bias", (model.vocab_size,), "head_bias")
        yield ParameterTensor("mask_embedding.weight", (1, 1, model.hidden_size), "head_other")

    def find_violations(self, model: dict[str, Any]) -> Iterator[Violation]:
        """Yield what the second stream does not run through."""
        if (position := model["position"].kind) != "transformer_xl":
            yield Violation(
                "head.kind",
                f"permutation asks for tokens by their distance, and position.kind={position} "
                "adds positions elsewhere"
                ". Use position.kind=transformer_xl, or head.kind=mlm.",
            )
        given = {
            "moe": model["moe"] is not None,
            "recurrence": model["recurrence"] is not None,
            "residual.kind": model["residual"].is_reversible,
            "attention.kind": model["attention"].kind != "multi_head",
        }
        for key in (key for key, is_given in given.items() if is_given):
            yield Violation(
                key,
                "head.kind=permutation is not proven with it. Leave it out, or use head.kind=mlm.",
            )


HeadConfig = Annotated[
    LmHeadConfig
    | MlmHeadConfig
    | ClassificationHeadConfig
    | FeaturesHeadConfig
    | PermutationHeadConfig,
    Field(discriminator="kind"),
]


def list_head_kinds(family: str) -> list[str]:
    """Return the kinds of heads of a model family, in the order of definition."""
    heads = _BaseHeadConfig.__subclasses__()
    return [head.model_fields["kind"].default for head in heads if family in head.families]


class DropoutConfig(Section):
    """Dropout probabilities."""

    embedding: float = Field(0.0, ge=0, lt=1, description="Dropout on the sum of all embeddings.")
    residual: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout on the output of each branch, before the residual addition.",
    )
    attention: float = Field(0.0, ge=0, lt=1, description="Dropout on the attention probabilities.")
    activation: float = Field(
        0.0, ge=0, lt=1, description="Dropout in the feed-forward layer, after the activation."
    )
    final: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout on the hidden states before the head (T5, classifiers).",
    )

    @property
    def is_active(self) -> bool:
        """True where anything is dropped."""
        return any(self.model_dump().values())


class EncoderConfig(Section):
    """The encoder of an encoder-decoder; null fields are the decoder's."""

    num_hidden_layers: int = Field(ge=1, description="Number of encoder blocks.")
    intermediate_size: int | None = Field(
        None, ge=1, description="Width of the encoder's feed-forward layers."
    )
    num_attention_heads: int | None = Field(
        None,
        ge=1,
        description="Number of attention heads of the encoder, each of hidden_size / heads "
        "channels.",
    )
    decoder_start_token_id: int = Field(
        0, ge=0, description="Id of the first token of every target."
    )

    def find_violations(self, family: str, hidden_size: int) -> Iterator[Violation]:
        """Yield a family without a separate encoder, and heads that do not divide the width.

        Args:
            family: `model.family`.
            hidden_size: Width of the model.
        """
        if family != "encoder_decoder":
            yield Violation(
                "encoder",
                f"family={family} has no separate encoder. Leave it out, or use encoder_decoder.",
            )
        heads = self.num_attention_heads
        if heads and hidden_size % heads:
            near = find_nearest(heads, list_divisors(hidden_size))
            yield Violation(
                "encoder.num_attention_heads",
                f"{heads} does not divide hidden_size={hidden_size}. Use {near}.",
            )


class MultiTokenPredictionConfig(Section):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, 2.2): module k predicts k + 1
    tokens ahead.
    """

    depth: int = Field(
        1, ge=1, description="Number of sequential modules; each predicts one more token ahead."
    )
    weight: float = Field(
        0.3, ge=0, description="Weight of their mean loss, added to the next-token loss."
    )

    def find_violations(self, family: str, residual_kind: str) -> Iterator[Violation]:
        """Yield a family or a placement of norms that the modules are not built for.

        Args:
            family: `model.family`.
            residual_kind: `model.residual.kind`.
        """
        key = "multi_token_prediction"
        if family != "decoder":
            yield Violation(key, f"family={family} predicts no next token. Use null.")
        if residual_kind not in ("pre", "sandwich", "output"):
            yield Violation(key, f"it needs residual.kind=pre, not {residual_kind}. Use null.")


class _BaseRecurrenceConfig(Section):
    """One block whose weights all layers share, with the sinusoids of position and step before
    each (Dehghani 2018).
    """

    def find_violations(self, hidden_size: int, other_kinds: list[str]) -> Iterator[Violation]:
        """Yield an odd width, and the keys of the model by which layers would differ."""
        kind: str = type(self).model_fields["kind"].default
        if hidden_size % 2:
            yield Violation(
                "hidden_size",
                f"{hidden_size} is odd, but the sinusoids of steps come in pairs. Use "
                f"{hidden_size + 1}.",
            )
        for key in other_kinds:
            yield Violation(
                key, f"recurrence={kind} repeats one block. Leave {key} out, or recurrence."
            )

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the parameters outside the block, once for all of its steps."""
        yield from ()

    def iter_saved_tensors(
        self, model: ModelShape, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        """Yield the tensors that one step saves outside the block."""
        yield from ()


class FixedRecurrenceConfig(_BaseRecurrenceConfig):
    """The block runs num_hidden_layers times (Universal Transformer, arXiv:1807.03819, 2.1)."""

    kind: Literal["fixed"] = "fixed"


class AdaptiveRecurrenceConfig(_BaseRecurrenceConfig):
    """Every position halts by itself, after num_hidden_layers steps at the latest (ACT; Graves
    2016, 2.2).

    A halted position keeps its state. All positions are computed to the last step, so that ranks
    stay in step: the FLOPs are those of `fixed`.
    """

    kind: Literal["adaptive"] = "adaptive"
    threshold: float = Field(
        0.99,
        gt=0,
        le=1,
        description="Sum of halting probabilities above which a position halts (1 - epsilon).",
    )
    ponder_weight: float = Field(
        0.01,
        ge=0,
        description="Weight of the ponder cost: steps and remainder, averaged over tokens.",
    )

    def iter_parameters(self, model: ModelShape) -> Iterator[ParameterTensor]:
        """Yield the map from a state to its halting probability."""
        yield from iter_linear_parameters(
            "recurrence.halting", 1, model.hidden_size, True, "halting"
        )

    def iter_saved_tensors(
        self, model: ModelShape, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        """Yield the states to be weighted, their probabilities in float32, their weights, and
        three masks.
        """
        # "input": they are outside the block, so activation checkpointing keeps them.
        yield SavedTensor(
            "weighted states", shape.compute_residual_bytes(model.hidden_size), "input"
        )
        yield SavedTensor(
            "halting probabilities", shape.compute_residual_bytes(1, FP32_BYTES), "input"
        )
        yield SavedTensor("weights of states", shape.compute_residual_bytes(1), "input")
        yield SavedTensor("halting masks", shape.compute_residual_bytes(3, 1), "input")


RecurrenceConfig = Annotated[
    FixedRecurrenceConfig | AdaptiveRecurrenceConfig, Field(discriminator="kind")
]
