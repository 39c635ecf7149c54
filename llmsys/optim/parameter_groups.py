"""Parameter groups: weight decay, learning-rate multiple and update algorithm of each parameter.

The parametrization of the model multiplies the rate of a parameter
(llmsys/model/parametrization.py), and divides its decay by as much, since decay is multiplied by
the rate.

Matrices (two or more dimensions) decay; vectors (norm weights, biases, stacked ones included) do
not. Embeddings are matrices and decay, as in GPT-3 and LLaMA. Under Muon, the projections of
attention, feed-forward and experts use Muon, all else AdamW.

Invariants:
- Names are grouped, not tensors, so that every engine builds the same groups from its own tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from llmsys.config.model import ModelConfig
from llmsys.config.optimizer import OptimizerConfig, UpdateRule
from llmsys.model.parametrization import compute_rate_factor

Role = Literal["dense", "embedding", "experts"]

# Power of 1 / m on the rate of a matrix in µP, see `compute_rate_factor`.
WIDTH_EXPONENTS: dict[UpdateRule, float] = {"muon": 0.5}


@dataclass(frozen=True)
class ParameterGroup:
    """Names of parameters that share weight decay and learning rate.

    Attributes:
        role: Dense, embedding or routed experts.
        weight_decay: Per unit of learning rate.
        lr_multiplier: In learning rates.
        names: Parameter names.
        algorithm: The update algorithm.
        rate_factor: The part of lr_multiplier that the parametrization has.
    """

    role: Role
    weight_decay: float
    lr_multiplier: float
    names: tuple[str, ...]
    algorithm: UpdateRule = "adamw"
    rate_factor: float = 1.0

    @property
    def name(self) -> str:
        """Name for logs and for engines that need one."""
        by = "" if self.algorithm == "adamw" else f", {self.algorithm}"
        factor = "" if self.rate_factor == 1.0 else f", rate x{self.rate_factor:g}"
        return f"{self.role}{'' if self.weight_decay else ' without decay'}{by}{factor}"


def get_parameter_role(name: str) -> Role:
    """Return the role of a parameter by its name.

    Args:
        name: As in `Transformer.named_parameters`.

    Returns:
        "experts" for routed experts (`blocks.3.feed_forward.experts.up_proj`), "embedding" for
        token embedding and head, otherwise "dense".
    """
    if ".experts." in name:
        return "experts"
    return "embedding" if name in ("embed.weight", "head.weight") else "dense"


def _has_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    # The biases of experts are stacked, and so have two dimensions.
    return parameter.ndim >= 2 and not name.endswith("_bias")


def build_parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    model: ModelConfig | None = None,
) -> list[ParameterGroup]:
    """Build the parameter groups in a fixed order, without empty ones.

    Args:
        named: Parameters by name. Only their number of dimensions is read.
        config: The `optimizer:` section.
        model: The `model:` section, with its parametrization. None: the standard one.

    Returns:
        Groups that cover every name once.
    """
    members: dict[tuple[Role, bool, UpdateRule, float], list[str]] = {}
    for name, parameter in named:
        rule = config.select_update_rule(name, parameter.ndim)
        factor = (
            1.0
            if model is None
            else compute_rate_factor(model, name, WIDTH_EXPONENTS.get(rule, 1.0))
        )
        key = (get_parameter_role(name), _has_weight_decay(name, parameter), rule, factor)
        members.setdefault(key, []).append(name)
    return [
        ParameterGroup(
            role=role,
            weight_decay=config.weight_decay / factor if decays else 0.0,
            lr_multiplier=factor * (config.embedding_lr_multiplier if role == "embedding" else 1.0),
            names=tuple(names),
            algorithm=rule,
            rate_factor=factor,
        )
        for (role, decays, rule, factor), names in sorted(members.items())
    ]
