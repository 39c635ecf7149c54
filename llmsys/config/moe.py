"""The mixture of experts inside a `model:` section.

A router scores the experts for every token, the best few run, and their outputs are summed with the router's weights.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.base import Section
from llmsys.config.rule import Broken, refuse


class BiasBalance(Section):
    """A bias per expert, added to its score for the choice only, moves against its load (Wang 2024; DeepSeek-V3)."""

    kind: Literal["bias"] = "bias"
    rate: float = Field(0.001, ge=0, description="How far the bias moves in each step.")


class AuxiliaryLossBalance(Section):
    """A loss that is smallest when experts share the tokens evenly (Shazeer 2017; Switch, Fedus 2021)."""

    kind: Literal["auxiliary_loss"] = "auxiliary_loss"
    weight: float = Field(0.01, ge=0, description="Weight of this loss beside the language model's.")


class NoBalance(Section):
    """The router is left to itself."""

    kind: Literal["none"] = "none"


BalanceConfig = Annotated[BiasBalance | AuxiliaryLossBalance | NoBalance, Field(discriminator="kind")]


class MoeConfig(Section):
    """Routed experts, shared experts and the router. Every expert is a SwiGLU of width moe_intermediate_size."""

    num_experts: int = Field(ge=1, description="Routed experts of each mixture layer.")
    num_experts_per_tok: int = Field(ge=1, description="Routed experts that each token visits.")
    moe_intermediate_size: int = Field(ge=1, description="Width of one expert, in channels.")
    num_shared_experts: int = Field(
        0,
        ge=0,
        description="Experts that every token visits; together one SwiGLU of num_shared_experts · "
        "moe_intermediate_size channels.",
    )
    first_dense_layers: int = Field(0, ge=0, description="Leading blocks that keep a dense feed-forward.")
    score: Literal["softmax", "sigmoid"] = Field("softmax", description="How router logits become weights.")
    norm_topk_prob: bool = Field(True, description="Whether the weights of the chosen experts are scaled to sum to 1.")
    routed_scaling_factor: float = Field(1.0, gt=0, description="Factor on the weights of the routed experts.")
    balance: BalanceConfig = Field(BiasBalance(), description="What keeps the experts evenly loaded.")

    @model_validator(mode="after")
    def _choice(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            refuse(
                [
                    Broken(
                        "num_experts_per_tok",
                        f"{self.num_experts_per_tok} of {self.num_experts} experts cannot be chosen. "
                        f"Use at most {self.num_experts}.",
                    )
                ]
            )
        return self
