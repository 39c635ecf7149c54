"""An optimizer, to copy and change. Run this file to test it: python my_optimizer.py

optimizer:
  kind: python
  path: my_optimizer.py:SignMomentum
  num_moments: 1
  learning_rate: 1e-4
  options: {beta: 0.9}
"""

from collections.abc import Sequence

from pydantic import Field
from torch import Tensor

from llmsys.optim.python_optimizer import PythonOptimizer, check_python_optimizer


class SignMomentum(PythonOptimizer):
    """Step by the sign of a momentum."""

    beta: float = Field(0.95, ge=0, lt=1, description="Decay rate of the momentum, per step.")

    def compute_update(
        self, gradient: Tensor, moments: Sequence[Tensor], step: int, learning_rate: float
    ) -> Tensor:
        """Return the change to subtract from a parameter; the moments are updated in place."""
        (momentum,) = moments
        momentum.mul_(self.beta).add_(gradient * (1 - self.beta))
        return momentum.sign() * learning_rate


if __name__ == "__main__":
    check_python_optimizer(SignMomentum(), num_moments=1)
    print("the optimizer changes each element by itself, and repeats its changes")
