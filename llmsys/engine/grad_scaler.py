"""Dynamic loss scaling for fp16 (Micikevicius 2018, arXiv:1710.03740, 3.2), against underflow of
small gradients.

The loss is multiplied by the scale before backward, and the float32 gradients are divided by it
before clipping. An overflow in fp16 makes the norm non-finite on all ranks: the step is skipped and
the scale halved. After `GROWTH_STEPS` steps without overflow it doubles.

Invariants:
- All scales are powers of two, so scaling rounds nothing.
"""

import math

import torch
from torch import Tensor

# Name in the training state: float32 of (scale, steps without overflow since it changed).
LOSS_SCALE = "loss_scale"

INITIAL_SCALE = 2.0**16
MIN_SCALE = 1.0
MAX_SCALE = 2.0**24
GROWTH_STEPS = 2000


class GradScaler:
    """The loss scale, and the number of steps without overflow since it changed."""

    def __init__(self) -> None:
        self.tensor = torch.tensor([INITIAL_SCALE, 0.0])

    @property
    def scale(self) -> float:
        """Factor on the next loss."""
        return float(self.tensor[0])

    def update_scale(self, loss: float, gradient_norm: float) -> bool:
        """Update the loss scale after a backward pass.

        Args:
            loss: Nats per target.
            gradient_norm: Norm of the unscaled gradient.

        Returns:
            False where a smaller scale may help: the loss is finite, the gradient is not. The
            scale is halved then. True otherwise: a loss that is not finite failed before it was
            scaled, and the smallest scale cannot be lowered, so the step guard judges such a
            step.
        """
        scale, good_steps = self.tensor.tolist()
        finite = math.isfinite(gradient_norm)
        overflowed = not finite and math.isfinite(loss) and scale > MIN_SCALE
        if overflowed:
            self._set_scale(scale / 2, 0)
        elif finite and good_steps + 1 >= GROWTH_STEPS:
            self._set_scale(min(MAX_SCALE, scale * 2), 0)
        elif finite:
            self._set_scale(scale, good_steps + 1)
        return not overflowed

    def _set_scale(self, scale: float, good_steps: float) -> None:
        self.tensor.copy_(torch.tensor([scale, good_steps]))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the entry of the training state."""
        return {LOSS_SCALE: self.tensor}
