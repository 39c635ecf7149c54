"""What a conversion would do, as a list: `llmsys convert --dry-run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmsys.convert.from_hugging_face import Reading
from llmsys.convert.plan import Group, Part, Plan
from llmsys.convert.to_hugging_face import Writing


def listing(source: Path, inwards: bool, shard_bytes: int | None) -> list[dict[str, Any]]:
    """One row for each group of tensors: {theirs, ours, dtype}, names with shapes. Raises what a conversion would."""
    if inwards:
        reading = Reading(source)
        dtypes = dict(reading.pieces())
        rows = _rows(reading.plan, lambda name: reading.match.names[name], lambda part: dtypes[part])
        rows += [_row([copy], [f"the same as {original}"]) for copy, original in reading.match.copies.items()]
        return rows + [_row([name], ["not read"]) for name in reading.match.unused]
    writing = Writing(source, shard_bytes)
    return _rows(
        writing.plan,
        lambda name: f"{writing.files[writing.name(name)]}: {writing.name(name)}",
        lambda part: writing.reader.dtypes[part.name],
    )


def _rows(plan: Plan, named: Callable[[str], str], dtype_of: Callable[[Part], torch.dtype]) -> list[dict[str, Any]]:
    def row(group: Group) -> dict[str, Any]:
        theirs = [f"{named(name)} {shape}" for name, shape in zip(group.theirs, group.their_shapes, strict=True)]
        return _row(theirs, [_title(part) for part in group.ours], dtype_of(group.ours[0]))

    rows = [row(group) for group in plan.groups]
    return rows + [_row(["nothing"], [_title(part)]) for part in plan.unknown_there]


def _row(theirs: list[str], ours: list[str], dtype: torch.dtype | None = None) -> dict[str, Any]:
    return {"theirs": theirs, "ours": ours, "dtype": "" if dtype is None else str(dtype).removeprefix("torch.")}


def _title(part: Part) -> str:
    return f"{part.name} {part.shape}" if part.expert is None else f"{part.name}[{part.expert}] {part.own_shape}"
