"""Normalization layers and their placement around the branches of a block.

Each kind lists its parameters and the tensors that it saves for the backward.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmsys.config.module_tensors import FP32_BYTES, ActivationShape, ParameterTensor, SavedTensor
from llmsys.config.section import Section
from llmsys.errors import Violation


class RmsNormConfig(Section):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019); one weight per channel, no
    bias.
    """

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(
        1e-5, gt=0, description="Epsilon added to the mean square, inside the square root."
    )
    unit_offset: bool = Field(
        False, description="Scale by 1 + weight, with weights initialized to 0 (Gemma)."
    )

    def iter_parameters(self, name: str, channels: int) -> Iterator[ParameterTensor]:
        """Yield the weight of a norm over `channels`."""
        yield ParameterTensor(f"{name}.weight", (channels,), "norms")

    def compute_row_statistics_bytes(self, shape: ActivationShape) -> int:
        """Return the bytes saved for each row: the float32 scale."""
        return FP32_BYTES

    def is_unscaled_input_saved(self, shape: ActivationShape) -> bool:
        """Return whether the product before the weight is saved: in float32 a CPU runs several
        ops, not one kernel.
        """
        return shape.is_on_cpu and shape.value_bytes == FP32_BYTES

    def iter_saved_tensors(
        self, name: str, channels: int, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        """Yield the tensors saved besides the input of a norm over `channels`."""
        statistics = shape.compute_residual_bytes(1, self.compute_row_statistics_bytes(shape))
        yield SavedTensor(f"statistics of {name}", statistics, "pointwise")
        if self.unit_offset and shape.value_bytes != FP32_BYTES:
            yield SavedTensor(
                f"float32 input of {name}",
                shape.compute_residual_bytes(channels, FP32_BYTES),
                "fused",
            )
        if self.is_unscaled_input_saved(shape) or (self.unit_offset and shape.is_on_cpu):
            yield SavedTensor(
                f"unscaled {name}", shape.compute_residual_bytes(channels, FP32_BYTES), "fused"
            )


class LayerNormConfig(Section):
    """(x − mean) / sqrt(variance + eps) · weight + bias (Ba 2016)."""

    kind: Literal["layernorm"] = "layernorm"
    eps: float = Field(
        1e-5, gt=0, description="Epsilon added to the variance, inside the square root."
    )
    bias: bool = Field(True, description="Add a bias (PaLM and DBRX: false).")

    def iter_parameters(self, name: str, channels: int) -> Iterator[ParameterTensor]:
        """Yield the weight, and the bias where there is one, of a norm over `channels`."""
        yield ParameterTensor(f"{name}.weight", (channels,), "norms")
        if self.bias:
            yield ParameterTensor(f"{name}.bias", (channels,), "norms")

    def compute_row_statistics_bytes(self, shape: ActivationShape) -> int:
        """Return the bytes saved for each row: mean and scale, on GPUs in float32."""
        return 2 * (shape.value_bytes if shape.is_on_cpu else FP32_BYTES)

    def is_unscaled_input_saved(self, shape: ActivationShape) -> bool:
        """Return False: layer norm is one kernel on every device."""
        return False

    def iter_saved_tensors(
        self, name: str, channels: int, shape: ActivationShape
    ) -> Iterator[SavedTensor]:
        """Yield the tensors saved besides the input of a norm over `channels`."""
        statistics = shape.compute_residual_bytes(1, self.compute_row_statistics_bytes(shape))
        yield SavedTensor(f"statistics of {name}", statistics, "pointwise")


NormConfig = Annotated[RmsNormConfig | LayerNormConfig, Field(discriminator="kind")]


class _BaseResidualConfig(Section):
    """Placement of norms around the branches of a block. Modules and the estimate read these
    flags, not the kind.
    """

    normalizes_input: ClassVar[bool] = False  # a norm before the branch
    normalizes_output: ClassVar[bool] = False  # a norm between the branch and the sum
    normalizes_sum: ClassVar[bool] = False  # a norm after the sum
    is_parallel: ClassVar[bool] = False  # all branches read the same input
    # states are computed from later ones in the backward pass
    is_reversible: ClassVar[bool] = False

    @property
    def has_final_norm(self) -> bool:
        """True if a norm follows the last block."""
        return True

    @property
    def shares_input_norm(self) -> bool:
        """True if the feed-forward reads the output of the attention's norm."""
        return False


class PreNormConfig(_BaseResidualConfig):
    """x + multiplier · f(norm(x)), and a norm after the last block."""

    kind: Literal["pre"] = "pre"
    normalizes_input: ClassVar[bool] = True
    multiplier: float = Field(
        1.0, gt=0, description="Factor on the output of each branch before it is added (Granite)."
    )


class ReversibleConfig(_BaseResidualConfig):
    """Two streams, y = x + attention(norm(x')) and y' = x' + feed_forward(norm(y)) (Reformer; Gomez
    2017).

    No activation is saved between blocks: the backward pass computes them from those after them.
    The final norm reads the mean of both streams.
    """

    kind: Literal["reversible"] = "reversible"
    normalizes_input: ClassVar[bool] = True
    is_reversible: ClassVar[bool] = True

    def find_violations(self, model: dict[str, Any]) -> Iterator[Violation]:
        """Yield what would differ between a pass and its repetition, by the fields of a model."""
        family = model["family"]
        given = [
            f"dropout.{name}"
            for name, rate in model["dropout"]
            if rate and name not in ("embedding", "final")
        ]
        given += [
            name
            for name in ("moe", "recurrence", "multi_token_prediction")
            if model[name] is not None
        ]
        if family == "encoder_decoder":
            yield Violation(
                "residual.kind", "reversible has no cross-attention. Use pre, or another family."
            )
        for key in given:
            yield Violation(
                key,
                "residual.kind=reversible repeats branches on rounded inputs"
                f". Leave {key} out, or use residual.kind=pre.",
            )


class PostNormConfig(_BaseResidualConfig):
    """norm(x + f(x)), as in the original Transformer."""

    kind: Literal["post"] = "post"
    normalizes_sum: ClassVar[bool] = True
    final_norm: bool = Field(False, description="Add a norm after the last block.")

    @property
    def has_final_norm(self) -> bool:
        """True if a norm follows the last block."""
        return self.final_norm


class DeepNormConfig(_BaseResidualConfig):
    """norm(alpha · x + f(x)), with smaller starting weights; alpha and beta follow from the
    depth (Wang 2022).
    """

    kind: Literal["deepnorm"] = "deepnorm"
    normalizes_sum: ClassVar[bool] = True
    final_norm: bool = Field(False, description="Add a norm after the last block (GLM-130B).")

    @property
    def has_final_norm(self) -> bool:
        """True if a norm follows the last block."""
        return self.final_norm


class SandwichNormConfig(_BaseResidualConfig):
    """x + norm(f(norm(x))), and a norm after the last block (Gemma 2)."""

    kind: Literal["sandwich"] = "sandwich"
    normalizes_input: ClassVar[bool] = True
    normalizes_output: ClassVar[bool] = True


class OutputNormConfig(_BaseResidualConfig):
    """x + norm(f(x)), and a norm after the last block (OLMo 2)."""

    kind: Literal["output"] = "output"
    normalizes_output: ClassVar[bool] = True
    linear_layers: Literal["output", "pre"] = Field(
        "output", description="The same, or pre, in layers of linear attention (OLMo Hybrid)."
    )


class ParallelBlockConfig(_BaseResidualConfig):
    """x + attention(norm(x)) + feed_forward(norm(x)), and a norm after the last block (GPT-J,
    PaLM, Falcon).
    """

    kind: Literal["parallel"] = "parallel"
    normalizes_input: ClassVar[bool] = True
    is_parallel: ClassVar[bool] = True
    norms: Literal[1, 2] = Field(
        1,
        description="Number of input norms: one for both branches, or one for each (GPT-NeoX, "
        "Falcon 40B).",
    )

    @property
    def shares_input_norm(self) -> bool:
        """True if the feed-forward reads the output of the attention's norm."""
        return self.norms == 1


ResidualConfig = Annotated[
    PreNormConfig
    | PostNormConfig
    | DeepNormConfig
    | SandwichNormConfig
    | OutputNormConfig
    | ParallelBlockConfig
    | ReversibleConfig,
    Field(discriminator="kind"),
]
