"""The mixture-of-experts layer: router, dispatcher, experts, and shared experts that every token
visits.

The balance bias (and, for the auxiliary loss over a batch, the shares of the previous step) are
persistent buffers. Sums over the tokens of a step are buffers that are not saved. A pass that
activation checkpointing repeats is not counted again.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, assert_never

import torch
from torch import Tensor, nn

from llmsys.config.moe import (
    AuxiliaryLossConfig,
    BiasBalancingConfig,
    ExpertCapacityConfig,
    ExpertChoiceConfig,
    MoeConfig,
    NoBalancingConfig,
    TokenChoiceConfig,
)
from llmsys.errors import ConfigError
from llmsys.model.attention_mask import compute_document_positions
from llmsys.model.experts import GroupedExperts
from llmsys.model.feed_forward import build_feed_forward
from llmsys.model.float32_buffers import Float32BufferModule
from llmsys.model.load_balancing import (
    add_step_counts,
    compute_auxiliary_losses,
    compute_router_z_loss,
    count_tokens_by_row,
    is_recomputation,
)
from llmsys.model.router import (
    RouterScores,
    RoutingDecision,
    TopKRouter,
    choose_tokens,
    drop_overflow,
)
from llmsys.model.token_dispatcher import LocalTokenDispatcher, TokenDispatcher

# B rows, T positions, N = B * T tokens, D width, L channels of an expert's input, E experts


class MoELayer(Float32BufferModule):
    """y = sum_k w_k expert_k(x) + shared(x); with `latent_size` up(sum_k w_k expert_k(down(x))) +
    shared(x) (LatentMoE).

    Two attributes may be replaced from outside:

    - `dispatcher`, by one that spans ranks.
    - `reduce_row_counts`, which sums the counts of a sequence's shards, (B, E), over the ranks that
      hold them.
    """

    balance_bias_E: Tensor
    expert_share_E: Tensor | None
    expert_tokens_E: Tensor
    probability_sum_E: Tensor
    router_z_sum: Tensor
    num_tokens: Tensor
    num_dropped: Tensor

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        """Build router and experts on the current default device.

        Args:
            hidden_size: Channels of input and output, D.
            config: The `model.moe:` section. All its experts are built; `apply_expert_parallel`
                later keeps those of this rank.
        """
        super().__init__()
        self.config = config
        self.router = TopKRouter(hidden_size, config)
        inner = config.get_expert_channels(hidden_size)
        self.experts = GroupedExperts(
            config.num_experts, inner, config.moe_intermediate_size, config.expert
        )
        self.fc1_latent_proj: nn.Linear | None = None
        self.fc2_latent_proj: nn.Linear | None = None
        if config.latent_size is not None:
            self.fc1_latent_proj = nn.Linear(hidden_size, inner, bias=False)
            self.fc2_latent_proj = nn.Linear(inner, hidden_size, bias=False)
        width = config.shared_expert_size
        self.shared = build_feed_forward(config.expert, hidden_size, width) if width else None
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if config.shared_gate else None
        self.dispatcher: TokenDispatcher = LocalTokenDispatcher()
        self.reduce_row_counts: Callable[[Tensor], Tensor] = _return_counts
        self._auxiliary: tuple[Tensor, Tensor] | None = None
        self.number = 0
        """Place among the layers with experts of the model, in depth order."""
        self.balance_factor = 1.0
        """Factor on the balance loss and the rate of the bias; set from outside where it changes
        over a run.
        """
        balance = config.balance
        needs_shares = isinstance(balance, AuxiliaryLossConfig) and balance.scope == "batch"
        # Present under every balance kind: checkpoints have one format.
        self.register_buffer("balance_bias_E", torch.zeros(config.num_experts))
        self.register_buffer(
            "expert_share_E", torch.zeros(config.num_experts) if needs_shares else None
        )
        for name in ("expert_tokens_E", "probability_sum_E"):
            self.register_buffer(name, torch.zeros(config.num_experts), persistent=False)
        for name in ("router_z_sum", "num_tokens", "num_dropped"):
            self.register_buffer(name, torch.zeros(()), persistent=False)
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Set the initial values of all buffers, for instance after `to_empty`: no bias, even
        shares, zero counts.
        """
        self.balance_bias_E.zero_()
        if self.expert_share_E is not None:
            self.expert_share_E.fill_(1 / self.config.num_experts)
        self.reset_counts()

    def reset_counts(self) -> None:
        """Set the counters of the step to zero."""
        for sums in self.get_step_counters():
            sums.zero_()

    def get_step_counters(self) -> tuple[Tensor, ...]:
        """Return the sums over the tokens of the step so far: the buffers themselves, not
        copies.
        """
        return (
            self.expert_tokens_E,
            self.probability_sum_E,
            self.router_z_sum,
            self.num_tokens,
            self.num_dropped,
        )

    def forward(
        self, x_BTD: Tensor, real_BT: Tensor | None = None, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Return the sum over the chosen and shared experts, in the shape and dtype of the input.

        In training mode the counters of the step are updated.

        Args:
            x_BTD: Activations; each row is one sequence.
            real_BT: False where a token is padding, which is not counted, has no loss and uses no
                expert capacity. None: no padding.
            documents_BT: Document numbers, for experts with a capacity per document. None: a row is
                one document.
        """
        if real_BT is None:
            real_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device)
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        scores = self.router.compute_scores(x_ND)
        routing = self._route_tokens(scores, real_BT, documents_BT)
        shared = None if self.shared is None else partial(self._compute_shared, self.shared, x_ND)
        tokens_NL = x_ND if self.fc1_latent_proj is None else self.fc1_latent_proj(x_ND)
        y_ND, shared_ND = self.dispatcher(tokens_NL, routing, self.experts, shared)
        if self.fc2_latent_proj is not None:
            y_ND = self.fc2_latent_proj(y_ND)
        return (y_ND if shared_ND is None else y_ND + shared_ND).view_as(x_BTD)

    def _compute_shared(self, shared: nn.Module, x_ND: Tensor) -> Tensor:
        shared_ND: Tensor = shared(x_ND)
        return (
            shared_ND if self.shared_gate is None else self.shared_gate(x_ND).sigmoid() * shared_ND
        )

    def compute_auxiliary_loss(self) -> Tensor:
        """Return the weighted balance and router z losses of the last training forward.

        A mean over real tokens; 0 without any. For one process and micro-batch: otherwise divide
        `sum_auxiliary_losses` by the tokens of all.
        """
        if self._auxiliary is None:
            return self.sum_auxiliary_losses()
        return self.sum_auxiliary_losses() / self._auxiliary[1].clamp(min=1)

    def sum_auxiliary_losses(self) -> Tensor:
        """Return the weighted balance and router z losses of the last training forward: a sum
        over real tokens.
        """
        if self._auxiliary is None:
            return torch.zeros((), device=self.balance_bias_E.device)
        balance, z_loss = self._auxiliary[0]
        weighted: Tensor = balance * self.balance_factor + z_loss
        return weighted

    def _route_tokens(
        self, scores: RouterScores, real_BT: Tensor, documents_BT: Tensor | None
    ) -> RoutingDecision:
        match self.config.routing:
            case TokenChoiceConfig():
                # `asked` has what is dropped below, too: balance is about what the router wants.
                routing = asked = self._select_experts(scores)
            case ExpertCapacityConfig(factor=factor, scope=scope):
                routing = asked = self._select_experts(scores)
                # Evaluation drops nothing: a prompt continued token by token would drop others than
                # one read at once.
                if self.training:
                    positions_BT = _count_positions(scope, real_BT, documents_BT)
                    routing = drop_overflow(
                        asked, factor, self.config.num_experts, real_BT, positions_BT
                    )
            case ExpertChoiceConfig(factor=factor, scope=scope):
                chosen = choose_tokens(
                    scores, factor, real_BT, _count_positions(scope, real_BT, documents_BT)
                )
                weights_NK = self.router.scale_weights(chosen.weights_NK)
                routing = asked = RoutingDecision(chosen.experts_NK, weights_NK, partial=True)
            case unreachable:
                assert_never(unreachable)
        if self.training:
            self._record_routing(scores, asked, routing, real_BT)
        return routing

    def _select_experts(self, scores: RouterScores) -> RoutingDecision:
        match self.config.balance:
            case BiasBalancingConfig():
                return self.router.select_experts(scores, self.balance_bias_E)
            case AuxiliaryLossConfig() | NoBalancingConfig():
                return self.router.select_experts(scores)
            case unreachable:
                assert_never(unreachable)

    def _record_routing(
        self,
        scores: RouterScores,
        asked: RoutingDecision,
        routing: RoutingDecision,
        real_BT: Tensor,
    ) -> None:
        """Add a forward pass to the counters of the step, and keep its auxiliary loss.

        In a pass that activation checkpointing repeats only the loss is computed, for its
        gradient: counters have the tokens already.
        """
        num_experts = self.config.num_experts
        asked_BE = count_tokens_by_row(asked.experts_NK, num_experts, real_BT)
        # A recomputed forward must save the tensors that the first one saved, so the loss is
        # computed there too.
        counts_BE = self.reduce_row_counts(asked_BE)
        loss = compute_auxiliary_losses(
            self.config, scores, counts_BE, self.expert_share_E, real_BT
        )
        # A compiled graph is that of the first pass: its backward repeats operations, never this
        # function.
        if not torch.compiler.is_compiling() and is_recomputation():
            self._require_auxiliary_gradient(loss)
            return
        num_tokens = real_BT.sum()
        self._auxiliary = None if loss is None else (loss, num_tokens)
        with torch.no_grad():
            probability_E = (scores.compute_probabilities() * real_BT.view(-1, 1)).sum(0)
            values = [
                asked_BE.sum(0),
                probability_E,
                compute_router_z_loss(scores, real_BT),
                num_tokens,
            ]
            if routing is not asked:
                values.append(asked_BE.sum() - (routing.experts_NK >= 0).sum())
            add_step_counts(list(self.get_step_counters()[: len(values)]), values)

    def _require_auxiliary_gradient(self, loss: Tensor | None) -> None:
        stored = self._auxiliary
        if (
            loss is not None
            and loss.requires_grad
            and stored is not None
            and not stored[0].requires_grad
        ):
            raise ConfigError(
                "torch.utils.checkpoint with use_reentrant=True runs the first forward pass "
                "without gradients, so balance and z losses would have no gradient. Use "
                "use_reentrant=False."
            )


def _count_positions(
    scope: Literal["sequence", "document"], real_BT: Tensor, documents_BT: Tensor | None
) -> Tensor:
    """Return positions counted from the start of each group of tokens that share the capacity of
    experts, (B, T).
    """
    if scope == "document" and documents_BT is not None:
        return compute_document_positions(documents_BT)
    return torch.arange(real_BT.shape[1], device=real_BT.device).expand(real_BT.shape)


def _return_counts(counts_BE: Tensor) -> Tensor:
    return counts_BE
