"""The architecture: what a `model:` section or a file under configs/model can say.

Names follow Hugging Face's config.json. Read by estimate (counts), model (modules) and convert; promises that every
value accepted here can be built, and that one which cannot is refused with the nearest value that can.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.base import Section
from llmsys.config.moe import MoeConfig
from llmsys.config.rule import Broken, divisors, listed, nearest, nearest_multiples, refuse

EXPERT_WIDTH_UNIT = 8  # rows of 16 bytes in bf16: what torch.nn.functional.grouped_mm takes


class RmsNorm(Section):
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019); one weight per channel, no bias."""

    kind: Literal["rmsnorm"] = "rmsnorm"
    eps: float = Field(1e-5, gt=0, description="Added to the mean square under the root.")


class LayerNorm(Section):
    """(x − mean) / sqrt(variance + eps) · weight + bias (Ba 2016)."""

    kind: Literal["layernorm"] = "layernorm"
    eps: float = Field(1e-5, gt=0, description="Added to the variance under the root.")


class Swiglu(Section):
    """down(silu(gate(x)) · up(x)): three matrices (Shazeer 2020)."""

    kind: Literal["swiglu"] = "swiglu"


class Gelu(Section):
    """down(gelu(up(x))): two matrices, as in GPT."""

    kind: Literal["gelu"] = "gelu"


class Relu(Section):
    """down(relu(up(x))): two matrices, as in the original Transformer."""

    kind: Literal["relu"] = "relu"


class Rope(Section):
    """Queries and keys are rotated by an angle that grows with the position (Su 2021)."""

    kind: Literal["rope"] = "rope"
    theta: float = Field(10000.0, gt=0, description="Base of the wave lengths; the longest is 2·pi·theta positions.")


class NoPosition(Section):
    """No position signal beside the causal mask."""

    kind: Literal["none"] = "none"


NormConfig = Annotated[RmsNorm | LayerNorm, Field(discriminator="kind")]
FeedForwardConfig = Annotated[Swiglu | Gelu | Relu, Field(discriminator="kind")]
PositionConfig = Annotated[Rope | NoPosition, Field(discriminator="kind")]


def _head_dim(values: dict[str, Any]) -> int:
    return max(1, int(values["hidden_size"]) // int(values["num_attention_heads"]))


def _key_value_heads(values: dict[str, Any]) -> int:
    return int(values["num_attention_heads"])


class ModelConfig(Section):
    """A decoder-only Transformer: pre-norm blocks of causal attention and a dense or mixture-of-experts feed-forward.

    No linear map has a bias. `intermediate_size` is the width of the dense feed-forward layers and may be left out when
    there are none.
    """

    vocab_size: int = Field(ge=2, description="Rows of the token embedding and of the head.")
    hidden_size: int = Field(ge=1, description="Width of the residual stream, in channels.")
    intermediate_size: int = Field(0, ge=0, description="Width of a dense feed-forward layer, in channels.")
    num_hidden_layers: int = Field(ge=1, description="Number of blocks.")
    num_attention_heads: int = Field(ge=1, description="Query heads of each attention layer.")
    num_key_value_heads: int = Field(
        default_factory=_key_value_heads,
        ge=1,
        description="Key and value heads; each serves num_attention_heads / num_key_value_heads query heads. "
        "Left out: as many as num_attention_heads.",
    )
    head_dim: int = Field(
        default_factory=_head_dim,
        ge=1,
        description="Channels of one head. Left out: hidden_size / num_attention_heads.",
    )
    max_position_embeddings: int = Field(2048, ge=1, description="Longest sequence, in positions.")
    tie_word_embeddings: bool = Field(False, description="Whether the head uses the embedding matrix.")
    initializer_range: float = Field(0.02, gt=0, description="Standard deviation of the starting weights.")
    norm: NormConfig = Field(RmsNorm(), description="Normalisation before attention, feed-forward and head.")
    position: PositionConfig = Field(Rope(), description="How positions reach attention.")
    feed_forward: FeedForwardConfig = Field(Swiglu(), description="Dense feed-forward layers; experts are SwiGLU.")
    moe: MoeConfig | None = Field(None, description="Mixture of experts; null builds a dense model.")

    @model_validator(mode="after")
    def _shapes(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[Broken]:
        heads, pairs = self.num_attention_heads, self.num_key_value_heads
        if "head_dim" not in self.model_fields_set and self.hidden_size % heads:
            near = listed(nearest_multiples(self.hidden_size, heads))
            yield Broken(
                "hidden_size",
                f"{self.hidden_size} channels cannot be split over num_attention_heads={heads}. "
                f"Use {near}, or set head_dim.",
            )
        if heads % pairs:
            yield Broken(
                "num_key_value_heads",
                f"{pairs} does not divide num_attention_heads={heads}. Use {nearest(pairs, divisors(heads))}.",
            )
        if self.position.kind == "rope" and self.head_dim % 2:
            yield Broken(
                "head_dim",
                f"{self.head_dim} is odd, and rope rotates pairs of channels. "
                f"Use {self.head_dim + 1}, or position.kind=none.",
            )
        if self.num_dense_layers and not self.intermediate_size:
            yield Broken(
                "intermediate_size",
                f"{self.num_dense_layers} dense layers need a width above 0. "
                f"Set it, for example to {4 * self.hidden_size}.",
            )
        yield from self._expert_problems()

    def _expert_problems(self) -> Iterator[Broken]:
        if self.moe is None:
            return
        widths = {"hidden_size": self.hidden_size, "moe.moe_intermediate_size": self.moe.moe_intermediate_size}
        for key, width in widths.items():
            if width % EXPERT_WIDTH_UNIT:
                near = listed(nearest_multiples(width, EXPERT_WIDTH_UNIT))
                yield Broken(
                    key,
                    f"{width} is not a multiple of {EXPERT_WIDTH_UNIT}, which grouped products of experts need. "
                    f"Use {near}.",
                )
        if self.moe.first_dense_layers >= self.num_hidden_layers:
            yield Broken(
                "moe.first_dense_layers",
                f"{self.moe.first_dense_layers} leaves none of the {self.num_hidden_layers} layers to the experts. "
                f"Use at most {self.num_hidden_layers - 1}, or set moe to null.",
            )

    @property
    def num_dense_layers(self) -> int:
        """Blocks with a dense feed-forward; they come before the mixture-of-experts blocks."""
        return self.moe.first_dense_layers if self.moe else self.num_hidden_layers

    @property
    def num_moe_layers(self) -> int:
        """Blocks with a mixture of experts."""
        return self.num_hidden_layers - self.num_dense_layers
