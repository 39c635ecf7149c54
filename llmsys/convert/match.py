"""What a Hugging Face folder holds beside what a plan needs: every difference is named before anything is read.

Old endings and a left-out prefix are understood; copies of tied tensors and tables that can be computed are set aside;
anything else that is missing, extra or of another shape is refused.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llmsys.convert.plan import ConversionPlan, Shape
from llmsys.convert.rule import FamilyMapping
from llmsys.errors import CheckpointError

NAMED = 5
"""Differences that a message lists; the rest is counted."""


@dataclass(frozen=True)
class TensorMatch:
    """Where to find what the plan needs.

    Attributes:
        names: the plan's name → the name in the file.
        copies: name in the file → the plan's name of the tensor that it must equal.
        unused: names in the file that nobody reads.
    """

    names: dict[str, str]
    copies: dict[str, str]
    unused: tuple[str, ...]


def match_tensors(plan: ConversionPlan, found: Mapping[str, Shape], source: Path) -> TensorMatch:
    """Bring the names of a folder together with the plan's.

    Raises CheckpointError naming each tensor with the shape that it has and the one that it needs.
    """
    needed, copies = plan.their_shapes, plan.copies
    names: dict[str, str] = {}
    same: dict[str, str] = {}
    unused, extra = [], []
    for name in found:
        today = _to_current_name(name, plan.table, needed.keys() | copies.keys())
        if today in needed and today not in names:
            names[today] = name
        elif today in copies:
            same[name] = copies[today]
        elif any(re.search(pattern, name) for pattern in plan.table.ignored):
            unused.append(name)
        else:
            extra.append(name)
    same = {copy: same.get(original, original) for copy, original in same.items()}
    _require_no_differences(source, plan, found, names, same, extra)
    return TensorMatch(names, same, tuple(unused))


def _to_current_name(name: str, table: FamilyMapping, known: set[str]) -> str:
    """The name as the table has it."""
    for old, new in table.aliases.items():
        name = f"{name.removesuffix(old)}{new}" if name.endswith(old) else name
    return name if name in known or f"{table.prefix}{name}" not in known else f"{table.prefix}{name}"


def _require_no_differences(
    source: Path,
    plan: ConversionPlan,
    found: Mapping[str, Shape],
    names: Mapping[str, str],
    copies: Mapping[str, str],
    extra: list[str],
) -> None:
    needed = plan.their_shapes
    lines = [f"{name} {shape} is missing" for name, shape in needed.items() if name not in names]
    lines += [f"{name} {found[name]} is not part of the model" for name in extra]
    wanted = {name: needed[today] for today, name in names.items()}
    wanted |= {copy: needed[original] for copy, original in copies.items() if original in needed}
    lines += [
        f"{name} has shape {found[name]}, the config needs {shape}"
        for name, shape in wanted.items()
        if tuple(found[name]) != shape
    ]
    if lines:
        more = f"\n  … and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
        listed = "".join(f"\n  {line}" for line in lines[:NAMED])
        raise CheckpointError(
            f"the tensors of {source} are not those of its config.json:{listed}{more}\n"
            f"Use the config.json that belongs to these weights, or weights that belong to it."
        )
