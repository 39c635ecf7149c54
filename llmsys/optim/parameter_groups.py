"""Which parameters decay, at what rate and by which rule they learn: the rules, and the groups they make.

Matrices (two or more dimensions) decay; vectors (norm weights, biases, stacked ones included) do not. Embeddings are
matrices and decay, as in GPT-3 and LLaMA; with the head they may learn at a rate of their own. Where Muon is chosen, it
takes the projections of attention, feed-forward and experts, and everything else is AdamW's. Names, not tensors, are
grouped, so that every engine makes the same groups from its own tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from llmsys.config.optimizer import OptimizerConfig, UpdateRule

Role = Literal["dense", "embedding", "experts"]


@dataclass(frozen=True)
class ParameterGroup:
    """Names of parameters that share weight decay and rate. `lr_multiplier` is in learning rates."""

    role: Role
    weight_decay: float
    lr_multiplier: float
    names: tuple[str, ...]
    algorithm: UpdateRule = "adamw"

    @property
    def name(self) -> str:
        """For logs and for engines that want one."""
        by = ", muon" if self.algorithm == "muon" else ""
        return f"{self.role}{'' if self.weight_decay else ' without decay'}{by}"


def get_parameter_role(name: str) -> Role:
    """What a parameter is, by its name; experts are the routed ones (`blocks.3.feed_forward.experts.up_proj`)."""
    if ".experts." in name:
        return "experts"
    return "embedding" if name in ("embed.weight", "head.weight") else "dense"


def _has_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    # The biases of experts are stacked, and so have two dimensions.
    return parameter.ndim >= 2 and not name.endswith("_bias")


def build_parameter_groups(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> list[ParameterGroup]:
    """The groups in a fixed order, empty ones left out."""
    members: dict[tuple[Role, bool, UpdateRule], list[str]] = {}
    for name, parameter in named:
        key = (
            get_parameter_role(name),
            _has_weight_decay(name, parameter),
            config.select_update_rule(name, parameter.ndim),
        )
        members.setdefault(key, []).append(name)
    return [
        ParameterGroup(
            role=role,
            weight_decay=config.weight_decay if decays else 0.0,
            lr_multiplier=config.embedding_lr_multiplier if role == "embedding" else 1.0,
            names=tuple(names),
            algorithm=rule,
        )
        for (role, decays, rule), names in sorted(members.items())
    ]
