"""Optimizers that treat a matrix as a whole: Muon, Adafactor and SOAP."""

from math import prod
from typing import Literal, Self

from pydantic import Field, model_validator

from llmsys.config.base_optimizer import BaseOptimizerConfig, Decay, UpdateRule, is_projection
from llmsys.config.section import raise_violations
from llmsys.errors import Violation

Orthogonalization = Literal["newton_schulz", "polar_express"]


def get_input_dim(num_dims: int) -> int:
    """Return the dim of a projection that its inputs have; the other of the last two dims has its
    neurons.

    Args:
        num_dims: of the parameter: a matrix is (out, in), a stack of experts (E, in, out).

    Returns:
        -1 or -2.
    """
    return -1 if num_dims == 2 else -2


class MuonConfig(BaseOptimizerConfig):
    """Orthogonalized momentum for the matrices of blocks and experts (Jordan 2024); AdamW for all
    other parameters.

    Updates are scaled to the RMS of AdamW updates (Moonshot 2025), so learning rate and weight
    decay carry over.
    """

    kind: Literal["muon"] = "muon"
    momentum: Decay = Field(0.95, description="Momentum of matrices.")
    newton_schulz_steps: int = Field(
        5, ge=1, le=20, description="Newton-Schulz iterations that orthogonalize the momentum."
    )
    orthogonalization: Orthogonalization = Field(
        "newton_schulz",
        description="Coefficients of the iterations. newton_schulz: the same in each (Jordan "
        "2024). polar_express: the best of each (Amsel 2025, arXiv:2505.16932).",
    )
    neuron_beta: Decay | None = Field(
        None,
        description="Decay rate of the second moment of each neuron, by whose root its updates "
        "are divided (NorMuon, Li 2025, arXiv:2510.05491, has 0.95). null: no such moment.",
    )

    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Select the update of a parameter.

        Args:
            name: As in `Transformer.named_parameters`.
            num_dims: Its number of dimensions.

        Returns:
            muon for projections (`…_proj`); adamw for routers, embeddings, heads and vectors.
        """
        return "muon" if is_projection(name, num_dims) else "adamw"

    def count_moments(self, name: str, num_dims: int) -> int:
        """Count the moments of a parameter.

        Args:
            name: As in `Transformer.named_parameters`.
            num_dims: Its number of dimensions.

        Returns:
            1 for parameters updated by Muon, 2 for those updated by AdamW.
        """
        return 1 if self.select_update_rule(name, num_dims) == "muon" else 2

    def compute_state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the bytes of all moments of one element, with its share of a neuron's."""
        found = super().compute_state_bytes(name, shape)
        if self.neuron_beta is None or self.select_update_rule(name, len(shape)) != "muon":
            return found
        return found + 4 / shape[get_input_dim(len(shape))]

    def count_update_bytes(
        self, elements: int, largest_matrix: int, *, dtype_bytes: int, is_exchanged: bool
    ) -> int:
        """Return momenta and updates, what is sent and received of both, and the products of one
        matrix, or its update in float32 with the signs of a cautious decay.
        """
        products = 5 * dtype_bytes
        step = 16 if self.cautious_weight_decay else 4 if self.neuron_beta is None else 8
        of_one = max(products, step) * largest_matrix
        return dtype_bytes * (6 if is_exchanged else 2) * elements + of_one

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""
        return 36  # as AdamW: one moment less, but the update is written and read


class AdafactorConfig(BaseOptimizerConfig):
    """Second moments as an outer product of rows and columns, no first moment (Shazeer 2018,
    arXiv:1804.04235).

    The rate is relative to the size of a matrix: a step changes it by learning_rate times its root
    mean square.
    """

    kind: Literal["adafactor"] = "adafactor"
    learning_rate: float = Field(
        1e-2, gt=0, description="Peak relative rate; at most 1 / sqrt(step)."
    )
    decay_exponent: float = Field(
        0.8, gt=0, le=1, description="The decay rate of step t is 1 - t to minus this."
    )
    clip_threshold: float = Field(
        1.0, gt=0, description="Largest root mean square of an update before the rate."
    )
    min_weight_size: float = Field(
        1e-3, gt=0, description="Least root mean square that a rate is relative to."
    )

    @model_validator(mode="after")
    def _check_unused(self) -> Self:
        given = self.model_fields_set & {"betas", "eps"}
        raise_violations(
            Violation(
                key, "adafactor has no such term; see decay_exponent and min_weight_size. Omit it."
            )
            for key in sorted(given)
            if getattr(self, key) != type(self).model_fields[key].default
        )
        return self

    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return matrix for every parameter; vectors have a full second moment."""
        return "matrix"

    def count_moments(self, name: str, num_dims: int) -> int:
        """Return 1."""
        return 1

    def compute_moment_bytes(self, shape: tuple[int, ...]) -> float:
        """Return the bytes of one element: of a matrix, those of one row and one column."""
        return 4 if len(shape) < 2 else 4 * sum(shape[-2:]) / prod(shape[-2:])

    def count_update_bytes(
        self, elements: int, largest_matrix: int, *, dtype_bytes: int, is_exchanged: bool
    ) -> int:
        """Return a full weight and gradient with the estimate and the update, in float32, and the
        signs of a cautious decay.
        """
        return (28 if self.cautious_weight_decay else 16) * largest_matrix

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""
        return 24  # weight and gradient, some of them twice


class SoapConfig(BaseOptimizerConfig):
    """Adam in the eigenbasis of Shampoo's preconditioners (Vyas 2024, arXiv:2409.11321); AdamW for
    all but projections.

    The first step of a projection only measures: its gradient gives the first basis.
    """

    kind: Literal["soap"] = "soap"
    betas: tuple[Decay, Decay] = Field(
        (0.95, 0.95), description="Decay rates of the first and second moment, per step."
    )
    shampoo_beta: Decay = Field(0.95, description="Decay rate of the preconditioners, per step.")
    precondition_every_steps: int = Field(
        10, ge=1, description="Steps between updates of the eigenbasis."
    )
    max_precondition_size: int = Field(
        8192,
        ge=1,
        description="Sides of a matrix longer than this are not rotated, and have no "
        "preconditioner.",
    )

    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return matrix for projections, adamw for all other parameters."""
        return "matrix" if is_projection(name, num_dims) else "adamw"

    def count_moments(self, name: str, num_dims: int) -> int:
        """Return 2; preconditioners are in `compute_state_bytes`."""
        return 2

    def list_rotated_sides(self, shape: tuple[int, ...]) -> list[int]:
        """List the dims of a matrix that have a preconditioner.

        Args:
            shape: Shape of the parameter; its last two dims are the matrix, those before stack
                experts.

        Returns:
            -2, -1, both or none.
        """
        return [dim for dim in (-2, -1) if shape[dim] <= self.max_precondition_size]

    def compute_state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the bytes of moments, preconditioners and bases, per element."""
        if self.select_update_rule(name, len(shape)) != "matrix":
            return 8
        squares = sum(shape[dim] ** 2 for dim in self.list_rotated_sides(shape))
        return 8 + 8 * squares / prod(shape[-2:])

    def count_step_flops(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the FLOPs of rotations and preconditioners, and of the bases by the steps
        between their updates.
        """
        if self.select_update_rule(name, len(shape)) != "matrix":
            return 0.0
        sides = [shape[dim] for dim in self.list_rotated_sides(shape)]
        # Per side: gradient and momentum into the basis, the update back, and the preconditioner.
        each = sum(8.0 * prod(shape[-2:]) * side for side in sides)
        # Eigenvalues and power iteration are two matmuls, and a QR decomposition with its Q is 8/3
        # n³.
        bases = sum((4 + 8 / 3) * side**3 for side in sides) / self.precondition_every_steps
        return prod(shape[:-2]) * (each + bases)

    def count_update_bytes(
        self, elements: int, largest_matrix: int, *, dtype_bytes: int, is_exchanged: bool
    ) -> int:
        """Return the gathered tensors of the largest matrix, with its rotations, in float32, and
        the signs of a cautious decay.
        """
        return (60 if self.cautious_weight_decay else 48) * largest_matrix

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""
        return 64  # as AdamW, and the rotations and preconditioners of a matrix
