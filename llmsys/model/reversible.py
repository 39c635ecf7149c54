"""Reversible residual layers: activations are computed from those after them (Gomez 2017; Kitaev
2020, 3).

A stack is a sequence of states s_0 = s_1 = embedding and s_{k+2} = s_k + f_k(s_{k+1}), where f are
the branches of all blocks in turn. The output is the mean of the last two states. The backward pass
needs these two alone: it computes f_k(s_{k+1}) again for its gradient, and s_k = s_{k+2} -
f_k(s_{k+1}) with it.

Invariants:
- A state that was computed backwards differs from the first by rounding. What must not differ, such
  as the order of hashes, is kept from the first pass (ForwardContext.get_or_compute).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from llmsys.model.forward_context import ForwardContext

# B rows, T positions, D width

BRANCHES = ("attention", "feed_forward")


def run_reversible_blocks(
    blocks: Iterable[nn.Module], x_BTD: Tensor, context: ForwardContext
) -> Tensor:
    """Run blocks whose activations are computed again from their outputs in the backward pass.

    Args:
        blocks: The blocks in order.
        x_BTD: Embedded tokens; the start of both streams.
        context: What the blocks share.

    Returns:
        The mean of both streams at the end, in the shape and dtype of the input.
    """
    branches = [(block, name) for block in blocks for name in BRANCHES]
    older_BTD = newer_BTD = x_BTD
    states: dict[int, Tensor] = {}
    for number, (block, name) in enumerate(branches):
        if torch.is_grad_enabled():
            step = _ReversibleStep(block, name, number, states, replace(context, kept={}))
            # The result of the repeated pass is needed, after all that is saved for backward.
            with set_checkpoint_early_stop(False):
                change_BTD = checkpoint(
                    step, [newer_BTD], use_reentrant=False, preserve_rng_state=False
                )
        else:
            change_BTD = block(newer_BTD, context, name)
        older_BTD, newer_BTD = newer_BTD, older_BTD + change_BTD
    states |= {len(branches): older_BTD.detach(), len(branches) + 1: newer_BTD.detach()}
    return (older_BTD + newer_BTD) / 2


class _ReversibleStep:
    """f_k: in the first pass of a given state, in the repeated pass of the one that `states` has
    by then.
    """

    def __init__(
        self,
        block: nn.Module,
        name: str,
        number: int,
        states: dict[int, Tensor],
        context: ForwardContext,
    ) -> None:
        self.block = block
        self.name = name
        self.number = number
        self.states = states
        self.context = context

    def __call__(self, given: list[Tensor]) -> Any:
        """Return f_k of the state; `given` is emptied, so that nothing holds it until the
        backward pass.
        """
        if given:
            return self.block(given.pop(), self.context, self.name)
        state_BTD = self.states[self.number + 1].requires_grad_()
        change_BTD = self.block(state_BTD, self.context, self.name)
        self.states[self.number] = self.states.pop(self.number + 2).detach() - change_BTD.detach()
        return change_BTD
