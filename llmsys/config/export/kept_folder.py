"""The small files of the Hugging Face folder that a run was made from, or continues.

Reads: `hugging_face/` of a run folder.
"""

import json
from pathlib import Path
from typing import Any

from llmsys.config.model import ModelConfig

HUGGING_FACE, IMPORT_RECORD_NAME = "hugging_face", "record.json"


def has_kept_model(run_folder: Path, model: ModelConfig) -> bool:
    """Return whether a run was made from a Hugging Face folder of the same model.

    Args:
        run_folder: a run folder, which may be missing.
        model: the model that is compared.

    Returns:
        False too where the record is damaged: that is an error where its run is exported.
    """
    folder = run_folder / HUGGING_FACE
    if folder.is_symlink() or not (folder / IMPORT_RECORD_NAME).is_file():
        return False
    try:
        record = json.loads((folder / IMPORT_RECORD_NAME).read_text(encoding="utf-8"))
        return bool(record["model"] == model.model_dump(mode="json"))
    except (ValueError, KeyError, TypeError, OSError):
        return False


def read_kept_config(run_folder: Path, model: ModelConfig) -> dict[str, Any] | None:
    """Return the config.json of the folder that a run was made from.

    Args:
        run_folder: a run folder, which may be missing.
        model: the model of the run.

    Returns:
        None where there is none, its model was another one, or it is damaged.
    """
    if not has_kept_model(run_folder, model):
        return None
    try:
        file = run_folder / HUGGING_FACE / "config.json"
        values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8-sig"))
        return values if isinstance(values["model_type"], str) else None
    except (ValueError, KeyError, TypeError, OSError):
        return None


def find_run_of_checkpoint(source: Path) -> Path:
    """Return the run folder of what `train.init_from` names.

    Args:
        source: a run folder, RUN@STEP, or the folder of a checkpoint.

    Returns:
        A path, which may be missing.
    """
    if source.parent.name == "checkpoints" and source.exists():
        return source.parent.parent
    folder, _, step = str(source).rpartition("@")
    return Path(folder) if folder and step.isdigit() and not source.exists() else source
