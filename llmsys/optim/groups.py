"""Which parameters decay: the one rule, and the groups it makes.

Matrices (two or more dimensions) decay; vectors (norm weights, biases) do not. Embeddings are matrices and decay, as in
GPT-3 and LLaMA. Names, not tensors, are grouped, so that every engine makes the same groups from its own tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class ParameterGroup:
    """Names of parameters that share one weight decay. `experts` says whether they are split over the expert axis."""

    name: str
    weight_decay: float
    experts: bool
    names: tuple[str, ...]


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to routed experts, by its name (`blocks.3.feed_forward.experts.up_proj`)."""
    return ".experts." in name


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[ParameterGroup]:
    """The groups in a fixed order, empty ones left out."""
    members: dict[tuple[bool, bool], list[str]] = {}
    for name, parameter in named:
        members.setdefault((is_expert(name), parameter.ndim >= 2), []).append(name)
    return [
        ParameterGroup(
            name=("experts" if experts else "dense") + ("" if decays else " without decay"),
            weight_decay=weight_decay if decays else 0.0,
            experts=experts,
            names=tuple(names),
        )
        for (experts, decays), names in sorted(members.items())
    ]
