"""A stack whose layers are one block, applied again and again (Universal Transformer; Dehghani
2018, arXiv:1807.03819).

With adaptive computation time every position halts by itself (ACT; Graves 2016, arXiv:1603.08983).
The weighted states are summed as Graves does; the listing in the appendix of Dehghani 2018
multiplies earlier ones by later weights too.

Invariants:
- Every position is computed in every step, so all ranks run the same collectives. A halted position
  keeps its state.
- Halting probabilities and their sums are float32.
"""

from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor, nn

from llmsys.config.head import AdaptiveRecurrenceConfig, FixedRecurrenceConfig
from llmsys.config.model import ModelConfig
from llmsys.config.position import SinusoidalPositionConfig
from llmsys.model.embedding import SinusoidalPositionEmbedding
from llmsys.model.float32_buffers import Float32BufferModule
from llmsys.model.forward_context import ForwardContext

# B rows, T positions, D width


class FixedRecurrence(Float32BufferModule):
    """The block, `num_hidden_layers` times: x = block(x + positions + step)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_steps = config.num_hidden_layers
        self.sinusoids = SinusoidalPositionEmbedding(config, SinusoidalPositionConfig())

    def forward(
        self, block: nn.Module, x_BTD: Tensor, positions_BTD: Tensor | None, context: ForwardContext
    ) -> Tensor:
        """Apply one block several times.

        Args:
            block: the block.
            x_BTD: states of all positions.
            positions_BTD: added before every step; None: nothing.
            context: masks, rotation and cache that all steps share.

        Returns:
            (B, T, D): the states after the last step, in the dtype of x_BTD.
        """
        for step in range(self.num_steps):
            x_BTD = block(self._begin_step(x_BTD, positions_BTD, step), _select_step(context, step))
        return x_BTD

    def _begin_step(self, x_BTD: Tensor, positions_BTD: Tensor | None, step: int) -> Tensor:
        """Add the coordinates of position and step, which is counted from 1 (Dehghani 2018,
        equations 6 and 7).
        """
        # Filled on the device: a number of the host's would have to be copied, and waited for.
        number = torch.full((), step + 1, device=x_BTD.device)
        coordinates_D = self.sinusoids(number).to(x_BTD.dtype)
        return x_BTD + (coordinates_D if positions_BTD is None else positions_BTD + coordinates_D)


class AdaptiveRecurrence(FixedRecurrence):
    """The mean of a position's states, weighted by its halting probabilities; the last weight is
    the remainder to 1.
    """

    depth_sum: Tensor
    num_tokens: Tensor

    def __init__(self, config: ModelConfig, recurrence: AdaptiveRecurrenceConfig) -> None:
        super().__init__(config)
        self.threshold = recurrence.threshold
        self.ponder_weight = recurrence.ponder_weight
        self.halting = nn.Linear(config.hidden_size, 1)
        self._ponder: tuple[Tensor, Tensor] | None = None
        for name in ("depth_sum", "num_tokens"):
            self.register_buffer(name, torch.zeros(()), persistent=False)

    def forward(
        self, block: nn.Module, x_BTD: Tensor, positions_BTD: Tensor | None, context: ForwardContext
    ) -> Tensor:
        """Apply one block several times.

        Args:
            block: the block.
            x_BTD: states of all positions.
            positions_BTD: added before every step; None: nothing.
            context: masks, rotation and cache that all steps share.

        Returns:
            (B, T, D): the states of all steps, weighted by their probability of being the last; in
                training the ponder cost is recorded.
        """
        total_BT = torch.zeros(x_BTD.shape[:2], device=x_BTD.device)
        ponder_BT = torch.zeros_like(total_BT)
        depth_BT = torch.zeros_like(total_BT)
        is_running_BT = torch.ones_like(total_BT, dtype=torch.bool)
        y_BTD = torch.zeros_like(x_BTD)
        for step in range(self.num_steps):
            entered_BTD = self._begin_step(x_BTD, positions_BTD, step)
            halting_BT = (
                self.halting(entered_BTD).squeeze(-1).float().sigmoid().where(is_running_BT, 0)
            )
            is_last = step + 1 == self.num_steps
            halts_BT = (
                is_running_BT
                if is_last
                else is_running_BT & (total_BT + halting_BT > self.threshold)
            )
            remainder_BT = (1 - total_BT).where(halts_BT, 0)
            weight_BT = remainder_BT + halting_BT.where(~halts_BT, 0)
            state_BTD = block(entered_BTD, _select_step(context, step))
            y_BTD = y_BTD + weight_BT[..., None].to(x_BTD.dtype) * state_BTD
            x_BTD = state_BTD.where(is_running_BT[..., None], x_BTD)
            depth_BT = depth_BT + is_running_BT
            ponder_BT = ponder_BT + remainder_BT
            total_BT = total_BT + halting_BT
            is_running_BT = is_running_BT & ~halts_BT
        if self.training:
            self._record_ponder(depth_BT, ponder_BT + depth_BT, context.real_BT)
        return y_BTD

    def _record_ponder(self, depth_BT: Tensor, ponder_BT: Tensor, real_BT: Tensor | None) -> None:
        """Keep sums over real tokens: the ponder cost, steps plus remainder (Graves 2016,
        equation 13), and depth.
        """
        weights_BT = torch.ones_like(depth_BT) if real_BT is None else real_BT.float()
        tokens = weights_BT.sum()
        self._ponder = self.ponder_weight * (ponder_BT * weights_BT).sum(), tokens
        with torch.no_grad():
            self.depth_sum += (depth_BT * weights_BT).sum()
            self.num_tokens += tokens

    def compute_auxiliary_loss(self) -> Tensor:
        """Return the weighted ponder cost of the last training forward, a mean over real tokens;
        0 without any.
        """
        tokens = (
            torch.ones_like(self.num_tokens)
            if self._ponder is None
            else self._ponder[1].clamp(min=1)
        )
        return self.sum_auxiliary_losses() / tokens

    def sum_auxiliary_losses(self) -> Tensor:
        """Return the weighted ponder cost of the last training forward, a sum over real tokens."""
        return torch.zeros_like(self.depth_sum) if self._ponder is None else self._ponder[0]

    def get_step_counters(self) -> tuple[Tensor, ...]:
        """Return the sums over the tokens of the step so far: steps and tokens. The buffers
        themselves, not copies.
        """
        return self.depth_sum, self.num_tokens

    def reset_counts(self) -> None:
        """Set the counters of the step to zero."""
        for sums in self.get_step_counters():
            sums.zero_()

    def reset_buffers(self) -> None:
        """Set all buffers, for instance after `to_empty`."""
        self.reset_counts()


def build_recurrence(config: ModelConfig) -> FixedRecurrence | None:
    """Build the recurrence of a stack.

    Args:
        config: The model.

    Returns:
        A module that applies one block several times. None where every layer is a separate
        block.
    """
    match config.recurrence:
        case None:
            return None
        case FixedRecurrenceConfig():
            return FixedRecurrence(config)
        case AdaptiveRecurrenceConfig() as recurrence:
            return AdaptiveRecurrence(config, recurrence)
        case unreachable:
            assert_never(unreachable)


def _select_step(context: ForwardContext, step: int) -> ForwardContext:
    """Return the context in which a key-value cache stores the step; the same one without a
    cache.
    """
    # An equal context in every step: torch.compile would make a graph for each.
    return context if context.cache is None else replace(context, step=step)
