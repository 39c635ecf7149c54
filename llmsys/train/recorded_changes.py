"""Read what a run has decided from its measurements: the doublings of a batch that grows by the
gradient noise scale, and the budgets that fit its minutes. Needs no torch.

Reads `events.jsonl` and records of checkpoints of runs.
"""

from pathlib import Path
from typing import Any

from llmsys.config.batch_ramp import NoiseRampConfig
from llmsys.config.run import RunConfig
from llmsys.config.train import FittedBudget
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


def set_recorded_changes(config: RunConfig, record: dict[str, Any]) -> RunConfig:
    """Return a config with the doublings and budgets that a checkpoint records.

    Args:
        config: the config of the run, or one with later or earlier changes.
        record: the record of a checkpoint of the run; empty for a run that begins.

    Returns:
        The config itself where nothing changes.
    """
    return set_doublings(set_budgets(config, record), record)


def set_doublings(config: RunConfig, record: dict[str, Any]) -> RunConfig:
    """Return a config with the recorded doublings alone; see `set_recorded_changes`."""
    ramp = config.batch.ramp
    if not isinstance(ramp, NoiseRampConfig) or not is_batch_measured(config):
        return config
    doubled = tuple(record.get("batch_growth", {}).get("doubled_after_steps", ()))
    if doubled == ramp.doubled_after_steps:
        return config
    ramp = ramp.model_copy(update={"doubled_after_steps": doubled})
    return config.model_copy(update={"batch": config.batch.model_copy(update={"ramp": ramp})})


def set_budgets(config: RunConfig, record: dict[str, Any]) -> RunConfig:
    """Return a config with the recorded budgets alone; see `set_recorded_changes`."""
    if not config.train.fit_minutes:
        return config
    found = record.get("budget_fit", {}).get("budgets", ())
    budgets = tuple(FittedBudget.model_validate(one) for one in found)
    if budgets == config.train.fitted_budgets:
        return config
    train = config.train.model_copy(update={"fitted_budgets": budgets})
    return config.model_copy(update={"train": train})


def load_recorded_changes(config: RunConfig) -> RunConfig:
    """Return a config with the doublings and budgets so far of the run in its folder.

    Args:
        config: the config of a run that may have trained.

    Returns:
        The config itself where nothing is measured, or the run has no events.
    """
    path = config.run.folder / "events.jsonl"
    decides = is_batch_measured(config) or config.train.fit_minutes > 0
    if not decides or not path.exists():
        return config
    doubled: list[int] = []
    budgets: list[dict[str, int]] = []
    for event in read_latest_events(path):
        if event["event"] == "batch_growth":
            doubled = event["doubled_after_steps"]
        elif event["event"] == "budget":
            budgets.append({"after_step": event["step"], "tokens": event["tokens"]})
        elif event["event"] == "rewind":
            doubled = [step for step in doubled if step <= event["resumed_from"]]
            budgets = [one for one in budgets if one["after_step"] <= event["resumed_from"]]
    return set_recorded_changes(
        config,
        {
            "batch_growth": {"doubled_after_steps": doubled},
            "budget_fit": {"budgets": budgets},
        },
    )


def read_changes_record(newest: Path | None, parent: dict[str, Any] | None) -> dict[str, Any]:
    """Return the record whose changes a run continues; empty where it begins with its own.

    Args:
        newest: the run's newest checkpoint.
        parent: the record of another run that it begins with, if it has no checkpoint.
    """
    return (parent or {}) if newest is None else read_record(newest)
