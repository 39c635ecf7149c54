"""SparseMixer's two choices (Liu 2024, arXiv:2409.12136; Phi-3.5-MoE), in the deterministic form of evaluation.

Each choice takes the best expert that is left, weighted by a softmax over the experts that come close to it. The
random choice and the estimated gradient of the paper's training are not built; gradients flow through the weights.
"""

import torch
from torch import Tensor

# N tokens, E experts


def select_sparsemixer_top2(logits_NE: Tensor, preference_NE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Experts (N, 2) and their weights (N, 2), which do not sum to 1.

    `preference_NE` orders the experts (the logits, or scores with a balance bias); −∞ closes an expert.
    """
    first_N1 = preference_NE.argmax(dim=-1, keepdim=True)
    open_NE = logits_NE.masked_fill(preference_NE == -torch.inf, -torch.inf)
    weight_N1 = _compute_choice_weight(logits_NE, open_NE, first_N1, jitter)
    second_N1 = preference_NE.scatter(-1, first_N1, -torch.inf).argmax(dim=-1, keepdim=True)
    left_NE = open_NE.scatter(-1, first_N1, -torch.inf)
    weights_N2 = torch.cat([weight_N1, _compute_choice_weight(logits_NE, left_NE, second_N1, jitter)], dim=-1)
    return torch.cat([first_N1, second_N1], dim=-1), weights_N2


def _compute_choice_weight(logits_NE: Tensor, open_NE: Tensor, chosen_N1: Tensor, jitter: float) -> Tensor:
    """The chosen expert's share among those whose logit is less than 2 · jitter, relatively, below its own."""
    with torch.no_grad():
        best_N1 = logits_NE.gather(-1, chosen_N1)
        far_NE = (best_N1 - logits_NE) / logits_NE.abs().maximum(best_N1) > 2 * jitter
    return open_NE.masked_fill(far_NE, -torch.inf).softmax(dim=-1).gather(-1, chosen_N1)
