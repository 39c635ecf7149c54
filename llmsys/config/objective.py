"""Training objective and loss terms: the `objective:` and `loss:` sections.

The default objective follows from the model: next-token prediction for a decoder, translation for an encoder-decoder,
masked language modelling or classification for an encoder, by its head.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmsys.config.batch import BatchConfig
from llmsys.config.model import ModelConfig
from llmsys.config.section import Section, Violation

# What each objective needs: the model's family, its head, and the kind of the data.
NEEDS = {
    "next_token": ("decoder", "lm", "crawl"),
    "translation": ("encoder_decoder", "lm", "pairs"),
    "masked": ("encoder", "mlm", "crawl"),
    "span_corruption": ("encoder_decoder", "lm", "crawl"),
    "classification": ("encoder", "classification", "labelled"),
}


class _BaseObjectiveConfig(Section):
    """An objective over windows of tokens."""

    has_padding: ClassVar[bool] = False  # rows are texts of their own length, padded to the longest
    uses_windows: ClassVar[bool] = False  # rows are windows of one length, cut from packed documents

    def count_lengths(self, length: int) -> tuple[int, int] | None:
        """Return the tokens of source and target that a window becomes; None where it is used as it is."""
        return None


class NextTokenConfig(_BaseObjectiveConfig):
    """Predict each token from the tokens before it."""

    kind: Literal["next_token"] = "next_token"
    uses_windows: ClassVar[bool] = True


class TranslationConfig(_BaseObjectiveConfig):
    """Predict each target token from the source and the target tokens before it: p(y | x)."""

    kind: Literal["translation"] = "translation"
    has_padding: ClassVar[bool] = True


class MaskedLmConfig(_BaseObjectiveConfig):
    """Predict a random share of the tokens (BERT, Devlin 2018, 3.1): most are masked, some replaced, some unchanged."""

    kind: Literal["masked"] = "masked"
    uses_windows: ClassVar[bool] = True
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="Share of the tokens to predict.")
    mask_replace_prob: float = Field(0.8, ge=0, le=1, description="Share of these that are replaced by the mask token.")
    random_replace_prob: float = Field(
        0.1, ge=0, le=1, description="Share of these that are replaced by a random token."
    )
    mask_token: str = Field("<mask>", min_length=1, description="Mask token of the tokenizer.")


class SpanCorruptionConfig(_BaseObjectiveConfig):
    """Write the spans that are missing from a window (T5, Raffel 2019, 3.1.4).

    A window is one text, as T5's are: the source has a sentinel in place of each span, and the target has the spans,
    each after its sentinel. Both end with the end token.
    """

    kind: Literal["span_corruption"] = "span_corruption"
    uses_windows: ClassVar[bool] = True
    noise_density: float = Field(0.15, gt=0, lt=1, description="Share of the tokens in missing spans.")
    mean_noise_span_length: float = Field(3.0, ge=1, description="Mean length of a missing span, in tokens.")
    sentinel_token: str = Field(
        "<extra_id_{}>", min_length=3, description="Sentinel of the tokenizer; {} is the number of the span, from 0."
    )

    def count_noise(self, length: int) -> tuple[int, int]:
        """Return the missing tokens of a text, and the spans that they are in.

        Args:
            length: tokens of the text, at least 2.
        """
        noise = min(max(round(length * self.noise_density), 1), length - 1)
        return noise, min(max(round(noise / self.mean_noise_span_length), 1), noise, length - noise)

    def count_lengths(self, length: int) -> tuple[int, int]:
        """Return the tokens of source and target of a text of `length` tokens, at least 2."""
        noise, spans = self.count_noise(length)
        return length - noise + spans + 1, noise + spans + 1


class ClassificationConfig(_BaseObjectiveConfig):
    """Predict the label of a text."""

    kind: Literal["classification"] = "classification"
    has_padding: ClassVar[bool] = True


ObjectiveConfig = Annotated[
    NextTokenConfig | TranslationConfig | MaskedLmConfig | SpanCorruptionConfig | ClassificationConfig,
    Field(discriminator="kind"),
]


def infer_objective(
    values: dict[str, Any],
) -> NextTokenConfig | TranslationConfig | MaskedLmConfig | ClassificationConfig:
    """Return the default objective of a model.

    Args:
        values: validated fields of a RunConfig so far. Without `model`, a decoder is assumed.

    Returns:
        An objective section with default fields.
    """
    model = values.get("model")
    family, head = (model.family, model.head.kind) if model is not None else ("decoder", "lm")
    if family == "encoder_decoder":
        return TranslationConfig()
    if head == "mlm":
        return MaskedLmConfig()
    return ClassificationConfig() if head == "classification" else NextTokenConfig()


def find_scope_violations(objective: ObjectiveConfig, model: ModelConfig, batch: BatchConfig) -> Iterator[Violation]:
    """Yield the violations of documents that are to be kept apart, or whole, where the objective does not.

    Args:
        objective: the `objective:` section.
        model: the `model:` section.
        batch: the `batch:` section.
    """
    mixes = {
        f"model.attention.kind={model.attention.kind}": model.attention.mixes_documents and objective.uses_windows,
        f"objective.kind={objective.kind}": isinstance(objective, SpanCorruptionConfig),
    }
    if batch.attention_scope == "document" and (found := [choice for choice, is_mixed in mixes.items() if is_mixed]):
        text = f"document is not kept by {found[0]}, which reads a window as one text. Use window."
        yield Violation("batch.attention_scope", text)
    if batch.packing != "concatenate" and objective.uses_windows and not isinstance(objective, NextTokenConfig):
        text = f"{batch.packing} pads sequences, which objective.kind={objective.kind} does not know. Use concatenate."
        yield Violation("batch.packing", text)


class LossConfig(Section):
    """`loss:` — terms added to cross entropy in training. Evaluation always uses plain cross entropy."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Probability mass distributed over the wrong classes (Szegedy 2015)."
    )
    z_loss: float = Field(
        0.0, ge=0, description="Weight of the squared logsumexp of the logits (PaLM, Chowdhery 2022: 1e-4)."
    )
