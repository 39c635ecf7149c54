"""The optimizer: the kinds of the `optimizer:` section.

Each kind defines the update rule of every parameter, the size of its state, and the memory traffic of a step.
These methods are abstract, so that a new kind cannot be estimated as AdamW by accident. To add a kind: add a class
here and in `OptimizerConfig`, its rule in `UpdateRule`, and its construction in llmsys/optim/build_optimizer.py.
"""

from abc import abstractmethod
from math import gcd
from typing import Annotated, ClassVar, Literal, Self, assert_never

from pydantic import Field, model_validator

from llmsys.config.python_code import PythonCode
from llmsys.config.section import Section, Violation, raise_violations

Decay = Annotated[float, Field(ge=0, lt=1)]
UpdateRule = Literal["adamw", "muon", "elementwise"]
MomentsDtype = Literal["fp32", "bf16", "int8"]

# Largest number of neighbours with one scale.
MOMENT_BLOCK = 128

# Elements that AdamW with compressed moments updates at a time: each of its float32 tensors takes 16 MiB.
MAX_UPDATED_ELEMENTS = 1 << 22


def get_moment_block(width: int) -> int:
    """Return the number of neighbours in the last dim that share a scale of 8-bit moments.

    Args:
        width: size of the last dim.

    Returns:
        A divisor of MOMENT_BLOCK. Where 16 divides the width, up to 16 tensor ranks hold whole blocks each.
    """
    return gcd(width if width % 16 else width // 16, MOMENT_BLOCK)


class _BaseOptimizerConfig(Section):
    """Fields of every optimizer: learning rate, weight decay, clipping, and the AdamW fields used for vectors."""

    can_update_flat_shards: ClassVar[bool] = False  # the DeepSpeed engine, which has flat shards, builds it
    is_elementwise: ClassVar[bool] = False  # operations that round once per element, as bitwise mode needs

    learning_rate: float = Field(3e-4, gt=0, description="Peak learning rate, scaled by the schedule.")
    embedding_lr_multiplier: float = Field(
        1.0,
        gt=0,
        description="Learning rate of the token embedding and the head, as a multiple of learning_rate; small models "
        "prefer higher values.",
    )
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="Decay rates of the first and second moment, per step.")
    eps: float = Field(1e-8, gt=0, description="Epsilon added to the square root of the second moment.")
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="Weight decay of matrices, multiplied by the learning rate and decoupled (adam: added to the "
        "gradient); vectors are not decayed.",
    )
    max_grad_norm: float = Field(1.0, ge=0, description="Maximum global gradient norm for clipping. 0: no clipping.")

    @abstractmethod
    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return the rule that updates a parameter, by its name and number of dimensions."""

    @abstractmethod
    def count_moments(self, name: str, num_dims: int) -> int:
        """Return the moments of each element of a parameter."""

    def compute_moment_bytes(self, shape: tuple[int, ...]) -> float:
        """Return the bytes of one element of one moment of a parameter, scales included."""
        return 4

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
        """Bytes read and written per parameter and step."""


class AdamWConfig(_BaseOptimizerConfig):
    """Adam with bias correction and decoupled weight decay (Kingma 2014; Loshchilov and Hutter 2017)."""

    kind: Literal["adamw"] = "adamw"
    can_update_flat_shards: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True
    moments: MomentsDtype = Field(
        "fp32",
        description="How moments are stored; they are computed in float32. bf16: 2 bytes. int8: 1 byte and a scale per "
        "block of 128 in matrices. Both round stochastically. Needs engine.kind=torch or accelerate.",
    )

    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return adamw for every parameter."""
        return "adamw"

    def count_moments(self, name: str, num_dims: int) -> int:
        """Return 2: the first and the second moment."""
        return 2

    def compute_moment_bytes(self, shape: tuple[int, ...]) -> float:
        """Return the bytes of one element of one moment of a parameter, scales included."""
        match self.moments:
            case "int8" if len(shape) > 1:
                return 1 + 4 / get_moment_block(shape[-1])
            case "fp32" | "int8":
                return 4
            case "bf16":
                return 2
            case unreachable:
                assert_never(unreachable)

    def count_update_elements(self, elements: int, largest_matrix: int) -> int:
        """Return 0 where the fused kernel updates in place, else some tensors of one piece of a parameter."""
        return 0 if self.moments == "fp32" else 6 * min(elements, MAX_UPDATED_ELEMENTS)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""
        # Reads weight, gradient and moments, writes three of them, and reads again for the gradient norm.
        return {"fp32": 36, "bf16": 28, "int8": 24}[self.moments]


class AdamConfig(AdamWConfig):
    """Adam with weight decay in the gradient, as an L2 penalty on the weights (Kingma 2014; BERT's and GPT-1's time).

    The moments see the decay, so weights with large gradients decay less than under AdamW.
    """

    kind: Literal["adam"] = "adam"  # type: ignore[assignment]
    moments: Literal["fp32"] = Field("fp32", description="How moments are stored; only AdamW compresses them.")
    can_update_flat_shards: ClassVar[bool] = False
    is_elementwise: ClassVar[bool] = False


class MuonConfig(_BaseOptimizerConfig):
    """Orthogonalized momentum for the matrices of blocks and experts (Jordan 2024); AdamW for all other parameters.

    Updates are scaled to the RMS of AdamW updates (Moonshot 2025), so learning rate and weight decay carry over.
    """

    kind: Literal["muon"] = "muon"
    momentum: Decay = Field(0.95, description="Momentum of matrices.")
    newton_schulz_steps: int = Field(
        5, ge=1, le=20, description="Newton-Schulz iterations that orthogonalize the momentum."
    )

    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return muon for projections (`…_proj`), adamw for routers, embeddings, heads and vectors."""
        # Stacked biases of experts have two dimensions, and their last part is `…_bias`.
        is_projection = any(part.endswith("_proj") for part in name.split("."))
        return "muon" if is_projection and num_dims >= 2 and not name.endswith("_bias") else "adamw"

    def count_moments(self, name: str, num_dims: int) -> int:
        """Return 1 for parameters updated by Muon, 2 for those updated by AdamW."""
        return 1 if self.select_update_rule(name, num_dims) == "muon" else 2

    def count_update_elements(self, elements: int, largest_matrix: int) -> int:
        """Return one element per update, plus a full matrix and its products during orthogonalization."""
        return elements + 4 * largest_matrix

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""
        return 36  # as AdamW: one moment less, but the update is written and read


class _ElementwiseConfig(_BaseOptimizerConfig):
    """An optimizer that treats each element of each parameter alike."""

    can_update_flat_shards: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True
    num_moments: ClassVar[int]

    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return elementwise for every parameter."""
        return "elementwise"

    def count_moments(self, name: str, num_dims: int) -> int:
        """Return the moments of the kind."""
        return self.num_moments

    def count_update_elements(self, elements: int, largest_matrix: int) -> int:
        """Return some tensors of one piece of a parameter."""
        return 4 * min(elements, MAX_UPDATED_ELEMENTS)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""
        # Reads weight, gradient and moments, writes weight and moments, and reads again for the gradient norm.
        return 4 * (4 + 2 * self.num_moments)


class LionConfig(_ElementwiseConfig):
    """The sign of an interpolated momentum (Chen 2023, arXiv:2302.06675); half of AdamW's state.

    Its updates have the size of the learning rate: the paper uses a rate 3 to 10 times smaller than AdamW's, and a
    weight decay as much larger.
    """

    kind: Literal["lion"] = "lion"
    num_moments: ClassVar[int] = 1
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.99), description="Shares of the momentum in the update, and in the next momentum."
    )

    @model_validator(mode="after")
    def _check_eps(self) -> Self:
        if self.eps != type(self).model_fields["eps"].default:
            raise_violations(
                [Violation("eps", f"{self.eps:g} has no place in lion, which divides by nothing. Omit it.")]
            )
        return self


class AdEMAMixConfig(_ElementwiseConfig):
    """AdamW with a second, slow momentum (Pagliardini 2024, arXiv:2409.03137)."""

    kind: Literal["ademamix"] = "ademamix"
    num_moments: ClassVar[int] = 3
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.999), description="Decay rates of the fast first moment and of the second moment, per step."
    )
    slow_beta: Decay = Field(0.9999, gt=0, description="Decay rate of the slow momentum, per step.")
    slow_weight: float = Field(5.0, ge=0, description="Weight of the slow momentum; 4 to 10 in the paper.")
    slow_warmup_steps: int = Field(
        0,
        ge=0,
        description="Steps over which slow_weight grows from 0, and slow_beta from betas[0]. The paper uses all "
        "steps of the run. 0: none.",
    )


class PythonOptimizerConfig(PythonCode, _ElementwiseConfig):
    """An optimizer of your own: a class that extends `llmsys.optim.python_optimizer.PythonOptimizer`.

    Learning rate, weight decay and clipping are those of every optimizer; the class computes the change of a parameter.
    """

    kind: Literal["python"] = "python"
    num_moments: int = Field(1, ge=0, le=3, description="Tensors of state for each parameter, of its shape.")  # type: ignore[misc]
    elementwise: bool = Field(
        True,
        description="Whether an element's change depends on that element alone. false: the class gets whole tensors, "
        "which only layouts without sharded parameters have.",
    )

    __hash__ = PythonCode.__hash__

    @model_validator(mode="after")
    def _check_unused_fields(self) -> Self:
        fields = type(self).model_fields
        raise_violations(
            Violation(name, f"{getattr(self, name)} is not read by kind=python. Use optimizer.options.")
            for name in ("betas", "eps")
            if getattr(self, name) != fields[name].default
        )
        return self


OptimizerConfig = Annotated[
    AdamWConfig | AdamConfig | MuonConfig | LionConfig | AdEMAMixConfig | PythonOptimizerConfig,
    Field(discriminator="kind"),
]
