"""What a family's table is made of: which tensor of ours is which of theirs, and what a file may hold besides.

Names carry `{i}` for the block, `{n}` for the block that a prediction module counts as, and `{e}` for the expert where
theirs are one by one and ours are stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmsys.convert.tensor_transform import Identity, TensorTransform

SAME = Identity()


@dataclass(frozen=True)
class NameMapping:
    """The tensors `ours` hold the same numbers as the tensors `theirs`, laid out by `form`."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: TensorTransform = SAME


@dataclass(frozen=True)
class FamilyMapping:
    """All of one family.

    Attributes:
        rules: used where our model has the tensors; the config decides, so a table may name more than a model has.
        prefix: what files of the bare model leave out of every name.
        copies: their name → the name whose values it repeats when weights are tied.
        ignored: patterns of what old files hold and nobody reads: tables that can be computed.
        aliases: old endings of names → today's.
    """

    rules: tuple[NameMapping, ...]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


def map_modules(names: Mapping[str, str], form: TensorTransform = SAME) -> tuple[NameMapping, ...]:
    """Rules for the weight and the bias of each module, ours → theirs."""
    return tuple(
        NameMapping((f"{ours}.{kind}",), (f"{theirs}.{kind}",), form)
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    )


def map_fused_module(ours: tuple[str, ...], theirs: str, form: TensorTransform) -> tuple[NameMapping, ...]:
    """Rules for the weight and the bias of one module of theirs that holds several of ours."""
    return tuple(
        NameMapping(tuple(f"{one}.{kind}" for one in ours), (f"{theirs}.{kind}",), form) for kind in ("weight", "bias")
    )


def map_tensors(names: Mapping[str, str], form: TensorTransform = SAME) -> tuple[NameMapping, ...]:
    """Rules for single tensors, ours → theirs."""
    return tuple(NameMapping((ours,), (theirs,), form) for ours, theirs in names.items())
