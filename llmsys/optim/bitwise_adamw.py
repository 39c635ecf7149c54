"""AdamW from operations that IEEE 754 rounds once each, so that an element's bits never depend on its neighbours.

torch's fused AdamW on the CPU takes most elements by vector instructions and the rest one by one, with other roundings:
an element's bits change when the tensor is split elsewhere. (Kingma 2014; Loshchilov and Hutter 2017, as torch computes
it.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmsys.config.optimizer import AdamWConfig
from llmsys.model.local_tensor import get_local_tensor
from llmsys.optim.lr_schedule import get_weight_decay_share
from llmsys.optim.parameter_groups import build_parameter_groups

# Elements updated at a time, so that they stay in cache: 256 KiB of each of five tensors.
PIECE = 1 << 16


class BitwiseAdamW:
    """AdamW with moments by parameter name. Parameters may be plain tensors or DTensors."""

    def __init__(self, named: dict[str, nn.Parameter], config: AdamWConfig) -> None:
        self.named = named
        self.config = config
        self.steps = 0
        self.first = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in named.items()}
        self.second = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in named.items()}
        groups = build_parameter_groups(named.items(), config)
        self._rules = {name: (group.lr_multiplier, group.weight_decay) for group in groups for name in group.names}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], learning_rate: float, gradient_scale: float) -> None:
        """Take one step with this rank's shard of each gradient, in the order of `named`, times `gradient_scale`."""
        self.steps += 1
        decay = get_weight_decay_share(learning_rate)
        for name, gradient in zip(self.named, gradients, strict=True):
            rate_scale, weight_decay = self._rules[name]
            rate = learning_rate * rate_scale
            tensors = (gradient, *map(get_local_tensor, (self.named[name], self.first[name], self.second[name])))
            pieces = zip(*(tensor.view(-1).split(PIECE) for tensor in tensors), strict=True)
            for piece, parameter, first, second in pieces:
                update = self._compute_update(piece * gradient_scale, first, second, rate)
                # Two roundings, as separate operations: add_(update, alpha=...) may fuse them.
                parameter.mul_(1 - rate * (weight_decay * decay)).sub_(update)

    def _compute_update(self, gradient: Tensor, first: Tensor, second: Tensor, rate: float) -> Tensor:
        """Update the moments and return the change to subtract. No operation here is a fused multiply-add."""
        beta1, beta2 = self.config.betas
        first.mul_(beta1).add_(gradient * (1 - beta1))
        second.mul_(beta2).add_(gradient.square_().mul_(1 - beta2))
        root = second.sqrt().div_((1 - beta2**self.steps) ** 0.5).add_(self.config.eps)
        return (first * (rate / (1 - beta1**self.steps))).div_(root)
