"""Optimizers of the user's own code: the class to extend, its place among elementwise rules, and a
test kit.

    class SignMomentum(PythonOptimizer):
        beta: float = 0.9

        def compute_update(self, gradient, moments, step, learning_rate):
            moments[0].mul_(self.beta).add_(gradient, alpha=1 - self.beta)
            return moments[0].sign() * learning_rate

Weight decay, clipping, schedule and the learning rate of embeddings are those of every optimizer.

Invariants:
- A rule that is called elementwise gives each element the same change, whatever its neighbours are;
  the kit tests it.
"""

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from llmsys.config.loading.python_object import describe_error, load_python_object
from llmsys.config.optimizer import PythonOptimizerConfig
from llmsys.config.section import Section
from llmsys.errors import ConfigError

# Names of the moments in a checkpoint, in the order in which the class gets them.
MOMENT_NAMES = ("first_moment", "second_moment", "slow_moment")

# Elements and steps of the test of a class.
_ELEMENTS = 12
_STEPS = 3


class PythonOptimizer(Section):
    """Base class of an optimizer: fields are options."""

    @abstractmethod
    def compute_update(
        self, gradient: Tensor, moments: Sequence[Tensor], step: int, learning_rate: float
    ) -> Tensor:
        """Update the moments in place and return the change to subtract from the parameter, without
        weight decay.

        Args:
            gradient: float32, clipped; not to be changed. With `elementwise`, a part of the
                elements in one dimension.
            moments: `optimizer.num_moments` float32 tensors of the gradient's shape, 0 before the
                first step.
            step: counted from 1.
            learning_rate: of this step and parameter.
        """


@lru_cache(maxsize=8)
def load_python_optimizer(config: PythonOptimizerConfig) -> PythonOptimizer:
    """Run the user's code, build the optimizer and test it, once in a process.

    Args:
        config: the section.

    Returns:
        The user's object.

    Raises:
        ConfigError: the class is missing or wrong, or an option is, or it fails
            `check_python_optimizer`.
    """
    optimizer = load_python_object(config, PythonOptimizer, "optimizer")  # type: ignore[type-abstract]
    check_python_optimizer(
        optimizer, num_moments=config.num_moments, elementwise=config.elementwise
    )
    return optimizer


class LoadedPythonOptimizer:
    """The elementwise rule of a section with `kind: python`."""

    def __init__(self, config: PythonOptimizerConfig) -> None:
        self._optimizer = load_python_optimizer(config)
        self.moments = MOMENT_NAMES[: config.num_moments]
        self.is_elementwise = config.elementwise

    def compute_update(
        self, gradient: Tensor, moments: Sequence[Tensor], step: int, rate: float
    ) -> Tensor:
        """Implement `ElementwiseRule.compute_update`."""
        return self._optimizer.compute_update(gradient, moments, step, rate)


def check_python_optimizer(
    optimizer: PythonOptimizer, *, num_moments: int, elementwise: bool = True
) -> None:
    """Test an optimizer on a small tensor.

    Args:
        optimizer: the user's object.
        num_moments: tensors of state, as in the config.
        elementwise: whether an element's change may depend on that element alone.

    Raises:
        ConfigError: it fails, changes the gradient, returns another shape or dtype or a number that
            is not finite, or gives other changes when it is called again or, if elementwise, with a
            part of the elements.
    """
    name = type(optimizer).__name__
    shape = (_ELEMENTS,) if elementwise else (3, _ELEMENTS // 3)
    gradients = torch.linspace(-1.5, 2, _ELEMENTS * _STEPS).view(_STEPS, *shape)
    found = _run_steps(optimizer, gradients, num_moments)
    if not torch.equal(found, _run_steps(optimizer, gradients, num_moments)):
        raise ConfigError(
            f"optimizer: {name} gives other changes when it is called again with equal tensors, "
            "so a resumed run would differ. Keep all state in the moments."
        )
    half = _ELEMENTS // 2
    if elementwise and not torch.equal(
        found[:, :half], _run_steps(optimizer, gradients[:, :half], num_moments)
    ):
        raise ConfigError(
            f"optimizer: {name} changes an element otherwise when it is called without its "
            "neighbours, which other ranks or calls hold. Compute each element by itself, or set "
            "optimizer.elementwise=false, which needs parameters that are not sharded."
        )


def _run_steps(optimizer: PythonOptimizer, gradients: Tensor, num_moments: int) -> Tensor:
    """Return the changes of some steps from new moments. Raises ConfigError for a change that
    cannot be applied.
    """
    name = type(optimizer).__name__
    path = Path(inspect.getfile(type(optimizer)))
    moments = [torch.zeros_like(gradients[0]) for _ in range(num_moments)]
    updates = []
    for step, gradient in enumerate(gradients, 1):
        given = gradient.clone()
        try:
            update = optimizer.compute_update(given, moments, step, 0.01)
        except Exception as error:
            raise ConfigError(
                f"optimizer: {name} failed on a tensor of shape {tuple(gradient.shape)} with "
                f"{num_moments} moments (optimizer.num_moments): {describe_error(error, path)}. "
                "Correct compute_update."
            ) from error
        about = (
            (tuple(update.shape), update.dtype)
            if isinstance(update, Tensor)
            else type(update).__name__
        )
        if about != (tuple(gradient.shape), torch.float32):
            raise ConfigError(
                f"optimizer: {name} returned {about} for a gradient of {tuple(gradient.shape)}, "
                "torch.float32. Return the change as a float32 tensor of the gradient's shape."
            )
        if not torch.equal(given, gradient):
            raise ConfigError(
                f"optimizer: {name} changed the gradient, which others read. Change a copy of it."
            )
        if not bool(update.isfinite().all()):
            raise ConfigError(
                f"optimizer: {name} returned {update.flatten().tolist()} in step {step}, which is "
                "not finite. Correct compute_update; a division may need an epsilon."
            )
        updates.append(update.clone())
    return torch.stack(updates)
