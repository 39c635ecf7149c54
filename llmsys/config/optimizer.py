"""The optimizer: the kinds of the `optimizer:` section.

Each kind says which rule updates a parameter, how much state it has, and what a step moves and allocates. These are
abstract, so that an added kind cannot be priced as AdamW. To add one: a class here and in `OptimizerConfig`, its rule
in `UpdateRule`, and its build in llmsys/optim/build_optimizer.py.
"""

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmsys.config.section import Section

Decay = Annotated[float, Field(ge=0, lt=1)]
UpdateRule = Literal["adamw", "muon"]


class _BaseOptimizerConfig(Section):
    """Fields of every optimizer: the rate, weight decay, clipping, and AdamW's for vectors."""

    can_update_flat_shards: ClassVar[bool] = False  # the DeepSpeed engine, which has flat shards, builds it

    learning_rate: float = Field(3e-4, gt=0, description="Peak rate; the schedule scales it.")
    embedding_lr_multiplier: float = Field(
        1.0, gt=0, description="Rate of the token embedding and the head, in learning rates; small models like more."
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Decay per step of the first and second moment.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.1, ge=0, description="Decay of matrices, per unit of learning rate; vectors do not.")
    max_grad_norm: float = Field(1.0, ge=0, description="Largest global gradient norm; 0 does not clip.")

    @abstractmethod
    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return the rule that updates a parameter, by its name and number of dimensions."""

    @abstractmethod
    def count_moments(self, name: str, num_dims: int) -> int:
        """Return the float32 moments of each element of a parameter."""

    @abstractmethod
    def count_update_elements(self, elements: int, largest_matrix: int) -> int:
        """Return the float32 elements that a step allocates.

        Args:
            elements: elements of the parameters that a rank updates.
            largest_matrix: elements of the largest full matrix.
        """

    @property
    @abstractmethod
    def moved_bytes(self) -> int:
        """Bytes that a step reads and writes for each parameter."""


class AdamWConfig(_BaseOptimizerConfig):
    """Adam with bias correction and decoupled weight decay (Kingma 2014; Loshchilov and Hutter 2017)."""

    kind: Literal["adamw"] = "adamw"
    can_update_flat_shards: ClassVar[bool] = True

    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return adamw for every parameter."""
        return "adamw"

    def count_moments(self, name: str, num_dims: int) -> int:
        """Return 2: the first and the second moment."""
        return 2

    def count_update_elements(self, elements: int, largest_matrix: int) -> int:
        """Return 0: the fused kernel updates in place."""
        return 0

    @property
    def moved_bytes(self) -> int:
        """Bytes for each parameter: weight, gradient and moments read, three written, and the norm's reading."""
        return 36


class MuonConfig(_BaseOptimizerConfig):
    """Orthogonal momentum for the matrices of blocks, experts too (Jordan 2024); AdamW for everything else.

    Its steps are scaled to those of AdamW (Moonshot 2025), so rate and decay carry over from one to the other.
    """

    kind: Literal["muon"] = "muon"
    momentum: Decay = Field(0.95, description="Decay per step of the momentum of matrices.")
    newton_schulz_steps: int = Field(
        5, ge=1, le=20, description="Newton-Schulz steps; each makes the momentum more orthogonal."
    )

    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return muon for projections (`…_proj`), adamw for routers, embeddings, heads and vectors."""
        # Stacked biases of experts have two dimensions, and their last part is `…_bias`.
        is_projection = any(part.endswith("_proj") for part in name.split("."))
        return "muon" if is_projection and num_dims >= 2 and not name.endswith("_bias") else "adamw"

    def count_moments(self, name: str, num_dims: int) -> int:
        """Return 1 for Muon's momentum, 2 where AdamW updates."""
        return 1 if self.select_update_rule(name, num_dims) == "muon" else 2

    def count_update_elements(self, elements: int, largest_matrix: int) -> int:
        """Return the updates, and a full matrix with its products while it becomes orthogonal."""
        return elements + 4 * largest_matrix

    @property
    def moved_bytes(self) -> int:
        """Bytes for each parameter as AdamW's: one moment less is read, but the update is written and read."""
        return 36


OptimizerConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="kind")]
