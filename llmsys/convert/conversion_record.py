"""Read the records of a conversion: the Hugging Face folder that a run was made from, and the run
of exported weights.

`hugging_face/record.json` has the names, dtypes and shards of that folder. A run folder may come
from a stranger, so the record is checked before anything is written.

Invariants:
- `read_conversion_record` returns only names of safetensors files, and no tensor name twice.
- `list_small_files` returns only regular files of `hugging_face/` itself, never links.
"""

import json
from pathlib import Path
from typing import Any

from llmsys.convert.folders import KEPT, RECORD, UNUSED
from llmsys.convert.safetensors_folder import INDEX, is_shard_name, parse_weight_map
from llmsys.convert.weight_dtype import WIDE
from llmsys.errors import CheckpointError
from llmsys.storage.stored_formats import EXPORT_RECORD, IMPORT_RECORD, VERSION_KEY, require_version
from llmsys.train.checkpoint_record import read_record

NEXT = (
    "Do not trust this run folder, or remove its hugging_face/ folder to convert the weights alone."
)


def read_conversion_record(run_folder: Path) -> dict[str, Any] | None:
    """Return the record of the Hugging Face folder that this run folder was made from; None without
    one.

    Raises:
        CheckpointError: The record is damaged, or names a file outside of its folder.
        FormatError: It has another format version.
    """
    kept = run_folder / KEPT
    if kept.is_symlink():
        raise CheckpointError(f"{kept} is a link, and its target would be copied. {NEXT}")
    file = kept / RECORD
    if not file.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        require_version(IMPORT_RECORD, record, file)
        _check_record(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{file} cannot be used ({said}). {NEXT}") from None
    return record


def _check_record(record: dict[str, Any]) -> None:
    for key in ("names", "copies", "files"):
        for name, value in record[key].items():
            if not isinstance(value, str):
                raise TypeError(f"{key} of {name} is {value!r}, not a name")
    written = [*record["names"].values(), *record["copies"]]
    if len(set(written)) < len(written):
        raise ValueError("two tensors have the same name")
    for name, file in record["files"].items():
        if not is_shard_name(file):
            raise ValueError(
                f"{name} would be written to {file!r}, which is not a safetensors file of the "
                "destination"
            )
    for name, dtype in record.get("dtypes", {}).items():
        if f"torch.{dtype}" not in map(str, WIDE):
            raise ValueError(f"{name} has dtype {dtype!r}, which no weights have")
    if record["index"] is not None and not set(parse_weight_map(record["index"]).values()) <= {
        *record["files"].values()
    }:
        raise ValueError("its index names files that it does not have")
    record["model"]


def list_small_files(run_folder: Path) -> list[Path]:
    """Return the configs, vocabularies and licences that are exported unchanged.

    Raises:
        CheckpointError: One of them is a link or no file, or would replace the weights.
    """
    found = [
        file for file in sorted((run_folder / KEPT).iterdir()) if file.name not in (RECORD, UNUSED)
    ]
    for file in found:
        if file.is_symlink() or not file.is_file():
            raise CheckpointError(
                f"{file} is not a regular file, and its target would be copied. {NEXT}"
            )
        if file.name == INDEX or is_shard_name(file.name):
            raise CheckpointError(f"{file} would replace the weights that are written. {NEXT}")
    return found


def describe_origin(run: str, checkpoint: Path) -> dict[str, Any]:
    """Return the run and step of exported weights, with the parent of the run.

    Args:
        run: Name of the run.
        checkpoint: The checkpoint that is exported, or the last of those that are averaged.

    Returns:
        Values for JSON; empty for a model that was imported and not trained.
    """
    saved = read_record(checkpoint)
    if not saved["steps"]:
        return {}
    known = {key: saved[key] for key in ("state_hash", "parent") if saved.get(key) is not None}
    return {
        VERSION_KEY: EXPORT_RECORD.version,
        "run": run,
        "checkpoint": str(checkpoint),
        "steps": saved["steps"],
        **known,
    }
