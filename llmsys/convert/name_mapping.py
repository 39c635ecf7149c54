"""Types of a family's name mapping: pairs of our tensors and theirs, and other tensors that a file may hold.

Names contain `{i}` for the block, `{n}` for the block number of a prediction module, and `{e}` for the expert where
theirs are separate and ours are stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmsys.convert.tensor_transform import Identity, TensorTransform

SAME = Identity()


@dataclass(frozen=True)
class NameMapping:
    """A pair of tensor lists, `ours` and `theirs`, that hold the same numbers, converted by `form`."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: TensorTransform = SAME


@dataclass(frozen=True)
class FamilyMapping:
    """The name mapping of one family.

    Attributes:
        rules: used where our model has the tensors; the config decides, so a mapping may name more than a model has.
        prefix: left out of every name in files of the bare model.
        copies: their name → the name whose values it repeats when weights are tied.
        ignored: patterns of tensors in old files that nothing reads, because they can be computed.
        aliases: old endings of names → current ones.
    """

    rules: tuple[NameMapping, ...]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


def map_modules(names: Mapping[str, str], form: TensorTransform = SAME) -> tuple[NameMapping, ...]:
    """Return mappings of the weight and the bias of each module, ours → theirs."""
    return tuple(
        NameMapping((f"{ours}.{kind}",), (f"{theirs}.{kind}",), form)
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    )


def map_fused_module(ours: tuple[str, ...], theirs: str, form: TensorTransform) -> tuple[NameMapping, ...]:
    """Return mappings of the weight and the bias of one module of theirs that holds several of ours."""
    return tuple(
        NameMapping(tuple(f"{one}.{kind}" for one in ours), (f"{theirs}.{kind}",), form) for kind in ("weight", "bias")
    )


def map_tensors(names: Mapping[str, str], form: TensorTransform = SAME) -> tuple[NameMapping, ...]:
    """Return mappings of single tensors, ours → theirs."""
    return tuple(NameMapping((ours,), (theirs,), form) for ours, theirs in names.items())
