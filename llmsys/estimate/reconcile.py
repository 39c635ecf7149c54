"""Predicted against measured, of runs that wrote both down; and a device profile that has learnt from them.

Reads the `prediction` and `measured` events of run folders; gives a Reconciled for each, and `updated`, the profile
with what its runs took over what the model of time says, so that the next estimate on that device is centred.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmsys.config.load import load_run
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, DataError, LlmsysError
from llmsys.estimate.device import Device, ModelClass, device_names, read_device
from llmsys.estimate.interval import Interval
from llmsys.estimate.parameters import count_parameters
from llmsys.estimate.residual import Residual, class_of, of_runs, residuals
from llmsys.estimate.time import step_time
from llmsys.events import Event, iterate_events

UNKNOWN = "unknown"
OLDER = "It was trained before predictions were written down"


@dataclass(frozen=True)
class Reconciled:
    """One run: the events of its last start that has both, and its config."""

    folder: Path
    config: RunConfig
    prediction: Event
    measured: Event

    @property
    def title(self) -> str:
        """Its name, and when it was measured: what a profile remembers it by."""
        when = datetime.fromtimestamp(self.measured["time"], UTC)
        return f"{self.config.run.name} {when:%Y-%m-%d %H:%M:%S}"

    @property
    def device(self) -> str:
        """The name of the profile that it was predicted with."""
        return str(self.prediction["device"])

    @property
    def seconds(self) -> Interval | None:
        """The predicted time of a step."""
        found = self.prediction["step_seconds"]
        return None if found is None else Interval(**found)

    def modelled_seconds(self, profile: Device) -> float:
        """What the model of time says of this run on `profile`, without a residual."""
        time = step_time(self.config, self.config.fitted_layout(self.prediction["world_size"]), profile)
        return time.seconds.p50 / time.factor

    def as_data(self) -> dict[str, Any]:
        """Plain values with stable keys; a residual is measured over predicted, minus 1."""
        memory, seconds = self.prediction["memory"], self.seconds
        measured = self.measured["step_seconds"]
        time: dict[str, Any] = {"measured": measured, "predicted": None, "why": self.prediction.get("why_no_time")}
        if seconds is not None:
            within = {"residual": measured / seconds.p50 - 1, "within_p10_p90": seconds.covers(measured)}
            time = {"measured": measured, "predicted": seconds.as_data(), **within}
        counted = count_parameters(self.config.model).total
        return {
            "run": str(self.folder),
            "device": self.device,
            "ranks": self.prediction["world_size"],
            "steps": self.measured["steps"],
            "parameters": {"predicted": counted, "built": self.prediction["parameters"]},
            "memory_bytes": {
                "predicted": memory["peak_bytes"],
                "measured": self.measured["peak_bytes"],
                "residual": self.measured["peak_bytes"] / memory["peak_bytes"] - 1,
                "instant": memory["instant"],
                "kind": memory["kind"],
            },
            "step_seconds": time,
        }


def read_reconciled(folder: Path) -> Reconciled:
    """The prediction and the measurement of a run; DataError says what is missing and how to get it."""
    prediction: Event | None = None
    found: tuple[Event, Event] | None = None
    for event in iterate_events(folder / "events.jsonl"):
        if event["event"] == "prediction":
            prediction = event
        elif event["event"] == "measured" and prediction is not None:
            found = prediction, event
    if prediction is None:
        raise DataError(f"{folder} holds no prediction. {OLDER}, or never started: train it with this version.")
    if found is None:
        raise DataError(
            f"{folder} holds no measurement, which a run ends with. Let it reach its end, or stop it kindly."
        )
    return Reconciled(folder, load_run(str(folder / "config.yaml")), *found)


def read_all(folders: Sequence[Path]) -> tuple[list[Reconciled], list[str]]:
    """Every run that can be reconciled, and what keeps the others from it."""
    found: list[Reconciled] = []
    problems: list[str] = []
    for folder in folders:
        try:
            found.append(read_reconciled(folder))
        except LlmsysError as error:
            problems.append(str(error))
    return found, problems


def profile_to_update(file: Path, runs: Sequence[Reconciled]) -> Device:
    """The profile in `file`; where there is no such file, the one that came with llmsys for the device of the runs.

    Raises ConfigError when a run was on another device, or nobody knows on which.
    """
    known = {read_device(name).name: name for name in device_names()}
    if not file.exists() and (name := known.get(runs[0].device)) is None:
        raise ConfigError(
            f"{file} does not exist, and no profile that came with llmsys is of {runs[0].folder}'s device, "
            f"{runs[0].device}. Measure it: llmsys calibrate --output {file}, then train with flops.device={file}."
        )
    profile = read_device(str(file) if file.exists() else str(name))
    for run in runs:
        if run.device != profile.name:
            where = "an unknown device" if run.device == UNKNOWN else run.device
            raise ConfigError(
                f"{run.folder} was predicted for {where}, and {file} describes {profile.name}: what one device takes "
                f"says nothing of another. Train with flops.device={file}, or leave that run out."
            )
    return profile


def updated(profile: Device, runs: Sequence[Reconciled]) -> Device:
    """The profile with the residual of these runs and of those that it remembers, by class of model."""
    found = dict(profile.residual)
    classes: dict[ModelClass, Residual] = {"dense": residuals().dense, "moe": residuals().moe}
    for kind, published in classes.items():
        mine = [run for run in runs if class_of(run.config.model) == kind]
        ratios = {run.title: run.measured["step_seconds"] / run.modelled_seconds(profile) for run in mine}
        if ratios:
            before = found[kind].runs if kind in found else {}
            found[kind] = of_runs(before | ratios, published)
    sources = profile.sources | {"residual": "steps of the runs named there, by llmsys reconcile"}
    return profile.model_copy(update={"residual": found, "sources": sources})
