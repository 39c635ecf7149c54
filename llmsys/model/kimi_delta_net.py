"""The mixer of `model.linear_attention.kind=kimi_delta`: projections, a short causal convolution,
the delta rule with a decay for each channel, and a gated norm of its outputs (Kimi Linear,
arXiv:2510.26692, 3).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.linear_attention import KimiDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.model.gated_delta_net import GatedRmsNorm
from llmsys.model.gated_delta_rule import normalize_heads
from llmsys.model.kimi_delta_rule import apply_kimi_delta_rule
from llmsys.model.linear_mixer import LinearMixer
from llmsys.model.state_chunks import RowStart

# B rows, T positions, D width, H value heads, G key heads, S value heads of a key head, K channels
# of a key, V of a value


class KimiDeltaNet(LinearMixer):
    """Linear attention by the delta rule, whose states decay channel by channel."""

    def __init__(self, config: ModelConfig, attention: KimiDeltaConfig, layer: int) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width and eps of norms of the model.
            attention: Heads, convolution and chunks.
            layer: Index of the layer, from 0; the key of its states in a cache.
        """
        super().__init__(config, attention, layer)
        self.dt_bias = nn.Parameter(torch.ones(attention.decay_channels))
        self.o_norm = GatedRmsNorm(attention.value_head_dim, config.norm.eps, torch.sigmoid)

    def project_positions(self, x_BTD: Tensor) -> list[Tensor]:
        """Implement `LinearMixer.project_positions`: gates and decays go through few channels."""
        q, k, v, b = (self.get_submodule(f"{one}_proj")(x_BTD) for one in "qkvb")
        few = (self.get_submodule(f"{one}_a_proj")(x_BTD) for one in "gf")
        gate, f = (self.get_submodule(f"{n}_b_proj")(x) for n, x in zip("gf", few, strict=True))
        return [q, k, v, gate, b, f]

    def run_rule(
        self,
        projected: list[Tensor],
        tail_BTC: Tensor,
        segments_BL: Tensor | None,
        start: RowStart | None,
        *,
        keeps_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `LinearMixer.run_rule`."""
        gate, b, f = projected[3:]
        sizes, new = self.sizes, gate.shape[1]
        q, k, v = self.apply_convolution(projected, tail_BTC, segments_BL)
        # Of this rank, where others have other heads.
        groups = q.shape[-1] // sizes.key_head_dim
        q, k = (normalize_heads(x.unflatten(-1, (groups, -1))) for x in (q, k))
        dtype = v.dtype
        rates_H = self.select_heads(self.A_log).to(dtype).exp()
        offsets_HK = self.select_heads(self.dt_bias.unflatten(0, (-1, sizes.key_head_dim)))
        f_BTHK = f.to(dtype).unflatten(-1, (-1, sizes.key_head_dim))
        log_decay_BTHK = -rates_H[:, None] * F.softplus(f_BTHK + offsets_HK.to(dtype))
        # A few new positions are a chunk of their own, the next power of two.
        few = 1 << (new - 1).bit_length()
        y_BTGSV, state = apply_kimi_delta_rule(
            q,
            k,
            v.unflatten(-1, (groups, -1, sizes.value_head_dim)),
            log_decay_BTHK.unflatten(2, (groups, -1)),
            b.to(dtype).sigmoid().unflatten(-1, (groups, -1)),
            chunk_length=min(sizes.chunk_length, few) if keeps_state else sizes.chunk_length,
            segments_BT=None if segments_BL is None else segments_BL[:, -new:],
            start=start,
            keeps_state=keeps_state,
        )
        normed = self.o_norm(y_BTGSV, gate.unflatten(-1, (groups, -1, sizes.value_head_dim)))
        mixed_BTH: Tensor = normed.flatten(2)
        return mixed_BTH, state
