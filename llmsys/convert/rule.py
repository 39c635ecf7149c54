"""What a family's table is made of: which tensor of ours is which of theirs, and what a file may hold besides.

Names carry `{i}` for the block, `{n}` for the block that a prediction module counts as, and `{e}` for the expert where
theirs are one by one and ours are stacked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llmsys.convert.form import Form, Same

SAME = Same()


@dataclass(frozen=True)
class Rule:
    """The tensors `ours` hold the same numbers as the tensors `theirs`, laid out by `form`."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: Form = SAME


@dataclass(frozen=True)
class Table:
    """All of one family.

    Attributes:
        rules: used where our model has the tensors; the config decides, so a table may name more than a model has.
        prefix: what files of the bare model leave out of every name.
        copies: their name → the name whose values it repeats when weights are tied.
        ignored: patterns of what old files hold and nobody reads: tables that can be computed.
        aliases: old endings of names → today's.
    """

    rules: tuple[Rule, ...]
    prefix: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)


def modules(names: Mapping[str, str], form: Form = SAME) -> tuple[Rule, ...]:
    """Rules for the weight and the bias of each module, ours → theirs."""
    return tuple(
        Rule((f"{ours}.{kind}",), (f"{theirs}.{kind}",), form)
        for ours, theirs in names.items()
        for kind in ("weight", "bias")
    )


def fused(ours: tuple[str, ...], theirs: str, form: Form) -> tuple[Rule, ...]:
    """Rules for the weight and the bias of one module of theirs that holds several of ours."""
    return tuple(
        Rule(tuple(f"{one}.{kind}" for one in ours), (f"{theirs}.{kind}",), form) for kind in ("weight", "bias")
    )


def tensors(names: Mapping[str, str], form: Form = SAME) -> tuple[Rule, ...]:
    """Rules for single tensors, ours → theirs."""
    return tuple(Rule((ours,), (theirs,), form) for ours, theirs in names.items())
