"""Base of the mixers of the delta rule: projections, a short causal convolution, the rule, and a
gated norm of its outputs.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmsys.config.linear_attention import BaseDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.model.gated_delta_rule import normalize_heads
from llmsys.model.linear_mixer import LinearMixer
from llmsys.model.state_chunks import RowStart

# B rows, T positions, D width, H value heads, G key heads, S value heads of a key head, K channels
# of a key, V of a value


class GatedRmsNorm(nn.Module):
    """RMSNorm of each head, times an activation of a gate."""

    def __init__(self, width: int, eps: float, activation: Callable[[Tensor], Tensor]) -> None:
        """Build the weight, which begins at 1.

        Args:
            width: Channels of a head.
            eps: Added to the mean of squares.
            activation: Of the gate.
        """
        super().__init__()
        self.activation = activation
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalize the last dim in float32 at least, and gate it.

        Args:
            x: heads, (..., channels).
            gate: of the same shape.

        Returns:
            Same shape and dtype as the gate.
        """
        normed = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return (normed * self.activation(gate.to(x.dtype))).to(gate.dtype)


class DeltaRule(Protocol):
    """A rule over rows; see `apply_gated_delta_rule`."""

    def __call__(
        self,
        q_BTGK: Tensor,
        k_BTGK: Tensor,
        v_BTGSV: Tensor,
        log_decay: Tensor,
        beta_BTGS: Tensor,
        /,
        *,
        chunk_length: int,
        segments_BT: Tensor | None,
        start: RowStart | None,
        keeps_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the outputs, and the last state where it is kept."""
        ...


class BaseDeltaNet(LinearMixer):
    """A mixer whose states are changed by a delta rule."""

    def __init__(
        self,
        config: ModelConfig,
        attention: BaseDeltaConfig,
        layer: int,
        rule: DeltaRule,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        """Build the projections on the current default device.

        Args:
            config: Width and eps of norms of the model.
            attention: Heads, convolution and chunks.
            layer: Index of the layer, from 0; the key of its states in a cache.
            rule: What changes the states.
            activation: Of the gates of outputs.
        """
        super().__init__(config, attention, layer)
        self.rule = rule
        self.max_share = 2.0 if attention.allow_neg_eigval else 1.0
        eps = config.norm.eps if attention.norm_eps is None else attention.norm_eps
        self.o_norm = GatedRmsNorm(attention.value_head_dim, eps, activation)

    @abstractmethod
    def compute_log_decays(self, decays: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """Compute the logarithms of the decays, at most 0.

        Args:
            decays: the last projection, (B, T, its channels of this rank's heads).
            groups: key heads of this rank.
            dtype: of the result.

        Returns:
            Logarithms by key head and value head, as the rule takes them.
        """

    def fit_chunk_length(self, positions: int) -> int:
        """Return the length of a chunk for a few new positions of a cache.

        Args:
            positions: their number.
        """
        return positions

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
        gate, b, decays = projected[3:]
        sizes, new = self.sizes, gate.shape[1]
        q, k, v = self.apply_convolution(projected, tail_BTC, segments_BL)
        # Of this rank, where others have other heads.
        groups = q.shape[-1] // sizes.key_head_dim
        q, k = (normalize_heads(x.unflatten(-1, (groups, -1))) for x in (q, k))
        # A few new positions are a chunk of their own.
        shares = b.to(v.dtype).sigmoid()
        shares = shares if self.max_share == 1.0 else self.max_share * shares
        few = self.fit_chunk_length(new) if keeps_state else sizes.chunk_length
        y_BTGSV, state = self.rule(
            q,
            k,
            v.unflatten(-1, (groups, -1, sizes.value_head_dim)),
            self.compute_log_decays(decays, groups, v.dtype),
            shares.unflatten(-1, (groups, -1)),
            chunk_length=min(sizes.chunk_length, few),
            segments_BT=None if segments_BL is None else segments_BL[:, -new:],
            start=start,
            keeps_state=keeps_state,
        )
        normed = self.o_norm(y_BTGSV, gate.unflatten(-1, (groups, -1, sizes.value_head_dim)))
        mixed_BTH: Tensor = normed.flatten(2)
        return mixed_BTH, state
