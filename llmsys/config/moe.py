"""Configuration of mixture-of-experts layers (`model.moe:`): experts, routing and load balancing.

A router scores the experts for each token. The top k run, and their outputs are summed with the
router's weights.
"""

from collections.abc import Iterator
from math import ceil
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.feed_forward import FeedForwardConfig, SwigluConfig, iter_feed_forward_parameters
from llmsys.config.module_tensors import (
    FP32_BYTES,
    ActivationShape,
    ParameterTensor,
    Producer,
    SavedTensor,
    iter_linear_parameters,
)
from llmsys.config.section import Section, find_nearest, list_divisors, raise_violations
from llmsys.errors import Violation


class _BaseBalancingConfig(Section):
    """Base of the kinds of load balancing."""

    # float32 tensors of (tokens, experts) that the router saves
    num_saved_scores: ClassVar[int] = 1


class BiasBalancingConfig(_BaseBalancingConfig):
    """Auxiliary-loss-free balancing: a bias per expert, for the selection only (Wang et al.
    2024; DeepSeek-V3).
    """

    kind: Literal["bias"] = "bias"
    rate: float = Field(0.001, ge=0, description="Update rate of the bias per step.")
    sequence_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the additional sequence-level balance loss (DeepSeek-V3: 0.0001).",
    )


class AuxiliaryLossConfig(_BaseBalancingConfig):
    """An auxiliary loss that is smallest for an even load (Shazeer et al. 2017; Switch, Fedus et
    al. 2021).
    """

    kind: Literal["auxiliary_loss"] = "auxiliary_loss"
    num_saved_scores: ClassVar[int] = 4
    weight: float = Field(
        0.01, ge=0, description="Weight of this loss, added to the language modeling loss."
    )
    scope: Literal["batch", "sequence"] = Field(
        "batch",
        description="Balance over the tokens of a step (with the loads of the previous step), or "
        "within each sequence.",
    )


class NoBalancingConfig(_BaseBalancingConfig):
    """No load balancing."""

    kind: Literal["none"] = "none"


BalanceConfig = Annotated[
    BiasBalancingConfig | AuxiliaryLossConfig | NoBalancingConfig, Field(discriminator="kind")
]


class _BaseRoutingConfig(Section):
    """Base of the kinds of routing."""

    def count_visits(self, moe: "MoeConfig") -> float:
        """Return the routed experts per token, on average; dropped tokens are not predicted."""
        return moe.num_experts_per_tok

    def count_sequence_visits(self, moe: "MoeConfig", length: int) -> int:
        """Return the token-expert pairs in a sequence of `length` tokens."""
        return moe.num_experts_per_tok * length


class TokenChoiceConfig(_BaseRoutingConfig):
    """Dropless token choice: each token visits its top experts, whatever their load."""

    kind: Literal["token_choice"] = "token_choice"


class _BaseCapacityConfig(_BaseRoutingConfig):
    scope: Literal["sequence", "document"] = Field(
        "sequence",
        description="Tokens that share the capacity. document: packed documents are routed as if "
        "alone.",
    )


class ExpertCapacityConfig(_BaseCapacityConfig):
    """Token choice with an expert capacity per sequence; tokens above it are dropped (GShard;
    Lepikhin et al. 2020).
    """

    kind: Literal["capacity"] = "capacity"
    factor: float = Field(
        1.25,
        gt=0,
        description="Capacity per expert is factor · tokens · experts per token / experts. "
        "Evaluation drops no tokens.",
    )


class ExpertChoiceConfig(_BaseCapacityConfig):
    """Expert choice: each expert takes its top tokens of a sequence (Zhou et al. 2022).

    The selection sees later tokens, so it suits training and encoders. The weights are the scores
    themselves: `num_experts_per_tok` and `norm_topk_prob` have no effect.
    """

    kind: Literal["expert_choice"] = "expert_choice"
    factor: float = Field(2.0, gt=0, description="Experts per token, on average.")

    def count_visits(self, moe: "MoeConfig") -> float:
        """Return the routed experts per token, on average."""
        return min(self.factor, moe.num_experts)

    def count_sequence_visits(self, moe: "MoeConfig", length: int) -> int:
        """Return the token-expert pairs in a sequence of `length` tokens; each expert rounds its
        tokens up.
        """
        # 1e-9: a share that is a whole number of tokens is not rounded up by its last bit.
        return moe.num_experts * min(length, ceil(self.factor / moe.num_experts * length - 1e-9))


RoutingConfig = Annotated[
    TokenChoiceConfig | ExpertCapacityConfig | ExpertChoiceConfig, Field(discriminator="kind")
]


class GroupLimitedRoutingConfig(Section):
    """Group-limited routing: a token visits experts of its top groups only (DeepSeek-V2, 2.2.2)."""

    num_groups: int = Field(ge=1, description="Number of expert groups of equal size.")
    groups_per_token: int = Field(
        ge=1, description="Number of groups that a token may be routed to."
    )
    score: Literal["max", "top2"] = Field(
        "max",
        description="Score of a group: its best expert (DeepSeek-V2), or the sum of its best two "
        "(DeepSeek-V3).",
    )


class MoeConfig(Section):
    """Mixture-of-experts layers: routed experts, shared experts and the router."""

    num_experts: int = Field(ge=1, le=10**12, description="Number of routed experts per layer.")
    num_experts_per_tok: int = Field(ge=1, description="Number of routed experts per token.")
    moe_intermediate_size: int = Field(
        ge=1, le=10**12, description="Width of one expert, in channels."
    )
    expert: FeedForwardConfig = Field(
        SwigluConfig(), description="Activation of routed and shared experts."
    )
    num_shared_experts: int = Field(
        0,
        ge=0,
        description="Number of shared experts, which process every token; built as one layer of "
        "num_shared_experts · moe_intermediate_size channels.",
    )
    shared_intermediate_size: int | None = Field(
        None,
        ge=1,
        description="Width of the shared layer if it is not a multiple of an expert's (Qwen2-MoE).",
    )
    latent_size: int | None = Field(
        None,
        ge=1,
        description="Channels in which routed experts compute: tokens are projected down before "
        "they travel, and the sum of their experts up (LatentMoE; Nemotron 3). null: hidden_size.",
    )
    shared_gate: bool = Field(
        False, description="Scale the output of the shared layer by sigmoid(w·x) (Qwen2-MoE)."
    )
    first_dense_layers: int = Field(
        0, ge=0, description="Number of leading blocks with a dense feed-forward."
    )
    every: int = Field(
        1, ge=1, description="Put experts in every k-th block only, starting at the k-th."
    )
    dense_layers: tuple[int, ...] = Field((), description="Further dense blocks, by index from 0.")
    score: Literal["softmax", "sigmoid", "sparsemixer"] = Field(
        "softmax",
        description="Function from router logits to weights. sparsemixer: the two choices of "
        "Phi-3.5-MoE.",
    )
    norm_topk_prob: bool = Field(
        True,
        description="Normalize the weights of the chosen experts to sum 1, equal to a softmax "
        "after top-k. Not used by sparsemixer and expert_choice.",
    )
    routed_scaling_factor: float = Field(
        1.0, gt=0, description="Scale of the weights of the routed experts."
    )
    router_bias: bool = Field(False, description="Add a bias to the router (gpt-oss).")
    jitter: float = Field(
        0.01,
        ge=0,
        description="sparsemixer: mask experts whose score is further than twice this from the "
        "best.",
    )
    groups: GroupLimitedRoutingConfig | None = Field(
        None, description="Restrict the choice to the best expert groups. null: no restriction."
    )
    routing: RoutingConfig = Field(
        TokenChoiceConfig(),
        description="Routing: tokens choose experts (with or without capacity), or experts choose "
        "tokens.",
    )
    balance: BalanceConfig = Field(BiasBalancingConfig(), description="Load balancing.")
    z_loss_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of the mean of logsumexp(router logits)² (ST-MoE; Zoph 2022).",
    )

    @model_validator(mode="after")
    def _check_routing(self) -> Self:
        raise_violations(self._find_violations())
        return self

    def _find_violations(self) -> Iterator[Violation]:
        experts, visits = self.num_experts, self.num_experts_per_tok
        if visits > experts:
            yield Violation(
                "num_experts_per_tok",
                f"{visits} of {experts} experts cannot be chosen. Use at most {experts}.",
            )
        if self.score == "sparsemixer" and visits != 2:
            yield Violation(
                "num_experts_per_tok", f"sparsemixer chooses 2 experts, not {visits}. Use 2."
            )
        if self.shared_gate and not self.shared_expert_size:
            yield Violation(
                "shared_gate",
                "there is no shared expert to scale. Set num_shared_experts or leave it out.",
            )
        if self.routing.kind == "expert_choice" and self.groups is not None:
            yield Violation(
                "groups",
                "expert groups restrict the choice of tokens, but with expert_choice experts "
                "choose. Set it to null.",
            )
        if self.routing.kind == "expert_choice" and self.score == "sparsemixer":
            yield Violation(
                "score",
                "sparsemixer routes by token choice, but with expert_choice experts choose. Use "
                "softmax.",
            )
        if self.groups is not None:
            yield from self._find_group_violations(self.groups)

    def _find_group_violations(self, groups: GroupLimitedRoutingConfig) -> Iterator[Violation]:
        experts, count = self.num_experts, groups.num_groups
        if experts % count:
            yield Violation(
                "groups.num_groups",
                f"{count} groups cannot share {experts} experts evenly. Use "
                f"{find_nearest(count, list_divisors(experts))}.",
            )
            return
        size = experts // count
        if groups.groups_per_token > count:
            yield Violation(
                "groups.groups_per_token",
                f"{groups.groups_per_token} of {count} groups. Use at most {count}.",
            )
        elif groups.groups_per_token * size < self.num_experts_per_tok:
            needed = -(-self.num_experts_per_tok // size)
            yield Violation(
                "groups.groups_per_token",
                f"{groups.groups_per_token} groups of {size} experts have fewer than "
                f"{self.num_experts_per_tok}"
                f" experts. Use at least {needed}.",
            )
        if groups.score == "top2" and size < 2:
            yield Violation(
                "groups.score", "top2 needs two experts in each group. Use max, or fewer groups."
            )

    def iter_parameters(self, name: str, hidden: int) -> Iterator[ParameterTensor]:
        """Yield the router, the stacked experts and the shared experts of a layer.

        Args:
            name: name of its module, the prefix of theirs.
            hidden: width of the model.
        """
        width, inner = self.moe_intermediate_size, self.get_expert_channels(hidden)
        yield from iter_linear_parameters(
            f"{name}.router", self.num_experts, hidden, self.router_bias, "router"
        )
        if self.latent_size is not None:
            for projection, shape in (("fc1", (inner, hidden)), ("fc2", (hidden, inner))):
                yield ParameterTensor(
                    f"{name}.{projection}_latent_proj.weight", shape, "experts", input="token"
                )
        # (experts, in, out), the transpose of a linear map
        for projection in self.expert.projections:
            inputs, outputs = (width, inner) if projection == "down" else (inner, width)
            stacked = (self.num_experts, inputs, outputs)
            yield ParameterTensor(
                f"{name}.experts.{projection}_proj", stacked, "experts", input="visit"
            )
        for projection in self.expert.projections if self.expert.bias else ():
            biases = (self.num_experts, inner if projection == "down" else width)
            yield ParameterTensor(f"{name}.experts.{projection}_bias", biases, "experts")
        if self.shared_expert_size:
            yield from iter_feed_forward_parameters(
                self.expert, f"{name}.shared", hidden, self.shared_expert_size, "shared_experts"
            )
        if self.shared_gate:
            yield from iter_linear_parameters(
                f"{name}.shared_gate", 1, hidden, False, "shared_experts"
            )

    def iter_saved_tensors(
        self, hidden: int, shape: ActivationShape, *, is_output_saved: bool
    ) -> Iterator[SavedTensor]:
        """Yield the saved tensors of router, dispatch, experts and combine.

        Args:
            hidden: channels of the layer's input.
            shape: the micro-batch of one rank, whose experts have `expert_load` times the mean of
                the ranks' tokens.
            is_output_saved: the residual branch saves the layer's output.
        """
        visits, bytes_of = shape.expert_load * self.visits_per_token, shape.compute_residual_bytes
        inner = self.get_expert_channels(hidden)
        yield from self._iter_router_tensors(hidden, shape)
        if self.latent_size is not None:
            yield SavedTensor("latents of tokens", bytes_of(inner), "product", is_saved=False)
        sorted_by: Producer = "collective" if shape.are_experts_sharded else "pointwise"
        yield SavedTensor("sorted visits", bytes_of(visits * inner), sorted_by)
        yield from self.expert.iter_saved_tensors(
            " of experts", bytes_of(visits * self.moe_intermediate_size)
        )
        yield SavedTensor("expert outputs", bytes_of(visits * inner), "product")
        if self.shared_expert_size:
            yield from self.expert.iter_saved_tensors(
                " of shared experts", bytes_of(self.shared_expert_size)
            )
            saved = self.shared_gate  # the gate multiplies it
            yield SavedTensor(
                "shared expert output", bytes_of(hidden), "product", is_saved=saved, is_needed=saved
            )
        if self.latent_size is not None:
            yield SavedTensor("sum of experts in latents", bytes_of(inner), "pointwise")
            yield SavedTensor(
                "projected sum of experts", bytes_of(hidden), "product", is_saved=False
            )
        yield SavedTensor("sum of experts", bytes_of(hidden), "pointwise", is_saved=is_output_saved)

    def _iter_router_tensors(self, hidden: int, shape: ActivationShape) -> Iterator[SavedTensor]:
        """Yield the saved tensors of the router, in float32."""
        bytes_of = shape.compute_residual_bytes
        if shape.value_bytes != FP32_BYTES:
            yield SavedTensor("float32 input of the router", bytes_of(hidden, FP32_BYTES), "fused")
            yield SavedTensor(
                "float32 weight of the router", FP32_BYTES * hidden * self.num_experts, "fused"
            )
        logits = bytes_of(self.num_experts, FP32_BYTES)
        yield SavedTensor("router logits", logits, "product", is_saved=False)
        scores = bytes_of(self.num_experts * self.balance.num_saved_scores, FP32_BYTES)
        yield SavedTensor("router scores", scores, "pointwise")
        # 28 bytes per token-expert pair: int64 expert, token and position, float32 weight.
        yield SavedTensor(
            "chosen experts and weights", bytes_of(self.visits_per_token, 28), "pointwise"
        )
        yield SavedTensor("visits of each expert", 4 * self.num_experts, "pointwise")

    def is_input_saved(self, shape: ActivationShape) -> bool:
        """Return whether backward needs the layer's input itself.

        Args:
            shape: Its bytes of an activation count: in float32 the router's copy is the input
                itself. Shared experts read the input in any dtype.
        """
        # Experts save sorted copies, and the router saves a float32 copy.
        is_projected = bool(self.shared_expert_size) or self.latent_size is not None
        return shape.value_bytes == FP32_BYTES or is_projected

    def get_expert_channels(self, hidden: int) -> int:
        """Return the channels of the input and output of a routed expert, in which tokens travel.

        Args:
            hidden: width of the model.
        """
        return hidden if self.latent_size is None else self.latent_size

    def find_model_violations(self, residual: str, parametrization: str) -> Iterator[Violation]:
        """Yield what experts in latents cannot be combined with, with keys below `model`.

        Args:
            residual: `model.residual.kind`.
            parametrization: `model.parametrization.kind`.
        """
        if self.latent_size is None:
            return
        if residual == "deepnorm":
            yield Violation(
                "residual.kind",
                "deepnorm has no constants for the two more projections of moe.latent_size. Use "
                "pre, or set latent_size to null.",
            )
        if parametrization != "standard":
            yield Violation(
                "parametrization.kind",
                f"{parametrization} has no rule for the projections of moe.latent_size. Use "
                "standard, or set latent_size to null.",
            )

    def count_sequence_visits(self, length: int) -> int:
        """Return the token-expert pairs in a sequence.

        Args:
            length: tokens of the sequence.
        """
        return self.routing.count_sequence_visits(self, length)

    @property
    def visits_per_token(self) -> float:
        """Routed experts per token, on average; dropped tokens are not predicted."""
        return self.routing.count_visits(self)

    @property
    def shared_expert_size(self) -> int:
        """Width of the shared layer in channels; 0 without shared experts."""
        if self.shared_intermediate_size is not None:
            return self.shared_intermediate_size
        return self.num_shared_experts * self.moe_intermediate_size

    def is_moe_layer(self, layer: int) -> bool:
        """Return whether block `layer` has experts."""
        is_candidate = layer >= self.first_dense_layers and (layer + 1) % self.every == 0
        return is_candidate and layer not in self.dense_layers

    def find_layer_violations(self, num_layers: int, num_moe_layers: int) -> Iterator[Violation]:
        """Yield what leaves no layer with experts, and layers that a model does not have.

        Args:
            num_layers: layers of the model.
            num_moe_layers: those with experts.
        """
        last = num_layers - 1
        if not num_moe_layers and self.first_dense_layers > last:
            yield Violation(
                "moe.first_dense_layers",
                f"{self.first_dense_layers} leaves no layer of {last + 1} with experts. Use at "
                f"most {last}, or set moe to null.",
            )
        elif not num_moe_layers and self.every > last + 1:
            yield Violation(
                "moe.every",
                f"{self.every} is more than num_hidden_layers={last + 1}"
                f", and no layer has experts. Use at most {last + 1}, or set moe to null.",
            )
        elif not num_moe_layers:
            yield Violation(
                "moe.dense_layers", "no layer is left with experts. Use fewer, or set moe to null."
            )
        for layer in self.dense_layers:
            if not 0 <= layer <= last:
                yield Violation(
                    "moe.dense_layers", f"there is no layer {layer}. Use numbers from 0 to {last}."
                )
