"""Predicted against measured as a table for people.

Predicted against measured, of runs that wrote both down; and a device profile that has learnt from
them.

Reads the `prediction` and `measured` events of run folders; gives a Reconciled for each, and
`update_profile`, the profile with what its runs took over what the model of time says, so that the
next estimate on that device is centred.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, DataError, LlmsysError
from llmsys.estimate.device_profile import (
    DeviceProfile,
    ModelClass,
    list_device_names,
    load_device_profile,
)
from llmsys.estimate.memory_timeline import GIB
from llmsys.estimate.model_tensors import count_parameters
from llmsys.estimate.percentile_interval import PercentileInterval
from llmsys.estimate.residual_model import (
    ResidualModel,
    fit_run_residual,
    get_model_class,
    load_residuals,
)
from llmsys.estimate.step_time import estimate_step_time
from llmsys.events import Event, iter_events

RESIDENT = "resident set of the whole process"
"""Kind of memory of a run on a CPU, where nothing counts tensors."""
RESERVED = "reserved by the allocator"
"""Kind of memory of a run on an accelerator."""


def format_run_comparison(run: dict[str, Any]) -> str:
    """Format the comparison of one run; residuals are measured over predicted, minus 1.

    Args:
        run: values of `RunComparison.to_dict`.

    Returns:
        Lines of text.
    """
    ranks = f"{run['ranks']} rank{'s' if run['ranks'] > 1 else ''}"
    head = (
        f"{run['run']}: {run['device']} device"
        if run["device"] == "unknown"
        else f"{run['run']}: {run['device']}"
    )
    rows = [
        _format_parameter_row(run["parameters"]),
        _format_memory_row(run["memory_bytes"]),
        _format_time_row(run["step_seconds"]),
        _format_speed_row(run["tokens_per_second"]),
    ]
    table = [
        f"  {name:<12}{predicted:<34}{measured:<14}{verdict}"
        for name, predicted, measured, verdict in rows
    ]
    titles = f"  {'':<12}{'predicted':<34}{'measured':<14}residual"
    about = f"  {run['memory_bytes']['about']}"
    return "\n".join([f"{head}, {ranks}, {run['steps']} steps", titles, *table, about])


def _format_parameter_row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    difference = found["built"] - found["predicted"]
    verdict = (
        "equal"
        if not difference
        else f"{difference:+,}: the run was predicted for another model than it built"
    )
    return "parameters", f"{found['predicted']:,}", f"{found['built']:,}", verdict


def _format_memory_row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    predicted = f"{format_memory_size(found['predicted'])} {found['instant']}"
    return (
        "memory",
        predicted,
        format_memory_size(found["measured"]),
        f"{found['residual']:+.1%} ({found['kind']})",
    )


def _format_time_row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    measured = f"{found['measured']:.4g} s"
    if found["predicted"] is None:
        return "step", "nothing", measured, str(found["why"])
    interval = found["predicted"]
    within = "within" if found["within_p10_p90"] else "outside of"
    said = f"{interval['p50']:.4g} s ({interval['p10']:.4g} to {interval['p90']:.4g})"
    return "step", said, measured, f"{found['residual']:+.1%}, {within} P10 to P90"


def format_memory_size(count: float) -> str:
    """Format bytes with a binary unit.

    Args:
        count: bytes.

    Returns:
        Text such as `1.50 GiB`.
    """
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def _format_speed_row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    measured = f"{found['measured']:,.0f}"
    if found["predicted"] is None:
        return "tokens/s", "nothing", measured, "of full steps, without waits for data"
    said = found["predicted"]
    predicted = f"{said['p50']:,.0f} ({said['p10']:,.0f} to {said['p90']:,.0f})"
    return "tokens/s", predicted, measured, f"{found['residual']:+.1%}"


def describe_measured_memory(memory: dict[str, Any]) -> str:
    """Say what predicted and measured memory are of, on both sides alike.

    Args:
        memory: `memory` of a `prediction` event.

    Returns:
        Sentences.
    """
    steps = "on the fullest rank, in the steps before the first evaluation or save"
    # Only a CPU's prediction has the process in it.
    if not memory.get("process_bytes"):
        return (
            f"Predicted and measured memory are both what the allocator reserved {steps}. What "
            "driver and NCCL take besides is in neither."
        )
    return (
        f"Predicted and measured memory are both the {RESIDENT} {steps}. Of the predicted bytes "
        f"{format_memory_size(memory['process_bytes'])} are the process as it was before "
        "the first step, without weights and masters. Code and gaps of the heap that first steps "
        "add are in the measured ones alone."
    )


UNKNOWN = "unknown"
OLDER = "It was trained by a version without predictions"
# Fields of the two events.
PREDICTED = (
    *("device", "memory.instant", "memory.kind", "memory.peak_bytes"),
    *("parameters", "step_seconds", "world_size"),
)
MEASURED = ("peak_bytes", "step_seconds", "steps")


@dataclass(frozen=True)
class RunComparison:
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
    def device_name(self) -> str:
        """The name of the profile that it was predicted with."""
        return str(self.prediction["device"])

    @property
    def predicted_seconds(self) -> PercentileInterval | None:
        """The predicted time of a step."""
        found = self.prediction["step_seconds"]
        return None if found is None else PercentileInterval(**found)

    def compute_modelled_seconds(self, profile: DeviceProfile) -> float:
        """Return the modelled seconds per step of this run on `profile`, without a residual."""
        time = estimate_step_time(
            self.config, self.config.resolve_layout(self.prediction["world_size"]), profile
        )
        # a residual is fitted to the model without the residual of earlier runs
        return time.seconds.p50 / time.factor

    def to_dict(self) -> dict[str, Any]:
        """Plain values with stable keys; a residual is measured over predicted, minus 1."""
        memory, seconds = self.prediction["memory"], self.predicted_seconds
        measured = self.measured["step_seconds"]
        time: dict[str, Any] = {
            "measured": measured,
            "predicted": None,
            "why": self.prediction.get("why_no_time"),
        }
        if seconds is not None:
            within = {
                "residual": measured / seconds.p50 - 1,
                "within_p10_p90": seconds.contains(measured),
            }
            time = {"measured": measured, "predicted": seconds.model_dump(), **within}
        counted = count_parameters(self.config.model).total
        tokens = self.config.batch.tokens_per_step
        speed: dict[str, Any] = {"measured": tokens / measured, "predicted": None}
        if seconds is not None:
            # Slow steps are few tokens: the ends of the interval change places.
            ends = {"p10": seconds.p90, "p50": seconds.p50, "p90": seconds.p10}
            speed["predicted"] = {name: tokens / one for name, one in ends.items()}
            speed["residual"] = seconds.p50 / measured - 1
        return {
            "run": str(self.folder),
            "device": self.device_name,
            "ranks": self.prediction["world_size"],
            "steps": self.measured["steps"],
            "parameters": {"predicted": counted, "built": self.prediction["parameters"]},
            "memory_bytes": {
                "predicted": memory["peak_bytes"],
                "measured": self.measured["peak_bytes"],
                "residual": self.measured["peak_bytes"] / memory["peak_bytes"] - 1,
                "instant": memory["instant"],
                "kind": memory["kind"],
                "process_bytes": memory.get("process_bytes", 0),
                "about": describe_measured_memory(memory),
            },
            "step_seconds": time,
            "tokens_per_second": speed,
        }


def load_run_comparison(folder: Path) -> RunComparison:
    """The prediction and the measurement of a run; DataError says what is missing and how to get
    it.
    """
    prediction: Event | None = None
    found: tuple[Event, Event] | None = None
    for event in iter_events(folder / "events.jsonl"):
        # each start predicts anew, so a measurement belongs to the prediction before it
        if event["event"] == "prediction":
            prediction = event
        elif event["event"] == "measured" and prediction is not None:
            found = prediction, event
    if prediction is None:
        raise DataError(
            f"{folder} has no prediction. {OLDER}, or never started: train it with this version."
        )
    if found is None:
        raise DataError(
            f"{folder} has no measurement, which is written at the end of a run. Let it finish, "
            "or stop it with SIGTERM."
        )
    for event, names in zip(found, (PREDICTED, MEASURED), strict=True):
        if missing := [name for name in names if not _has_field(event, name)]:
            raise DataError(
                f"{folder}/events.jsonl: the {event['event']} event has no "
                f"{' and no '.join(missing)}. Another version or program wrote it: train the run "
                "with this version."
            )
    return RunComparison(folder, load_run_config(str(folder / "config.yaml")), *found)


def _has_field(event: Event, name: str) -> bool:
    value: Any = event
    for key in name.split("."):
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def load_run_comparisons(folders: Sequence[Path]) -> tuple[list[RunComparison], list[str]]:
    """Load every run that can be compared with its prediction.

    Args:
        folders: run folders.

    Returns:
        The comparisons, and for each other run the reason why it has none.
    """
    found: list[RunComparison] = []
    problems: list[str] = []
    for folder in folders:
        try:
            found.append(load_run_comparison(folder))
        except LlmsysError as error:
            problems.append(str(error))
    return found, problems


def load_profile_to_update(file: Path, runs: Sequence[RunComparison]) -> DeviceProfile:
    """Load the profile that the runs update.

    Args:
        file: profile to write; where it is missing, the shipped one of the runs' device is copied.
        runs: comparisons on one device.

    Returns:
        The profile before the update.

    Raises:
        ConfigError: a run was on another device, or its device is unknown.
    """
    known = {load_device_profile(name).name: name for name in list_device_names()}
    if not file.exists() and (name := known.get(runs[0].device_name)) is None:
        raise ConfigError(
            f"{file} does not exist, and llmsys has no profile of {runs[0].folder}'s device, "
            f"{runs[0].device_name}. Measure it: llmsys calibrate --output {file}, then train with "
            f"flops.device={file}."
        )
    profile = load_device_profile(str(file) if file.exists() else str(name))
    for run in runs:
        if run.device_name != profile.name:
            where = "an unknown device" if run.device_name == UNKNOWN else run.device_name
            raise ConfigError(
                f"{run.folder} was predicted for {where}, and {file} describes {profile.name}: "
                f"times of one device do not transfer to another. Train with flops.device={file}, "
                "or omit that run."
            )
    return profile


def update_profile(profile: DeviceProfile, runs: Sequence[RunComparison]) -> DeviceProfile:
    """Fit the residuals of a profile to runs, by class of model.

    Args:
        profile: profile of the runs' device; earlier runs in it count too.
        runs: comparisons on one device.

    Returns:
        The profile with new residuals.
    """
    found = dict(profile.residual)
    classes: dict[ModelClass, ResidualModel] = {
        "dense": load_residuals().dense,
        "moe": load_residuals().moe,
    }
    for kind, published in classes.items():
        mine = [run for run in runs if get_model_class(run.config.model) == kind]
        ratios = {
            run.title: run.measured["step_seconds"] / run.compute_modelled_seconds(profile)
            for run in mine
        }
        if ratios:
            before = found[kind].runs if kind in found else {}
            found[kind] = fit_run_residual(before | ratios, published)
    sources = profile.sources | {"residual": "steps of the runs named there, by llmsys reconcile"}
    return profile.model_copy(update={"residual": found, "sources": sources})
