"""Training objective and loss terms: the `objective:` and `loss:` sections.

The default objective follows from the model: next-token prediction for a decoder, translation for
an encoder-decoder, masked language modelling or classification for an encoder, by its head.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmsys.config.images import AugmentationConfig
from llmsys.config.section import Section

# What each objective needs: the model's family, its head, and the kind of the data.
NEEDS = {
    "next_token": ("decoder", "lm", "crawl"),
    "translation": ("encoder_decoder", "lm", "pairs"),
    "masked": ("encoder", "mlm", "crawl"),
    "masked_next_sentence": ("encoder", "mlm", "crawl"),
    "permutation": ("encoder", "permutation", "crawl"),
    "span_corruption": ("encoder_decoder", "lm", "crawl"),
    "classification": ("encoder", "classification", "labelled"),
}
# Further kinds of data that serve instead of a kind, or for an objective.
ALSO_LEGAL = {"crawl": ("mixture", "tokens"), "labelled": ("images",), "next_token": ("chat",)}


def get_needs(kind: str) -> tuple[str, str, tuple[str, ...]]:
    """Return what an objective needs.

    Args:
        kind: The `objective.kind`.

    Returns:
        The family of the model, the kind of its head, and the legal kinds of data.
    """
    family, head, data = NEEDS[kind]
    return family, head, (data, *ALSO_LEGAL.get(data, ()), *ALSO_LEGAL.get(kind, ()))


class _BaseObjectiveConfig(Section):
    """An objective over windows of tokens."""

    has_padding: ClassVar[bool] = False  # rows are texts of their own length, padded to the longest
    # rows are windows of one length, cut from packed documents
    uses_windows: ClassVar[bool] = False

    def count_lengths(self, length: int) -> tuple[int, int] | None:
        """Return the tokens of source and target that a window becomes; None where it is used as
        it is.
        """
        return None


class NextTokenConfig(_BaseObjectiveConfig):
    """Predict each token from the tokens before it."""

    kind: Literal["next_token"] = "next_token"
    uses_windows: ClassVar[bool] = True


class TranslationConfig(_BaseObjectiveConfig):
    """Predict each target token from the source and the target tokens before it: p(y | x)."""

    kind: Literal["translation"] = "translation"
    has_padding: ClassVar[bool] = True


class _BaseMaskedConfig(_BaseObjectiveConfig):
    """Predict a random share of the tokens."""

    uses_windows: ClassVar[bool] = True
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="Share of the tokens to predict.")
    mask_replace_prob: float = Field(
        0.8, ge=0, le=1, description="Share of these that are replaced by the mask token."
    )
    random_replace_prob: float = Field(
        0.1, ge=0, le=1, description="Share of these that are replaced by a random token."
    )
    mask_token: str = Field("<mask>", min_length=1, description="Mask token of the tokenizer.")


class MaskedLmConfig(_BaseMaskedConfig):
    """Predict a random share of the tokens (BERT, Devlin 2018, 3.1): most are masked, some
    replaced, some unchanged.
    """

    kind: Literal["masked"] = "masked"


class NextSentenceConfig(_BaseMaskedConfig):
    """Masked tokens, and whether the second of two segments follows the first (BERT, Devlin 2018,
    3.1, task 2).

    A row is [CLS] A [SEP] B [SEP] from the longest document of a window. B follows A there, or
    begins the longest other document of another window. The loss is the sum of both mean losses.
    """

    kind: Literal["masked_next_sentence"] = "masked_next_sentence"
    has_padding: ClassVar[bool] = True
    next_sentence_prob: float = Field(
        0.5, gt=0, lt=1, description="Share of the rows whose second segment follows."
    )
    cls_token: str = Field(
        "<cls>", min_length=1, description="First token of a row, of the tokenizer."
    )
    sep_token: str = Field(
        "<sep>", min_length=1, description="Token after each segment, of the tokenizer."
    )


class PermutationConfig(_BaseObjectiveConfig):
    """Predict some tokens in a random order, each from those not predicted and those before it
    (XLNet, Yang 2019).

    The predicted tokens are spans, one of `context_factor` tokens of a window (partial prediction,
    2.3).
    """

    kind: Literal["permutation"] = "permutation"
    uses_windows: ClassVar[bool] = True
    context_factor: int = Field(6, ge=2, description="One of so many tokens is predicted.")
    max_span_length: int = Field(
        5, ge=1, description="Longest span of predicted tokens; shorter ones are as frequent."
    )

    def count_predicted(self, length: int) -> int:
        """Count the places for predicted tokens of a window.

        Args:
            length: Tokens of the window.

        Returns:
            The places. A window with fewer predicted tokens leaves some empty.
        """
        return -(-length // self.context_factor)

    def count_lengths(self, length: int) -> tuple[int, int]:
        """Return the positions of the content stream, and of both streams."""
        return length, length + self.count_predicted(length)


class SpanCorruptionConfig(_BaseObjectiveConfig):
    """Write the spans that are missing from a window (T5, Raffel 2019, 3.1.4).

    A window is one text, as T5's are: the source has a sentinel instead of each span, and the
    target has the spans, each after its sentinel. Both end with the end token.
    """

    kind: Literal["span_corruption"] = "span_corruption"
    uses_windows: ClassVar[bool] = True
    noise_density: float = Field(
        0.15, gt=0, lt=1, description="Share of the tokens in missing spans."
    )
    mean_noise_span_length: float = Field(
        3.0, ge=1, description="Mean length of a missing span, in tokens."
    )
    sentinel_token: str = Field(
        "<extra_id_{}>",
        min_length=3,
        description="Sentinel of the tokenizer; {} is the number of the span, from 0.",
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
    """Predict the label of a text or an image."""

    kind: Literal["classification"] = "classification"
    has_padding: ClassVar[bool] = True
    augmentation: AugmentationConfig | None = Field(
        None,
        description="Random changes of training images. null: none. Needs the package torchvision.",
    )


ObjectiveConfig = Annotated[
    NextTokenConfig
    | TranslationConfig
    | MaskedLmConfig
    | NextSentenceConfig
    | PermutationConfig
    | SpanCorruptionConfig
    | ClassificationConfig,
    Field(discriminator="kind"),
]


def infer_objective(
    values: dict[str, Any],
) -> (
    NextTokenConfig | TranslationConfig | MaskedLmConfig | PermutationConfig | ClassificationConfig
):
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
    if head == "permutation":
        return PermutationConfig()
    return ClassificationConfig() if head == "classification" else NextTokenConfig()


class LossConfig(Section):
    """`loss:` — terms added to cross entropy in training. Evaluation always uses plain cross
    entropy.
    """

    label_smoothing: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Probability mass distributed over the wrong classes (Szegedy 2015).",
    )
    z_loss: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared logsumexp of the logits (PaLM, Chowdhery 2022: 1e-4).",
    )
