"""Configuration of feed-forward layers, plain or gated (Shazeer 2020, arXiv:2002.05202).

Dense layers and experts share these kinds.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmsys.config.module_tensors import (
    Component,
    ParameterTensor,
    SavedTensor,
    iter_linear_parameters,
)
from llmsys.config.python_blocks import PythonFeedForwardConfig
from llmsys.config.section import Section

Activation = Literal["relu", "squared_relu", "gelu", "gelu_tanh", "silu"]
BIAS = Field(False, description="Add a bias to every linear layer.")


class _BaseFeedForwardConfig(Section):
    """Base of the feed-forward layers: down(activation(up(x))), or with a gate."""

    is_gated: ClassVar[bool] = False

    @property
    def projections(self) -> tuple[str, ...]:
        """Names of the linear maps of one layer, in the order of construction."""
        return ("gate", "up", "down") if self.is_gated else ("up", "down")

    def iter_saved_tensors(
        self, suffix: str, inner_bytes: int, *, has_dropout: bool = False
    ) -> Iterator[SavedTensor]:
        """Yield the saved tensors between the up- and down-projections.

        Args:
            suffix: suffix of each tensor name, such as " of experts".
            inner_bytes: bytes of one tensor of the inner width.
            has_dropout: dropout follows the activation; `down` then saves the output of dropout
                instead.
        """
        yield SavedTensor(f"up{suffix}", inner_bytes, "product")
        yield SavedTensor(f"activated{suffix}", inner_bytes, "pointwise", is_saved=not has_dropout)


class _BaseGatedConfig(_BaseFeedForwardConfig):
    """Base of the gated layers: down(activation(gate(x)) · up(x))."""

    is_gated: ClassVar[bool] = True
    # saved tensors of the inner width between the projections and the activation
    num_clamped: ClassVar[int] = 0

    def iter_saved_tensors(
        self, suffix: str, inner_bytes: int, *, has_dropout: bool = False
    ) -> Iterator[SavedTensor]:
        """Yield the saved tensors between the gate, up- and down-projections."""
        yield SavedTensor(f"gate{suffix}", inner_bytes, "product")
        yield SavedTensor(f"up{suffix}", inner_bytes, "product")
        if self.num_clamped:
            yield SavedTensor(
                f"clamped gate and up{suffix}", self.num_clamped * inner_bytes, "fused"
            )
        yield SavedTensor(f"activated gate{suffix}", inner_bytes, "fused")
        yield SavedTensor(
            f"gate times up{suffix}", inner_bytes, "pointwise", is_saved=not has_dropout
        )


class ReluConfig(_BaseFeedForwardConfig):
    """down(relu(up(x))), as in the original Transformer."""

    kind: Literal["relu"] = "relu"
    bias: bool = BIAS

    def iter_saved_tensors(
        self, suffix: str, inner_bytes: int, *, has_dropout: bool = False
    ) -> Iterator[SavedTensor]:
        """Yield the saved tensors between the up- and down-projections."""
        # ReLU saves its output, not its input.
        yield SavedTensor(f"up{suffix}", inner_bytes, "product", is_saved=False)
        yield SavedTensor(f"activated{suffix}", inner_bytes, "pointwise")


class SquaredReluConfig(_BaseFeedForwardConfig):
    """down(relu(up(x))²) (Primer, So et al. 2021, arXiv:2109.08668; AFM, the GPT speedruns)."""

    kind: Literal["squared_relu"] = "squared_relu"
    bias: bool = BIAS

    def iter_saved_tensors(
        self, suffix: str, inner_bytes: int, *, has_dropout: bool = False
    ) -> Iterator[SavedTensor]:
        """Yield the saved tensors between the up- and down-projections."""
        # ReLU and the square save the same tensor.
        yield SavedTensor(f"up{suffix}", inner_bytes, "product", is_saved=False)
        yield SavedTensor(f"rectified{suffix}", inner_bytes, "fused")
        yield SavedTensor(f"activated{suffix}", inner_bytes, "pointwise", is_saved=not has_dropout)


class GeluConfig(_BaseFeedForwardConfig):
    """down(gelu(up(x))) with the exact GELU."""

    kind: Literal["gelu"] = "gelu"
    bias: bool = BIAS


class GeluTanhConfig(_BaseFeedForwardConfig):
    """down(gelu(up(x))) with GELU's tanh form, as in GPT-2."""

    kind: Literal["gelu_tanh"] = "gelu_tanh"
    bias: bool = BIAS


class SiluConfig(_BaseFeedForwardConfig):
    """down(silu(up(x))), as in Marian ("swish")."""

    kind: Literal["silu"] = "silu"
    bias: bool = BIAS


class SwigluConfig(_BaseGatedConfig):
    """down(silu(gate(x)) · up(x))."""

    kind: Literal["swiglu"] = "swiglu"
    bias: bool = BIAS


class GegluConfig(_BaseGatedConfig):
    """down(gelu(gate(x)) · up(x)) with the exact GELU (GLM-130B)."""

    kind: Literal["geglu"] = "geglu"
    bias: bool = BIAS


class GegluTanhConfig(_BaseGatedConfig):
    """down(gelu(gate(x)) · up(x)) with GELU's tanh form (T5 1.1, Gemma)."""

    kind: Literal["geglu_tanh"] = "geglu_tanh"
    bias: bool = BIAS


class ClampedSwigluConfig(_BaseGatedConfig):
    """down((up + 1) · gate · sigmoid(alpha · gate)) with gate and up cut at the limit (gpt-oss)."""

    kind: Literal["clamped_swiglu"] = "clamped_swiglu"
    num_clamped: ClassVar[int] = 3  # the clamped gate, its sigmoid, up + 1
    bias: bool = BIAS
    alpha: float = Field(1.702, gt=0, description="Slope of the sigmoid.")
    limit: float = Field(
        7.0,
        gt=0,
        description="Clamp limit: the gate projection from above, the up projection on both sides.",
    )


FeedForwardConfig = Annotated[
    ReluConfig
    | SquaredReluConfig
    | GeluConfig
    | GeluTanhConfig
    | SiluConfig
    | SwigluConfig
    | GegluConfig
    | GegluTanhConfig
    | ClampedSwigluConfig,
    Field(discriminator="kind"),
]

# Those of dense layers. Experts are built in, since their matrices are stacked and grouped.
DenseFeedForwardConfig = Annotated[
    ReluConfig
    | SquaredReluConfig
    | GeluConfig
    | GeluTanhConfig
    | SiluConfig
    | SwigluConfig
    | GegluConfig
    | GegluTanhConfig
    | ClampedSwigluConfig
    | PythonFeedForwardConfig,
    Field(discriminator="kind"),
]


def iter_feed_forward_parameters(
    config: FeedForwardConfig,
    name: str,
    hidden: int,
    width: int,
    component: Component = "feed_forward",
) -> Iterator[ParameterTensor]:
    """Yield the parameters of a feed-forward layer.

    Args:
        config: kind of the layer.
        name: prefix of the parameter names, such as `feed_forward`.
        hidden: channels of its input and output.
        width: channels between the projections.
        component: component that the parameters are counted in.

    Yields:
        The weight, and the bias where there is one, of each projection.
    """
    for projection in config.projections:
        outputs, inputs = (hidden, width) if projection == "down" else (width, hidden)
        yield from iter_linear_parameters(
            f"{name}.{projection}_proj", outputs, inputs, config.bias, component
        )
