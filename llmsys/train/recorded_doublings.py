"""The doublings that a run has recorded, of a batch that grows by the gradient noise scale. Needs
no torch.

Reads `events.jsonl` and records of checkpoints of runs.
"""

from pathlib import Path
from typing import Any

from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.run import RunConfig
from llmsys.events import read_latest_events
from llmsys.train.checkpoint_record import read_record


def is_batch_measured(config: RunConfig) -> bool:
    """Return whether the noise scale decides the size of steps.

    Args:
        config: the config of a run.

    Returns:
        False where the sizes of all steps follow from the config, also of doublings that it gives.
    """
    return (
        isinstance(config.batch.ramp, NoiseRampConfig) and config.train.noise_scale_every_steps > 0
    )


def set_doublings(config: RunConfig, record: dict[str, Any]) -> RunConfig:
    """Return a config with the doublings that a checkpoint records.

    Args:
        config: the config of the run, or one with later or earlier doublings.
        record: the record of a checkpoint of the run; empty for a run that begins.

    Returns:
        The config itself where nothing changes.
    """
    ramp = config.batch.ramp
    if not isinstance(ramp, NoiseRampConfig) or not is_batch_measured(config):
        return config
    doubled = tuple(record.get("batch_growth", {}).get("doubled_after_steps", ()))
    if doubled == ramp.doubled_after_steps:
        return config
    ramp = ramp.model_copy(update={"doubled_after_steps": doubled})
    return config.model_copy(update={"batch": config.batch.model_copy(update={"ramp": ramp})})


def load_doublings(config: RunConfig) -> RunConfig:
    """Return a config with the doublings so far of the run in its folder.

    Args:
        config: the config of a run that may have trained.

    Returns:
        The config itself where nothing is measured, or the run has no events.
    """
    path = config.run.folder / "events.jsonl"
    if not is_batch_measured(config) or not path.exists():
        return config
    doubled: list[int] = []
    for event in read_latest_events(path):
        if event["event"] == "batch_growth":
            doubled = event["doubled_after_steps"]
        elif event["event"] == "rewind":
            doubled = [step for step in doubled if step <= event["resumed_from"]]
    return set_doublings(config, {"batch_growth": {"doubled_after_steps": doubled}})


def read_growth_record(newest: Path | None, parent: dict[str, Any] | None) -> dict[str, Any]:
    """Return the record whose doublings of the batch a run continues; empty where it begins with
    its own.

    Args:
        newest: the run's newest checkpoint.
        parent: the record of another run that it begins with, if it has no checkpoint.
    """
    return (parent or {}) if newest is None else read_record(newest)
