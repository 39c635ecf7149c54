"""The mixture-of-experts layer: router, dispatcher, experts, and shared experts every token visits.

Reads activations, gives their sum over the chosen experts, and keeps two buffers a trainer reads after each step: the
balance bias (part of the checkpoint) and the number of tokens routed to each expert (not saved).
"""

import torch
from torch import Tensor

from llmsys.config.moe import MoeConfig
from llmsys.model.buffers import Float32Buffers
from llmsys.model.dispatch import Dispatcher, LocalDispatcher
from llmsys.model.experts import Experts
from llmsys.model.feed_forward import build_feed_forward
from llmsys.model.router import Router, Routing, balance_loss, count_tokens

# B rows, T positions, N = B * T tokens, D width, E experts


class MoE(Float32Buffers):
    """y = sum_k w_k expert_k(x) + shared(x). `dispatcher` may be replaced from outside."""

    balance_bias_E: Tensor
    expert_tokens_E: Tensor

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(hidden_size, config)
        self.experts = Experts(config.num_experts, hidden_size, config.moe_intermediate_size)
        width = config.shared_width
        self.shared = build_feed_forward(config.expert, hidden_size, width) if width else None
        self.dispatcher: Dispatcher = LocalDispatcher()
        self.last_balance_loss: Tensor | None = None
        self.register_buffer("balance_bias_E", torch.zeros(config.num_experts))
        self.register_buffer("expert_tokens_E", torch.zeros(config.num_experts), persistent=False)

    def reset_buffers(self) -> None:
        """Bias and counts to zero, for instance after `to_empty`."""
        self.balance_bias_E.zero_()
        self.expert_tokens_E.zero_()

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Same shape and dtype as the input. In training mode the visits of each expert are added to the counts."""
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        routing = self.router(x_ND, self.balance_bias_E if self.config.balance.kind == "bias" else None)
        if self.training:
            self._observe(routing)
        y_ND = self.dispatcher(x_ND, routing.experts_NK, routing.weights_NK, self.experts)
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        return y_ND.view_as(x_BTD)

    def weighted_balance_loss(self) -> Tensor:
        """The balance loss of the last forward in training mode times its weight; 0 where there is none."""
        balance = self.config.balance
        if balance.kind != "auxiliary_loss" or self.last_balance_loss is None:
            return torch.zeros((), device=self.balance_bias_E.device)
        return balance.weight * self.last_balance_loss

    def _observe(self, routing: Routing) -> None:
        counts_E = count_tokens(routing.experts_NK, self.config.num_experts)
        self.expert_tokens_E += counts_E
        if self.config.balance.kind == "auxiliary_loss":
            self.last_balance_loss = balance_loss(routing, counts_E)
