"""List the tensors that a conversion would map, for `llmsys convert --dry-run`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llmsys.convert.conversion_plan import ConversionPlan, TensorGroup, TensorPart
from llmsys.convert.from_hugging_face import HuggingFaceImport
from llmsys.convert.to_hugging_face import HuggingFaceExport


def list_conversions(source: Path, inwards: bool, shard_bytes: int | None) -> list[dict[str, Any]]:
    """List the mapping of a conversion, and write nothing.

    Args:
        source: Hugging Face folder, run folder or checkpoint.
        inwards: True to import a Hugging Face folder, False to export a run.
        shard_bytes: Size limit of exported files; None as in `convert_to_hugging_face`.

    Returns:
        One row per group of tensors: {theirs, ours, dtype}, names with shapes.

    Raises:
        ConfigError, CheckpointError: As the conversion would.
    """
    if inwards:
        reading = HuggingFaceImport(source)
        dtypes = dict(reading.list_tensors())
        rows = _list_rows(
            reading.plan, lambda name: reading.match.names[name], lambda part: dtypes[part]
        )
        rows += [
            _format_row([copy], [f"the same as {original}"])
            for copy, original in reading.match.copies.items()
        ]
        return rows + [_format_row([name], ["not read"]) for name in reading.match.unused]
    writing = HuggingFaceExport(source, shard_bytes)
    return _list_rows(
        writing.plan,
        lambda name: (
            f"{writing.files[writing.get_written_name(name)]}: {writing.get_written_name(name)}"
        ),
        lambda part: writing.reader.dtypes[part.name],
    )


def _list_rows(
    plan: ConversionPlan, named: Callable[[str], str], dtype_of: Callable[[TensorPart], torch.dtype]
) -> list[dict[str, Any]]:
    def build_row(group: TensorGroup) -> dict[str, Any]:
        theirs = [
            f"{named(name)} {shape}"
            for name, shape in zip(group.theirs, group.their_shapes, strict=True)
        ]
        return _format_row(
            theirs, [_format_part(part) for part in group.ours], dtype_of(group.ours[0])
        )

    rows = [build_row(group) for group in plan.groups]
    return rows + [_format_row(["nothing"], [_format_part(part)]) for part in plan.unknown_there]


def _format_row(
    theirs: list[str], ours: list[str], dtype: torch.dtype | None = None
) -> dict[str, Any]:
    return {
        "theirs": theirs,
        "ours": ours,
        "dtype": "" if dtype is None else str(dtype).removeprefix("torch."),
    }


def _format_part(part: TensorPart) -> str:
    return (
        f"{part.name} {part.shape}"
        if part.expert is None
        else f"{part.name}[{part.expert}] {part.part_shape}"
    )
