"""The router of a mixture-of-experts layer: which experts each token visits, and with which weights.

Everything here is float32, also under bfloat16 weights: top-k turns a rounding error into another expert.
The balancing rules live here too: the bias that only touches the choice, and the auxiliary loss.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.moe import MoeConfig

# N tokens, D width, E experts, K experts per token


@dataclass(frozen=True)
class Routing:
    """The decision for N tokens: experts chosen, their weights in the sum, and log scores of all experts."""

    experts_NK: Tensor
    weights_NK: Tensor
    log_scores_NE: Tensor


class Router(nn.Module):
    """Scores every expert for every token and keeps the best `num_experts_per_tok`."""

    def __init__(self, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    def forward(self, x_ND: Tensor, bias_E: Tensor | None = None) -> Routing:
        """Route N tokens. `bias_E` is added to the scores for the choice only, never to the weights."""
        logits_NE = F.linear(x_ND.float(), self.weight.float())
        log_scores_NE = logits_NE.log_softmax(dim=-1) if self.config.score == "softmax" else F.logsigmoid(logits_NE)
        # Without a bias the logits order the experts as the scores do, and do not saturate into ties.
        preference_NE = logits_NE.detach() if bias_E is None else log_scores_NE.detach().exp() + bias_E
        experts_NK = preference_NE.topk(self.config.num_experts_per_tok, dim=-1).indices
        return Routing(experts_NK, self._weights(log_scores_NE.gather(-1, experts_NK)), log_scores_NE)

    def _weights(self, log_scores_NK: Tensor) -> Tensor:
        # softmax(log s) = s / sum(s): normalised without a division that could be 0/0, and without an epsilon that
        # lets the router shrink all weights at once by driving its scores towards zero (Megatron-LM #1545).
        weights_NK = log_scores_NK.softmax(dim=-1) if self.config.norm_topk_prob else log_scores_NK.exp()
        factor = self.config.routed_scaling_factor
        return weights_NK if factor == 1.0 else weights_NK * factor


def count_tokens(experts_NK: Tensor, num_experts: int) -> Tensor:
    """How many of the N * K assignments go to each expert, int64 of shape (E,)."""
    return torch.bincount(experts_NK.flatten(), minlength=num_experts)


def balance_loss(routing: Routing, counts_E: Tensor) -> Tensor:
    """E * sum_e f_e P_e, which is 1 when experts are used evenly (Fedus 2021, arXiv:2101.03961, eq. 4 to 6).

    f_e is the share of assignments that go to expert e, and P_e the mean over tokens of its share of the scores. Scores
    are normalised over the experts first: with bare sigmoid scores the loss falls by lowering all of them.
    """
    num_experts = counts_E.shape[0]
    share_E = counts_E.to(torch.float32) / counts_E.sum()
    probability_E = routing.log_scores_NE.softmax(dim=-1).mean(dim=0)
    return num_experts * (share_E * probability_E).sum()


def updated_bias(bias_E: Tensor, tokens_E: Tensor, rate: float) -> Tensor:
    """The next balance bias: up by `rate` for experts below the mean load, down for those above (sign rule).

    `tokens_E` must be summed over all ranks and micro-batches of the step (Wang 2024, arXiv:2408.15664, algorithm 1;
    DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """
    tokens_E = tokens_E.to(torch.float32)
    return bias_E + rate * torch.sign(tokens_E.mean() - tokens_E)
