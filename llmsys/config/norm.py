"""Normalisation, and where it stands around the two branches of a block."""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class RmsNormConfig(Section):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019); one weight per channel, no bias."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-5, gt=0, description="Added to the mean square under the root.")
    unit_offset: bool = Field(False, description="Whether the factor is 1 + weight, and weights start at 0 (Gemma).")


class LayerNormConfig(Section):
    """(x − mean) / sqrt(variance + eps) · weight + bias (Ba 2016)."""

    kind: Literal["layernorm"] = "layernorm"
    eps: float = Field(1e-5, gt=0, description="Added to the variance under the root.")
    bias: bool = Field(True, description="Whether there is a bias (PaLM and DBRX have none).")


NormConfig = Annotated[RmsNormConfig | LayerNormConfig, Field(discriminator="kind")]


class PreNormConfig(Section):
    """x + f(norm(x)), and a norm after the last block."""

    kind: Literal["pre"] = "pre"


class PostNormConfig(Section):
    """norm(x + f(x)), as in the original Transformer."""

    kind: Literal["post"] = "post"
    final_norm: bool = Field(False, description="Whether one more norm follows the last block.")


class DeepNormConfig(Section):
    """norm(alpha · x + f(x)), with smaller starting weights; alpha and beta follow from the depth (Wang 2022)."""

    kind: Literal["deepnorm"] = "deepnorm"
    final_norm: bool = Field(False, description="Whether one more norm follows the last block (GLM-130B).")


class SandwichNormConfig(Section):
    """x + norm(f(norm(x))), and a norm after the last block (Gemma 2)."""

    kind: Literal["sandwich"] = "sandwich"


class OutputNormConfig(Section):
    """x + norm(f(x)), and a norm after the last block (OLMo 2)."""

    kind: Literal["output"] = "output"


class ParallelBlockConfig(Section):
    """x + attention(norm(x)) + feed_forward(norm(x)), and a norm after the last block (GPT-J, PaLM, Falcon)."""

    kind: Literal["parallel"] = "parallel"
    norms: Literal[1, 2] = Field(1, description="One norm for both branches, or one each (GPT-NeoX, Falcon 40B).")


ResidualConfig = Annotated[
    PreNormConfig | PostNormConfig | DeepNormConfig | SandwichNormConfig | OutputNormConfig | ParallelBlockConfig,
    Field(discriminator="kind"),
]
