"""The mixer of `model.linear_attention.kind=kimi_delta`: projections, a short causal convolution,
the delta rule with a decay for each channel, and a gated norm of its outputs (Kimi Linear,
arXiv:2510.26692, 3).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.linear_attention import KimiDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.model.delta_net import BaseDeltaNet
from llmsys.model.kimi_delta_rule import apply_kimi_delta_rule

# B rows, T positions, D width, H value heads, K channels of a key


class KimiDeltaNet(BaseDeltaNet):
    """Linear attention by the delta rule, whose states decay channel by channel."""

    def __init__(self, config: ModelConfig, attention: KimiDeltaConfig, layer: int) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width and eps of norms of the model.
            attention: Heads, convolution and chunks.
            layer: Index of the layer, from 0; the key of its states in a cache.
        """
        super().__init__(config, attention, layer, apply_kimi_delta_rule, torch.sigmoid)
        self.dt_bias = nn.Parameter(torch.ones(attention.decay_channels))

    def project_positions(self, x_BTD: Tensor) -> list[Tensor]:
        """Implement `LinearMixer.project_positions`: gates and decays go through few channels."""
        q, k, v, b = (self.get_submodule(f"{one}_proj")(x_BTD) for one in "qkvb")
        few = (self.get_submodule(f"{one}_a_proj")(x_BTD) for one in "gf")
        gate, f = (self.get_submodule(f"{n}_b_proj")(x) for n, x in zip("gf", few, strict=True))
        return [q, k, v, gate, b, f]

    def compute_log_decays(self, decays: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """Implement `BaseDeltaNet.compute_log_decays`: one of each channel of a key."""
        channels = self.sizes.key_head_dim
        rates_H = self.select_heads(self.A_log).to(dtype).exp()
        offsets_HK = self.select_heads(self.dt_bias.unflatten(0, (-1, channels)))
        steps_BTHK = decays.to(dtype).unflatten(-1, (-1, channels)) + offsets_HK.to(dtype)
        log_decay_BTHK = -rates_H[:, None] * F.softplus(steps_BTHK)
        log_decay: Tensor = log_decay_BTHK.unflatten(2, (groups, -1))
        return log_decay

    def fit_chunk_length(self, positions: int) -> int:
        """Implement `BaseDeltaNet.fit_chunk_length`: the next power of two, which can be halved."""
        return 1 << (positions - 1).bit_length()
