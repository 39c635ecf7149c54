"""Configuration of the parametrization (`model.parametrization`): what changes with the size of a
model.

A kind sets initial values, learning rates and a few multipliers from widths and depth, so that the
best settings of a small model are those of a large one. llmsys/model/parametrization.py computes
them.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from llmsys.config.section import Section
from llmsys.errors import Violation, format_choices


class _BaseParametrizationConfig(Section):
    # the outputs of branches are multiplied before they are added
    scales_branches: ClassVar[bool] = False
    # with known rates
    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "lion", "ademamix", "schedule_free", "muon")

    def find_violations(self, model: dict[str, Any]) -> Iterator[Violation]:
        """Yield what the kind has no rule for, by the fields of a model."""
        name = f"parametrization.kind={self.kind}"  # type: ignore[attr-defined]
        given = [
            key
            for key in ("rnn", "recurrence", "patches", "multi_token_prediction")
            if model[key] is not None
        ]
        for key in given:
            yield Violation(
                key,
                f"{name} has no rule for it. Set {key}=null, or use parametrization.kind=standard.",
            )
        for key in ("embedding", "head"):
            if isinstance(scale := getattr(model[key], "scale", None), str):
                yield Violation(
                    f"{key}.scale",
                    f"{name} sets what follows the width, and {scale} follows it too. Use a number"
                    ", or parametrization.kind=standard.",
                )
        choices = {
            "family": ("decoder",) if self.scales_branches else ("decoder", "encoder_decoder"),
            "initializer": ("normal",),
            "head.kind": ("lm",),
            "attention.kind": ("multi_head", "latent"),
            "residual.kind": ("pre", "parallel")
            if self.scales_branches
            else ("pre", "parallel", "sandwich", "output"),
        }
        for key, legal in choices.items():
            section = model[key.removesuffix(".kind")]
            found = section if isinstance(section, str) else section.kind
            if found not in legal:
                yield Violation(key, f"{name} has no rule for {found}. Use {' or '.join(legal)}.")

    def find_run_violations(self, optimizer: str) -> Iterator[Violation]:
        """Yield a kind of optimizer for which there is no rule, with its key of a run."""
        name = f"model.parametrization.kind={self.kind}"  # type: ignore[attr-defined]
        if optimizer not in self.optimizers:
            legal = format_choices(list(self.optimizers))
            yield Violation(
                "optimizer.kind",
                f"{name} has no learning rates for {optimizer}. Use {legal}, or "
                "parametrization.kind=standard.",
            )


class StandardParametrizationConfig(_BaseParametrizationConfig):
    """Initial values of initializer_range, and one learning rate; the best rate falls with the
    width.
    """

    kind: Literal["standard"] = "standard"

    def find_violations(self, model: dict[str, Any]) -> Iterator[Violation]:
        """Yield nothing."""
        yield from ()


class MupConfig(_BaseParametrizationConfig):
    """Maximal update parametrization for Adam-like optimizers (µP; Yang 2022, arXiv:2203.03466,
    table 8).

    A model of the base widths trains as with kind=standard, bit for bit. Heads are meant to grow in
    number.
    """

    kind: Literal["mup"] = "mup"
    base_hidden_size: int = Field(
        ge=1, description="hidden_size of the model whose settings are used."
    )
    base_head_dim: int | None = Field(
        None,
        ge=1,
        description="Its channels per head; scores are scaled by 1 / channels beyond it. null: "
        "the same.",
    )
    base_intermediate_size: int | None = Field(
        None,
        ge=1,
        description="Its width of a dense feed-forward. null: in proportion to hidden_size.",
    )
    base_moe_intermediate_size: int | None = Field(
        None,
        ge=1,
        description="Its width of an expert, the fan-in of down_proj. null: in proportion to "
        "hidden_size.",
    )


class CompletePConfig(MupConfig):
    """µP whose residual branches shrink with the depth (CompleteP; Dey 2025, arXiv:2505.01618,
    table 1).

    With depth_exponent=0.5 it is depth-µP (Yang 2023, arXiv:2310.02244).
    """

    kind: Literal["complete_p"] = "complete_p"  # type: ignore[assignment]
    scales_branches: ClassVar[bool] = True
    base_num_hidden_layers: int = Field(
        ge=1, description="num_hidden_layers of the model whose settings are used."
    )
    depth_exponent: float = Field(
        1.0,
        ge=0.5,
        le=1,
        description="Branches are multiplied by (base layers / layers) to this power.",
    )


class UnitScaledConfig(_BaseParametrizationConfig):
    """Unit-scaled µP: no base model, activations and updates of size 1 (u-µP; Blake 2024,
    arXiv:2407.17465, table 2).

    The learning rate is that of weights of size 1, of the order of 1.
    """

    kind: Literal["unit_scaled"] = "unit_scaled"
    scales_branches: ClassVar[bool] = True
    optimizers: ClassVar[tuple[str, ...]] = ("adamw", "lion", "ademamix", "schedule_free")
    residual_multiplier: float = Field(
        1.0, gt=0, description="Multiplier of every branch, before 1 / sqrt(layers)."
    )
    attention_multiplier: float = Field(
        1.0, gt=0, description="Multiplier of the scores, before 1 / head_dim."
    )

    def find_violations(self, model: dict[str, Any]) -> Iterator[Violation]:
        """Yield what the kind has no rule for, and fields that it replaces."""
        yield from super().find_violations(model)
        # Kinds without the field are refused above, or have their own scale.
        if getattr(model["attention"], "scale", None) is not None:
            yield Violation(
                "attention.scale",
                "parametrization.kind=unit_scaled sets it. Use "
                "parametrization.attention_multiplier.",
            )


ParametrizationConfig = Annotated[
    StandardParametrizationConfig | MupConfig | CompletePConfig | UnitScaledConfig,
    Field(discriminator="kind"),
]
