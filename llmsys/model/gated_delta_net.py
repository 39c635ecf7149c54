"""The mixer of `model.linear_attention.kind=gated_delta`: projections, a short causal convolution,
the gated delta rule, and a gated norm of its outputs (Yang 2024, arXiv:2412.06464, section 3.4;
Qwen3-Next).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from llmsys.config.linear_attention import GatedDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.model.delta_net import BaseDeltaNet
from llmsys.model.gated_delta_rule import apply_gated_delta_rule

# B rows, T positions, H value heads


class GatedDeltaNet(BaseDeltaNet):
    """Linear attention by the gated delta rule; `num_value_heads` / `num_key_heads` states share
    queries and keys.
    """

    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")

    def __init__(self, config: ModelConfig, attention: GatedDeltaConfig, layer: int) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width and eps of norms of the model.
            attention: Heads, convolution and chunks.
            layer: Index of the layer, from 0; the key of its states in a cache.
        """
        super().__init__(config, attention, layer, apply_gated_delta_rule, F.silu)

    def compute_log_decays(self, decays: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """Implement `BaseDeltaNet.compute_log_decays`: one of each value head."""
        rates_H, offsets_H = (self.select_heads(x).to(dtype) for x in (self.A_log, self.dt_bias))
        log_decay_BTH = -rates_H.exp() * F.softplus(decays.to(dtype) + offsets_H)
        log_decay: Tensor = log_decay_BTH.unflatten(-1, (groups, -1))
        return log_decay
