"""Dynamic loss scaling for fp16 (Micikevicius 2018, arXiv:1710.03740, 3.2): keeps small gradients from becoming zero.

The loss is multiplied by the scale before backward, and the fp32 gradients are divided by it before clipping. A
gradient that did not fit fp16 shows as a norm that is not finite, the same on all ranks: that step is left out and the
scale halved. After `GROWTH_STEPS` steps that fit it doubles. All scales are powers of two, so nothing is rounded.
"""

import math

import torch
from torch import Tensor

LOSS_SCALE = "loss_scale"
"""Its name in the logical state: float32 of (scale, steps that fitted since it changed)."""

START, LEAST, MOST = 2.0**16, 1.0, 2.0**24
GROWTH_STEPS = 2000


class GradScaler:
    """The scale of the loss, and how long it has been right."""

    def __init__(self) -> None:
        self.tensor = torch.tensor([START, 0.0])

    @property
    def scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(self.tensor[0])

    def update_scale(self, loss: float, gradient_norm: float) -> bool:
        """Whether the gradient of a step fitted fp16; if not, the next scale is smaller.

        False where a smaller scale may help: the loss is a number, and the gradient is none. A loss that is no number
        has gone wrong before it was scaled, and at the least scale nothing is left to lower: others judge such a step.
        """
        scale, fitted = self.tensor.tolist()
        finite = math.isfinite(gradient_norm)
        overflowed = not finite and math.isfinite(loss) and scale > LEAST
        if overflowed:
            self._set_scale(scale / 2, 0)
        elif finite and fitted + 1 >= GROWTH_STEPS:
            self._set_scale(min(MOST, scale * 2), 0)
        elif finite:
            self._set_scale(scale, fitted + 1)
        return not overflowed

    def _set_scale(self, scale: float, fitted: float) -> None:
        self.tensor.copy_(torch.tensor([scale, fitted]))

    def state_dict(self) -> dict[str, Tensor]:
        """As a part of the logical state."""
        return {LOSS_SCALE: self.tensor}
