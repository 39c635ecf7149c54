"""Expert load over all ranks: moves the balancing bias after each step, and says what share each expert got.

Counts are taken in the forward pass, summed over ranks once per step, and reset; the bias moves by the sign rule of
DeepSeek-V3 (arXiv:2412.19437, 2.1.2), so it is the same on every rank and for every layout.
"""

import torch

from llmsys.config.moe import BiasBalance
from llmsys.model.router import updated_bias
from llmsys.model.transformer import Transformer
from llmsys.parallel.group import sum_over_ranks


@torch.no_grad()
def settle_experts(model: Transformer) -> list[list[float]]:
    """Apply the balance rule to the counts of the step, reset them, and return each layer's shares (they sum to 1)."""
    layers = model.moe_layers()
    if not layers:
        return []
    tokens_LE = sum_over_ranks(torch.stack([layer.expert_tokens_E for layer in layers]))
    for layer, tokens_E in zip(layers, tokens_LE, strict=True):
        balance = layer.config.balance
        if isinstance(balance, BiasBalance):
            layer.balance_bias_E.copy_(updated_bias(layer.balance_bias_E, tokens_E, balance.rate))
        layer.expert_tokens_E.zero_()
    shares: list[list[float]] = (tokens_LE / tokens_LE.sum(1, keepdim=True).clamp(min=1)).tolist()
    return shares
