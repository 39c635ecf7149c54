"""The optimizer: the kinds of the `optimizer:` section, and those that treat each element by
itself.

To add a kind: add a class here or in matrix_optimizers.py, and in `OptimizerConfig`, its rule in
`UpdateRule`, and its construction in llmsys/optim/build_optimizer.py.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.base_optimizer import (
    MAX_UPDATED_ELEMENTS,
    AdamConfig,
    AdamWConfig,
    BaseOptimizerConfig,
    Decay,
    MomentsDtype,
    UpdateRule,
    get_moment_block,
)
from llmsys.config.matrix_optimizers import AdafactorConfig, MuonConfig, SoapConfig
from llmsys.config.python_code import PythonCode
from llmsys.config.section import raise_violation, raise_violations
from llmsys.errors import Violation

__all__ = [
    "MAX_UPDATED_ELEMENTS", "AdEMAMixConfig", "AdafactorConfig", "AdamConfig", "AdamWConfig",
    "LionConfig",
    "MomentsDtype", "MuonConfig", "OptimizerConfig", "PythonOptimizerConfig", "ScheduleFreeConfig",
    "SoapConfig", "UpdateRule", "get_moment_block",
]  # fmt: skip


class _ElementwiseConfig(BaseOptimizerConfig):
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

    def count_update_bytes(
        self, elements: int, largest_matrix: int, *, dtype_bytes: int, is_exchanged: bool
    ) -> int:
        """Return some tensors of one piece of a parameter."""
        size = 24 if self.cautious_weight_decay else 16
        return size * min(elements, MAX_UPDATED_ELEMENTS)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written per parameter and step."""
        # Reads weight, gradient and moments, writes weight and moments, and reads again for the
        # gradient norm.
        return 4 * (4 + 2 * self.num_moments)


class LionConfig(_ElementwiseConfig):
    """The sign of an interpolated momentum (Chen 2023, arXiv:2302.06675); half of AdamW's state.

    Its updates have the size of the learning rate: the paper uses a rate 3 to 10 times smaller than
    AdamW's, and a weight decay as much larger.
    """

    kind: Literal["lion"] = "lion"
    num_moments: ClassVar[int] = 1
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.99), description="Shares of the momentum in the update, and in the next momentum."
    )

    @model_validator(mode="after")
    def _check_eps(self) -> Self:
        if self.eps != type(self).model_fields["eps"].default:
            raise_violation(
                "eps",
                f"{self.eps:g} has no place in lion, which divides by nothing. Omit it.",
            )
        return self


class AdEMAMixConfig(_ElementwiseConfig):
    """AdamW with a second, slow momentum (Pagliardini 2024, arXiv:2409.03137)."""

    kind: Literal["ademamix"] = "ademamix"
    num_moments: ClassVar[int] = 3
    betas: tuple[Decay, Decay] = Field(
        (0.9, 0.999),
        description="Decay rates of the fast first moment and of the second moment, per step.",
    )
    slow_beta: Decay = Field(0.9999, gt=0, description="Decay rate of the slow momentum, per step.")
    slow_weight: float = Field(
        5.0, ge=0, description="Weight of the slow momentum; 4 to 10 in the paper."
    )
    slow_warmup_steps: int = Field(
        0,
        ge=0,
        description="Steps over which slow_weight grows from 0, and slow_beta from betas[0]. The "
        "paper uses all steps of the run. 0: none.",
    )


class ScheduleFreeConfig(_ElementwiseConfig):
    """AdamW without a decay of the rate, by an average of its weights (Defazio 2024,
    arXiv:2405.15682, algorithm 1).

    Gradients are taken between the average and the fast weights. The average is evaluated, exported
    and generates; schedule.kind=constant with a warm-up fits it.
    """

    kind: Literal["schedule_free"] = "schedule_free"
    num_moments: ClassVar[int] = 2
    can_update_flat_shards: ClassVar[bool] = False
    betas: tuple[Annotated[float, Field(gt=0, lt=1)], Decay] = Field(
        (0.9, 0.999),
        description="Share of the average in the weights of a gradient; decay rate of the second "
        "moment.",
    )
    averaging_power: float = Field(
        0.0,
        ge=0,
        description="Step t counts t to this power in the average, times the square of the "
        "largest rate so far. 0: by the rate alone, so the steps of a warm-up count less; "
        "higher: later steps count more.",
    )


class PythonOptimizerConfig(PythonCode, _ElementwiseConfig):
    """An optimizer of your own: a class that extends
    `llmsys.optim.python_optimizer.PythonOptimizer`.

    Learning rate, weight decay and clipping are those of every optimizer; the class computes the
    change of a parameter.
    """

    kind: Literal["python"] = "python"
    num_moments: int = Field(  # type: ignore[misc]
        1, ge=0, le=3, description="Tensors of state for each parameter, of its shape."
    )
    elementwise: bool = Field(
        True,
        description="Whether an element's change depends on that element alone. false: the class "
        "gets whole tensors, which only layouts without sharded parameters have.",
    )

    __hash__ = PythonCode.__hash__

    @model_validator(mode="after")
    def _check_unused_fields(self) -> Self:
        fields = type(self).model_fields
        raise_violations(
            Violation(
                name, f"{getattr(self, name)} is not read by kind=python. Use optimizer.options."
            )
            for name in ("betas", "eps")
            if getattr(self, name) != fields[name].default
        )
        return self


OptimizerConfig = Annotated[
    AdamWConfig
    | AdamConfig
    | MuonConfig
    | LionConfig
    | AdEMAMixConfig
    | ScheduleFreeConfig
    | AdafactorConfig
    | SoapConfig
    | PythonOptimizerConfig,
    Field(discriminator="kind"),
]
