"""QK-clip: query and key projections of a head are scaled down when its logits exceed a threshold
(MuonClip).

Moonshot 2025 (Kimi K2, arXiv:2507.20534, 2.1, algorithm 1), after every applied step. With γ =
min(1, threshold / largest logit of the step), the logits of a head become γ times as large:

| attention | queries | keys |
|---|---|---|
| multi-head; γ₀ is the smallest of the heads of a key | γ / sqrt(γ₀) | sqrt(γ₀) |
| latent, channels without rotation | sqrt(γ) | sqrt(γ) |
| latent, rotated channels; the key is that of all heads | γ | 1 |
"""

from collections.abc import Callable
from typing import assert_never

import torch
from torch import Tensor, nn

from llmsys.model.attention_logits import LogitRecorder
from llmsys.model.latent_attention import MultiHeadLatentAttention
from llmsys.model.local_tensor import get_local_tensor
from llmsys.model.multi_head_attention import MultiHeadAttention
from llmsys.parallel.dtensor_slices import get_local_region
from llmsys.parallel.process_group import all_reduce_max

# H query heads, G key heads, W rows of a projection


class LogitClip:
    """Clips the self-attention of a model. The maximum over all ranks decides.

    Args:
        model: The model; its parameters may be DTensors.
        threshold: Largest logit.
        get_master: Returns the master of a parameter of the model, where it has one apart.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float,
        get_master: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter,
    ) -> None:
        self._threshold = threshold
        self._get_master = get_master
        self.layers = [
            one
            for one in model.modules()
            if isinstance(one, MultiHeadAttention | MultiHeadLatentAttention)
        ]
        for layer in self.layers:
            layer.logit_recorder = LogitRecorder(layer.heads)

    def take_maxima(self) -> Tensor:
        """Return the largest logits of this rank's heads since the last call, (layers, H), and
        begin again.
        """
        recorders = [layer.logit_recorder for layer in self.layers]
        return torch.stack(
            [
                recorder.take_maxima(layer.o_proj.weight.device)
                for layer, recorder in zip(self.layers, recorders, strict=True)
                if recorder is not None
            ]
        )

    @torch.no_grad()
    def finish_step(self, *, applied: bool) -> None:
        """Scale the projections whose logits were too large in the step; a skipped step changes
        nothing. Collective.
        """
        maxima_LH = all_reduce_max(self.take_maxima())
        gamma_LH = (self._threshold / maxima_LH.clamp(min=self._threshold)).cpu()
        for layer, gamma_H in zip(self.layers, gamma_LH, strict=True):
            if applied and bool((gamma_H < 1).any()):
                self._scale_layer(layer, gamma_H)

    def _scale_layer(
        self, layer: MultiHeadAttention | MultiHeadLatentAttention, gamma_H: Tensor
    ) -> None:
        match layer:
            case MultiHeadLatentAttention():
                queries = layer.q_b_proj if layer.has_query_latent else layer.q_proj
                root_H = gamma_H.sqrt()
                one_H = torch.ones_like(gamma_H)
                self._scale_rows(queries, [(root_H, layer.nope), (gamma_H, layer.rope)])
                self._scale_rows(layer.kv_b_proj, [(root_H, layer.nope), (one_H, layer.value)])
            case MultiHeadAttention():
                groups = layer.k_proj.out_features // layer.head_dim
                root_G = gamma_H.view(groups, -1).amin(-1).sqrt()
                shared_H = root_G.repeat_interleave(len(gamma_H) // groups)
                self._scale_rows(layer.q_proj, [(gamma_H / shared_H, layer.head_dim)])
                self._scale_rows(layer.k_proj, [(root_G, layer.head_dim)])
            case unreachable:
                assert_never(unreachable)

    def _scale_rows(self, projection: nn.Linear, parts: list[tuple[Tensor, int]]) -> None:
        """Multiply the rows of each head; `parts` are factor and number of a head's rows, in their
        order.
        """
        factor_W = torch.cat(
            [factor[:, None].expand(-1, rows) for factor, rows in parts], dim=1
        ).flatten()
        for parameter in projection.parameters():
            master = self._get_master(parameter)
            begin, size = get_local_region(master)[0]
            local = get_local_tensor(master.detach())
            factor = factor_W[begin : begin + size].to(local)
            local.mul_(factor.view(-1, *[1] * (local.ndim - 1)))
