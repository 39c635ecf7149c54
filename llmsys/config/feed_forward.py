"""The feed-forward layer: two linear maps around an activation, or three with a gate (Shazeer 2020).

The same kinds serve dense layers and experts.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
BIAS = Field(False, description="Whether every linear map has a bias.")


class ReluConfig(Section):
    """down(relu(up(x))), as in the original Transformer."""

    kind: Literal["relu"] = "relu"
    bias: bool = BIAS


class GeluConfig(Section):
    """down(gelu(up(x))) with the exact GELU."""

    kind: Literal["gelu"] = "gelu"
    bias: bool = BIAS


class GeluTanhConfig(Section):
    """down(gelu(up(x))) with GELU's tanh form, as in GPT-2."""

    kind: Literal["gelu_tanh"] = "gelu_tanh"
    bias: bool = BIAS


class SiluConfig(Section):
    """down(silu(up(x))), as in Marian ("swish")."""

    kind: Literal["silu"] = "silu"
    bias: bool = BIAS


class SwigluConfig(Section):
    """down(silu(gate(x)) · up(x))."""

    kind: Literal["swiglu"] = "swiglu"
    bias: bool = BIAS


class GegluConfig(Section):
    """down(gelu(gate(x)) · up(x)) with the exact GELU (GLM-130B)."""

    kind: Literal["geglu"] = "geglu"
    bias: bool = BIAS


class GegluTanhConfig(Section):
    """down(gelu(gate(x)) · up(x)) with GELU's tanh form (T5 1.1, Gemma)."""

    kind: Literal["geglu_tanh"] = "geglu_tanh"
    bias: bool = BIAS


class ClampedSwigluConfig(Section):
    """down((up + 1) · gate · sigmoid(alpha · gate)) with gate and up cut at the limit (gpt-oss)."""

    kind: Literal["clamped_swiglu"] = "clamped_swiglu"
    bias: bool = BIAS
    alpha: float = Field(1.702, gt=0, description="Steepness of the sigmoid.")
    limit: float = Field(7.0, gt=0, description="gate is cut above, up on both sides.")


FeedForwardConfig = Annotated[
    ReluConfig
    | GeluConfig
    | GeluTanhConfig
    | SiluConfig
    | SwigluConfig
    | GegluConfig
    | GegluTanhConfig
    | ClampedSwigluConfig,
    Field(discriminator="kind"),
]

GATED = frozenset({"swiglu", "geglu", "geglu_tanh", "clamped_swiglu"})


def list_projection_names(config: FeedForwardConfig) -> tuple[str, ...]:
    """The linear maps of one layer, in the order in which they are built."""
    return ("gate", "up", "down") if config.kind in GATED else ("up", "down")
