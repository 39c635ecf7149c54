"""Factors on the outputs of projections (`model.multipliers`)."""

from torch import Tensor, nn

from llmsys.config.multipliers import MultipliersConfig


class Multiplier:
    """Hook that multiplies the output of a module."""

    def __init__(self, factor: float) -> None:
        """Keep the factor.

        Args:
            factor: A positive number.
        """
        self.factor = factor

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the output times the factor."""
        return output * self.factor


def add_multipliers(multipliers: MultipliersConfig | None, parts: dict[str, nn.Module]) -> None:
    """Multiply the outputs of projections of a block.

    Args:
        multipliers: The section; None: nothing is multiplied.
        parts: Modules of the block by the sections of `multipliers`, as far as it has them.
    """
    for section, name, factor in multipliers.iter_factors() if multipliers else ():
        if section in parts:
            parts[section].get_submodule(name).register_forward_hook(Multiplier(factor))
