"""Compare the settings of a run with those that its checkpoints were trained with.

Imports no torch, so that a difference is said before ranks start.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.errors import CheckpointError
from llmsys.log import get_logger
from llmsys.storage.paths import find_folder_url
from llmsys.train.checkpoint_record import list_checkpoints, read_record

log = get_logger(__name__)

# What a record has of the data: known when they are open.
DATA_IDENTITY = ("data_fingerprint", "tokenizer_fingerprint", "data")

# Next step for a difference, by the prefix of its key.
ADVICE = {
    "data": (
        "The data differ: set data.folder to the original dataset, or prepare it again with "
        "the original config."
    ),
    "tokenizer_fingerprint": (
        "The tokenizer differs, so ids have another meaning: use the tokenizer of the run."
    ),
    "model": "The model differs: restore the model section.",
}


def require_resumable_settings(config: RunConfig) -> None:
    """Compare the settings of a run with those of its newest checkpoint, before any rank starts.

    Data are compared where they are open, and what an unreadable record has is said by the ranks.

    Args:
        config: The config of the run.

    Raises:
        CheckpointError: They differ; the message lists every difference.
    """
    if find_folder_url(config.run.folder) is not None:
        return
    for checkpoint in reversed(list_checkpoints(config.run.folder / "checkpoints").values()):
        try:
            saved = read_record(checkpoint)["run"]
        except (CheckpointError, KeyError):
            continue
        if isinstance(saved.get("train"), dict):  # an imported model has no trajectory
            require_same_settings(checkpoint, *find_comparable_settings(config, saved))
        return


def find_comparable_settings(
    config: RunConfig, saved: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of a checkpoint and of a config as far as both are known without ranks.

    Args:
        config: The config of the run, with a precision that may be `auto`.
        saved: Settings in the record of a checkpoint.

    Returns:
        Both, without the data and without what bitwise mode adds.
    """
    recorded = saved["train"].get("precision")
    if recorded is not None:
        config = config.resolve_precision(recorded)
    left_out = {*DATA_IDENTITY, "bitwise"}
    return _leave_out(saved, left_out), _leave_out(config.trajectory_settings, left_out)


def drop_reproducibility_mode(
    saved: dict[str, Any], now: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let a run continue in the other mode: leave the mode out of both identities, and log the
    change.

    Args:
        saved: The settings of the checkpoint.
        now: The settings of this run.

    Returns:
        Both, without the mode where they differ in it. Bits differ from there on.
    """
    # The key is present in bitwise mode only.
    if ("bitwise" in saved) == ("bitwise" in now):
        return saved, now
    modes = ["fast" if "bitwise" not in one else "bitwise" for one in (saved, now)]
    log.info("until now in %s mode, from now on in %s mode", *modes)
    return _leave_out(saved, {"bitwise"}), _leave_out(now, {"bitwise"})


def _leave_out(settings: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def list_changes(saved: Any, now: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """List the differences between nested settings.

    Args:
        saved: Settings as dictionaries, or a value.
        now: The same, later.
        path: Dotted key of both.

    Returns:
        (dotted key, value in `saved`, value in `now`) of each; None for a key that is missing.
    """
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(saved.keys() | now.keys())
        return [
            entry
            for key in keys
            for entry in list_changes(saved.get(key), now.get(key), f"{path}.{key}".strip("."))
        ]
    return [] if saved == now else [(path, saved, now)]


def format_changes(saved: Any, now: Any) -> list[str]:
    """Return the differences between nested settings as sentences.

    Args:
        saved: Settings as dictionaries.
        now: The same, later.

    Returns:
        Such as `optimizer.learning_rate was 0.001, now 0.002`.
    """
    return [f"{path} was {before}, now {after}" for path, before, after in list_changes(saved, now)]


def require_same_settings(newest: Path, saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare the settings that a checkpoint was trained with and the current ones.

    Args:
        newest: The checkpoint, for the message.
        saved: Its settings.
        now: Those of this run.

    Raises:
        CheckpointError: They differ; the message lists every difference.
    """
    changes = format_changes(saved, now)
    if not changes:
        return
    advice = [
        text for key, text in ADVICE.items() if any(change.startswith(key) for change in changes)
    ]
    raise CheckpointError(
        f"{newest} was trained with other settings: {'; '.join(changes)}. A run folder belongs to "
        f"one trajectory. {''.join(f'{text} ' for text in advice)}Restore the settings, or set "
        "run.folder to a new folder."
    )
