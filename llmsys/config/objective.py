"""What is learnt from the data, and how its loss is shaped: the `objective:` and `loss:` sections.

The objective follows from the model unless it is named: a decoder continues, an encoder-decoder translates, an encoder
fills masks or classifies, as its head says.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmsys.config.section import Section

# What each objective needs: the model's family, its head, and the kind of the data.
NEEDS = {
    "next_token": ("decoder", "lm", "crawl"),
    "translation": ("encoder_decoder", "lm", "pairs"),
    "masked": ("encoder", "mlm", "crawl"),
    "classification": ("encoder", "classification", "labelled"),
}


class _BaseObjectiveConfig(Section):
    """An objective over windows of tokens."""

    has_padding: ClassVar[bool] = False  # rows are texts of their own length, padded to the longest


class NextTokenConfig(_BaseObjectiveConfig):
    """Each token from those before it."""

    kind: Literal["next_token"] = "next_token"


class TranslationConfig(_BaseObjectiveConfig):
    """Each token of the target from the source and the target's tokens before it: p(y | x)."""

    kind: Literal["translation"] = "translation"
    has_padding: ClassVar[bool] = True


class MaskedLmConfig(_BaseObjectiveConfig):
    """Some tokens from all others (BERT, Devlin 2018, 3.1): of these, most are masked, some replaced, some kept."""

    kind: Literal["masked"] = "masked"
    mlm_probability: float = Field(0.15, gt=0, lt=1, description="Share of the tokens that are to be predicted.")
    mask_replace_prob: float = Field(0.8, ge=0, le=1, description="Share of the chosen that become the mask token.")
    random_replace_prob: float = Field(0.1, ge=0, le=1, description="Share of the chosen that become a random token.")
    mask_token: str = Field("<mask>", min_length=1, description="Piece of the tokenizer that stands for a mask.")


class ClassificationConfig(_BaseObjectiveConfig):
    """The label of a text."""

    kind: Literal["classification"] = "classification"
    has_padding: ClassVar[bool] = True


ObjectiveConfig = Annotated[
    NextTokenConfig | TranslationConfig | MaskedLmConfig | ClassificationConfig, Field(discriminator="kind")
]


def infer_objective(
    values: dict[str, Any],
) -> NextTokenConfig | TranslationConfig | MaskedLmConfig | ClassificationConfig:
    """The objective that a model is made for."""
    model = values.get("model")
    family, head = (model.family, model.head.kind) if model is not None else ("decoder", "lm")
    if family == "encoder_decoder":
        return TranslationConfig()
    if head == "mlm":
        return MaskedLmConfig()
    return ClassificationConfig() if head == "classification" else NextTokenConfig()


class LossConfig(Section):
    """`loss:` — what is added to plain cross entropy while training. Evaluation is always plain."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="The true class is wanted with 1 - this, the others share this (Szegedy 2015)."
    )
    z_loss: float = Field(
        0.0, ge=0, description="Weight of the square of the logits' log-sum-exp (PaLM, Chowdhery 2022: 1e-4)."
    )
