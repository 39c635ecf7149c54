"""An elementwise optimizer over named parameters, for bitwise mode: every operation rounds once
(elementwise.py).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from llmsys.config.model import ModelConfig
from llmsys.model.local_tensor import get_local_tensor
from llmsys.optim.elementwise import (
    AVERAGE_WEIGHTS,
    ElementwiseConfig,
    build_average_weights,
    build_elementwise_rule,
    update_parameter,
)
from llmsys.optim.lr_schedule import get_weight_decay_share
from llmsys.optim.parameter_groups import build_parameter_groups


class BitwiseOptimizer:
    """An elementwise rule with its moments by their names in a checkpoint, then by parameter name.

    Parameters may be plain tensors or DTensors.
    """

    def __init__(
        self,
        named: dict[str, nn.Parameter],
        config: ElementwiseConfig,
        model: ModelConfig | None = None,
    ) -> None:
        """Allocate moments of zeros, sharded as the parameters are.

        Args:
            named: float32 parameters by name. `step` takes gradients in this order.
            config: From `require_elementwise`.
            model: The `model:` section, by which the groups of parameters are built; see
                `build_parameter_groups`.
        """
        self.named = named
        self.rule = build_elementwise_rule(config)
        self.average = build_average_weights(config)
        self._is_cautious = config.cautious_weight_decay
        self.steps = 0
        self.moments = {
            moment: {
                name: torch.zeros_like(parameter, requires_grad=False)
                for name, parameter in named.items()
            }
            for moment in self.rule.moments
        }
        groups = build_parameter_groups(named.items(), config, model)
        self._rules = {
            name: (group.lr_multiplier, group.weight_decay)
            for group in groups
            for name in group.names
        }

    @torch.no_grad()
    def step(
        self, gradients: Sequence[Tensor], learning_rate: float, gradient_scale: float
    ) -> None:
        """Take one step with this rank's shard of each gradient.

        Args:
            gradients: shards in the order of `named`.
            learning_rate: rate of this step.
            gradient_scale: factor of every gradient, as clipping gives it.
        """
        self.steps += 1
        decay = get_weight_decay_share(learning_rate)
        share = None if self.average is None else self.average.add_step(self.steps, learning_rate)
        for name, gradient in zip(self.named, gradients, strict=True):
            rate_scale, weight_decay = self._rules[name]
            update_parameter(
                self.rule,
                get_local_tensor(self.named[name]),
                gradient,
                [get_local_tensor(moments[name]) for moments in self.moments.values()],
                step=self.steps,
                rate=learning_rate * rate_scale,
                weight_decay=weight_decay * decay,
                is_cautious=self._is_cautious,
                gradient_scale=gradient_scale,
                average_share=share,
            )

    def get_shared_state(self) -> dict[str, Tensor]:
        """Return the state that belongs to no parameter, by its name in a checkpoint; not
        copied.
        """
        return {} if self.average is None else {AVERAGE_WEIGHTS: self.average.tensor}
