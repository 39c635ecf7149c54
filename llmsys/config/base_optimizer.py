"""Base of the kinds of the `optimizer:` section, and the kinds that are torch's: AdamW and Adam.

Each kind defines the update rule of every parameter, the size of its state, and the memory traffic
of a step. These methods are abstract, so that a new kind cannot be estimated as AdamW by accident.
"""

from abc import abstractmethod
from math import gcd
from typing import Annotated, ClassVar, Literal, assert_never

from pydantic import Field

from llmsys.config.section import Section

Decay = Annotated[float, Field(ge=0, lt=1)]
UpdateRule = Literal["adamw", "muon", "elementwise", "matrix"]
MomentsDtype = Literal["fp32", "bf16", "int8"]

# Largest number of neighbours with one scale.
MOMENT_BLOCK = 128

# Elements that AdamW with compressed moments updates at a time: each of its float32 tensors takes
# 16 MiB.
MAX_UPDATED_ELEMENTS = 1 << 22


def get_moment_block(width: int) -> int:
    """Return the number of neighbours in the last dim that share a scale of 8-bit moments.

    Args:
        width: size of the last dim.

    Returns:
        A divisor of MOMENT_BLOCK. Where 16 divides the width, up to 16 tensor ranks hold whole
        blocks each.
    """
    return gcd(width if width % 16 else width // 16, MOMENT_BLOCK)


def is_projection(name: str, num_dims: int) -> bool:
    """Return whether a parameter is a projection of a block, or a stack of them, by its name.

    Args:
        name: as in `Transformer.named_parameters`.
        num_dims: its number of dimensions.

    Returns:
        False for routers, embeddings, heads and vectors.
    """
    # Stacked biases of experts have two dimensions, and their last part is `…_bias`.
    return (
        num_dims >= 2
        and not name.endswith("_bias")
        and any(part.endswith("_proj") for part in name.split("."))
    )


class BaseOptimizerConfig(Section):
    """Fields of every optimizer: learning rate, weight decay, clipping, and the AdamW fields
    used for vectors.
    """

    # the elements of a flat shard, as DeepSpeed has them, are enough
    can_update_flat_shards: ClassVar[bool] = False
    # operations that round once per element, as bitwise mode needs
    is_elementwise: ClassVar[bool] = False

    learning_rate: float = Field(
        # A weight is about 0.1 long: a step of 10 is a slip of the exponent.
        3e-4,
        gt=0,
        le=10,
        description="Peak learning rate, scaled by the schedule.",
    )
    embedding_lr_multiplier: float = Field(
        1.0,
        gt=0,
        description="Learning rate of the token embedding and the head, as a multiple of "
        "learning_rate; small models prefer higher values.",
    )
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.95), description="Decay rates of the first and second moment, per step."
    )
    eps: float = Field(
        1e-8, gt=0, description="Epsilon added to the square root of the second moment."
    )
    weight_decay: float = Field(
        0.1,
        ge=0,
        description="Weight decay of matrices, multiplied by the learning rate and decoupled "
        "(adam: added to the gradient); vectors are not decayed.",
    )
    cautious_weight_decay: bool = Field(
        False,
        description="Decay only elements that the update moves towards zero (Chen 2025, "
        "arXiv:2510.12402).",
    )
    max_attention_logit: float | None = Field(
        None,
        gt=0,
        description="Largest attention logit: after a step, query and key projections of heads "
        "beyond it are scaled down (QK-clip; with muon it is MuonClip, 100 in Kimi K2). null: "
        "no clipping.",
    )
    max_grad_norm: float = Field(
        1.0, ge=0, description="Maximum global gradient norm for clipping. 0: no clipping."
    )

    @abstractmethod
    def select_update_rule(self, name: str, num_dims: int) -> UpdateRule:
        """Return the rule that updates a parameter.

        Args:
            name: as in `Transformer.named_parameters`.
            num_dims: its number of dimensions.
        """

    @abstractmethod
    def count_moments(self, name: str, num_dims: int) -> int:
        """Return the moments of each element of a parameter.

        Args:
            name: as in `Transformer.named_parameters`.
            num_dims: its number of dimensions.
        """

    def compute_moment_bytes(self, shape: tuple[int, ...]) -> float:
        """Return the bytes of one element of one moment of a parameter, scales included.

        Args:
            shape: shape of the parameter, on which the number of scales depends.
        """
        return 4

    def compute_state_bytes(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the bytes of all moments of one element of a parameter.

        Args:
            name: as in `Transformer.named_parameters`.
            shape: its shape.
        """
        return self.count_moments(name, len(shape)) * self.compute_moment_bytes(shape)

    def count_step_flops(self, name: str, shape: tuple[int, ...]) -> float:
        """Return the FLOPs of a step for one matrix or stack that every rank repeats; 0 without
        gathered
        matrices.

        Args:
            name: as in `Transformer.named_parameters`.
            shape: its shape.
        """
        return 0.0

    @abstractmethod
    def count_update_bytes(
        self, elements: int, largest_matrix: int, *, dtype_bytes: int, is_exchanged: bool
    ) -> int:
        """Return the bytes that a step allocates.

        Args:
            elements: elements that a rank has of the parameters that are updated as matrices, or of
                all.
            largest_matrix: elements of the largest of them that a rank updates at once.
            dtype_bytes: bytes of an element of the compute dtype.
            is_exchanged: whether shards of matrices are sent to the rank that updates a matrix, and
                back.
        """

    @property
    @abstractmethod
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""


class AdamWConfig(BaseOptimizerConfig):
    """Adam with bias correction and decoupled weight decay (Kingma 2014; Loshchilov and Hutter
    2017).
    """

    kind: Literal["adamw"] = "adamw"
    can_update_flat_shards: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True
    moments: MomentsDtype = Field(
        "fp32",
        description="How moments are stored; they are computed in float32. bf16: 2 bytes. int8: 1 "
        "byte and a scale per block of 128 in matrices. Both round stochastically. Needs "
        "engine.kind=torch or accelerate.",
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

    def count_update_bytes(
        self, elements: int, largest_matrix: int, *, dtype_bytes: int, is_exchanged: bool
    ) -> int:
        """Return 0 where the fused kernel updates in place, else some tensors of one piece of a
        parameter.
        """
        if self.moments == "fp32" and not self.cautious_weight_decay:
            return 0
        return 24 * min(elements, MAX_UPDATED_ELEMENTS)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""
        # Reads weight, gradient and moments, writes three of them, and reads again for the gradient
        # norm.
        return {"fp32": 36, "bf16": 28, "int8": 24}[self.moments]


class AdamConfig(AdamWConfig):
    """Adam with weight decay in the gradient, as an L2 penalty on the weights (Kingma 2014; BERT's
    and GPT-1's time).

    The moments see the decay, so weights with large gradients decay less than under AdamW.
    """

    kind: Literal["adam"] = "adam"  # type: ignore[assignment]
    moments: Literal["fp32"] = Field(
        "fp32", description="How moments are stored; only AdamW compresses them."
    )
    can_update_flat_shards: ClassVar[bool] = False
    is_elementwise: ClassVar[bool] = False
