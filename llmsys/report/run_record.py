"""Read the record of one run from its folder: config.yaml, environment.json and events.jsonl.

Invariants:
- Events are streamed, and a bounded number of expert loads is kept.
- A missing or broken file becomes a note with the reason and the next step.
"""

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from llmsys.config.loading.config_files import pop_format_version
from llmsys.config.loading.yaml_files import parse_yaml
from llmsys.errors import ConfigError
from llmsys.events import Event, iter_events
from llmsys.storage.stored_formats import RUN_ENVIRONMENT, require_version

CURVES = (
    "tokens",
    "loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "seconds",
    "data_wait_seconds",
    "utilisation",
    "memory_bytes",
)
MISSING = float("nan")

# Maximum number of expert shares on a page, which bounds its size to a few megabytes.
MAX_LOAD_NUMBERS = 200_000


@dataclass
class StepCurves:
    """One column per field of the step events. A value that is absent or not finite is nan."""

    step: "array[float]" = field(default_factory=lambda: array("d"))
    columns: dict[str, "array[float]"] = field(
        default_factory=lambda: {name: array("d") for name in CURVES}
    )

    def append_event(self, event: Event) -> None:
        """Add one step event, and remove earlier events of the same or a later step."""
        self.truncate_after(event["step"] - 1)
        self.step.append(event["step"])
        for name, column in self.columns.items():
            column.append(_to_float(event.get(name)))

    def truncate_after(self, step: float) -> None:
        """Remove the steps later than `step`."""
        while self.step and self.step[-1] > step:
            self.step.pop()
            for column in self.columns.values():
                column.pop()

    def get_last_value(self, name: str) -> float:
        """Return the last value of a column that is a number; nan without one."""
        return next((value for value in reversed(self.columns[name]) if value == value), MISSING)


@dataclass
class ExpertLoadHistory:
    """The balance of experts over a run: extremes of every record, and full loads of a bounded
    number of records.

    A load is an expert's share of its layer's tokens times the number of experts, so that 1 is
    even.
    """

    step: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    busiest: list[float] = field(default_factory=list)
    busiest_mean: list[float] = field(default_factory=list)
    idlest: list[float] = field(default_factory=list)
    whole: dict[int, list[list[float]]] = field(default_factory=dict)
    """Load per layer and expert by position in the lists above."""
    keep_every: int = 1

    def append_event(self, event: Event) -> None:
        """Add one experts event. As full loads grow too many, only every second, fourth, …
        record keeps its own.
        """
        self.truncate_after(event["step"] - 1)
        load_LE = [[share * len(layer) for share in layer] for layer in event["load"] if layer]
        if not load_LE:
            return
        position = len(self.step)
        self.step.append(event["step"])
        self.tokens.append(_to_float(event.get("tokens")))
        self.busiest.append(max(max(layer) for layer in load_LE))
        self.busiest_mean.append(sum(max(layer) for layer in load_LE) / len(load_LE))
        self.idlest.append(min(min(layer) for layer in load_LE))
        if (position - 1) % self.keep_every:
            self.whole.pop(position - 1, None)  # was kept only as the latest
        self.whole[position] = load_LE
        if len(self.whole) > 2 and len(self.whole) * sum(map(len, load_LE)) > MAX_LOAD_NUMBERS:
            self.keep_every *= 2
            self.whole = {
                p: load
                for p, load in self.whole.items()
                if p % self.keep_every == 0 or p == position
            }

    def truncate_after(self, step: float) -> None:
        """Remove the records later than `step`."""
        while self.step and self.step[-1] > step:
            for column in (self.step, self.tokens, self.busiest, self.busiest_mean, self.idlest):
                column.pop()
            self.whole.pop(len(self.step), None)


@dataclass
class RunRecord:
    """The data that a report shows of one run."""

    folder: Path
    name: str
    config_text: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    starts: list[Event] = field(default_factory=list)
    curves: StepCurves = field(default_factory=StepCurves)
    experts: ExpertLoadHistory = field(default_factory=ExpertLoadHistory)
    evaluations: dict[int, Event] = field(default_factory=dict)
    samples: dict[int, Event] = field(default_factory=dict)
    checkpoints: dict[int, Event] = field(default_factory=dict)
    profiles: dict[int, Event] = field(default_factory=dict)
    norms: dict[int, Event] = field(default_factory=dict)
    branch: Event | None = None
    finish: Event | None = None
    last_step: Event | None = None
    prediction: Event | None = None
    measured: Event | None = None
    last_time: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """True where the folder held nothing to report."""
        return not (
            self.config_text
            or self.environment
            or self.starts
            or self.curves.step
            or self.evaluations
        )

    @property
    def last_evaluation(self) -> Event | None:
        """The evaluation of the latest step."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    def get_start_value(self, name: str) -> Any:
        """Return a field of the latest start event; None without one."""
        return self.starts[-1].get(name) if self.starts else None

    def add_event(self, event: Event) -> None:
        """Add one event to the record. An unknown kind is ignored."""
        self.last_time = max(self.last_time, _to_float(event.get("time")))
        kind = event["event"]
        if kind == "start":
            self._add_start(event)
        elif kind == "finish":
            self.finish = event
        elif kind == "branch":
            self.branch = event
        elif kind in ("batch_growth", "budget") and self.starts:
            # fewer, larger steps remain, or as many as the minutes allow
            self.starts[-1] = self.starts[-1] | {"steps": event["steps"]}
        elif kind == "prediction":
            self._set_prediction(event)
        elif kind == "measured":
            self.measured = (
                event
                if float(event["peak_bytes"]) >= 0 and float(event["step_seconds"]) > 0
                else None
            )
        elif not isinstance(event.get("step"), int):
            return
        elif kind == "step":
            self.curves.append_event(event)
            self.last_step = event
        elif kind == "experts":
            self.experts.append_event(event)
        elif kind == "norms":
            self.norms[event["step"]] = event | {
                key: event[key] for key in ("activation", "gradient", "update", "weight")
            }
        elif (table := self._tables.get(kind)) is not None:
            table[event["step"]] = event

    @property
    def _tables(self) -> dict[str, dict[int, Event]]:
        """The tables of events by step, by kind."""
        return {
            "evaluation": self.evaluations,
            "samples": self.samples,
            "checkpoint": self.checkpoints,
            "profile": self.profiles,
            "norms": self.norms,
        }

    def _set_prediction(self, event: Event) -> None:
        """Keep a prediction event; raise KeyError or TypeError where a field is malformed."""
        seconds = event["step_seconds"]
        numbers = [
            event["memory"]["peak_bytes"],
            *([] if seconds is None else [seconds[p] for p in ("p10", "p50", "p90")]),
        ]
        if (
            min(numbers) > 0
            and isinstance(event["memory"]["instant"], str)
            and isinstance(event["device"], str)
        ):
            self.prediction = event

    def _add_start(self, event: Event) -> None:
        """Add a start. A start from step s removes the records of later steps: that part of the
        trajectory was lost.
        """
        self.starts.append(event)
        self.finish = self.prediction = self.measured = None
        step = event.get("resumed_from") or 0
        self.curves.truncate_after(step)
        self.experts.truncate_after(step)
        for table in self._tables.values():
            for later in [key for key in table if key > step]:
                del table[later]


def read_run(folder: Path) -> RunRecord:
    """Read a run folder, complete or not.

    Args:
        folder: The run folder.

    Returns:
        The record; its notes name the missing files, with the reason.
    """
    record = RunRecord(folder, name=folder.name)
    _read_config(record)
    _read_environment(record)
    path = folder / "events.jsonl"
    if not path.is_file():
        record.notes.append(
            f"No events: {path} does not exist. `llmsys train CONFIG` writes it while it runs."
        )
        return record
    damaged = 0
    for event in iter_events(path):
        try:
            record.add_event(event)
        except (TypeError, ValueError, KeyError, AttributeError):
            damaged += 1
    if damaged:
        record.notes.append(
            f"{damaged} events in {path} lack fields of their kind and are omitted."
        )
    record.notes.extend(_iter_missing_notes(record))
    return record


def _read_config(record: RunRecord) -> None:
    path = record.folder / "config.yaml"
    try:
        record.config_text = path.read_text("utf-8", errors="replace")
        config, _ = parse_yaml(record.config_text, str(path))
    except FileNotFoundError:
        record.notes.append(
            f"No configuration: {path} does not exist. `llmsys train CONFIG` writes it when it "
            "starts."
        )
    except ConfigError as error:
        record.notes.append(
            f"{path} is not readable as YAML ({str(error).splitlines()[0]}); shown as text only."
        )
    else:
        record.config = pop_format_version(config, path) if isinstance(config, dict) else {}
        run = record.config.get("run")
        record.name = str(run["name"]) if isinstance(run, dict) and run.get("name") else record.name


def _read_environment(record: RunRecord) -> None:
    path = record.folder / "environment.json"
    try:
        environment = json.loads(path.read_bytes())
    except FileNotFoundError:
        record.notes.append(
            f"No environment: {path} does not exist, so versions and git state are unknown."
        )
    except ValueError as error:
        record.notes.append(f"{path} is not JSON ({error}); versions and git state are unknown.")
    else:
        if isinstance(environment, dict):
            require_version(RUN_ENVIRONMENT, environment, path)
            record.environment = environment


def _iter_missing_notes(record: RunRecord) -> Iterator[str]:
    """Yield notes on parts that are missing, with the reason."""
    steps = record.curves.step
    if not record.starts and not steps:
        yield "The event file is empty: the run has not started yet."
    elif not steps:
        yield "No step has been logged yet (see train.log_every_steps): no curves."
    strange = [
        step
        for step, loss in zip(steps, record.curves.columns["loss"], strict=True)
        if loss != loss
    ]
    if strange:
        shown = ", ".join(f"{step:.0f}" for step in strange[:5]) + (
            ", …" if len(strange) > 5 else ""
        )
        yield (
            f"The loss is missing or not finite in {len(strange)} logged steps ({shown}); omitted "
            "from the curves."
        )
    if steps and not record.evaluations:
        yield "No evaluation yet (evaluation.every_steps; 0 means only at the end): no comparison."
    if steps and not record.experts.step:
        model = record.config.get("model")
        dense = isinstance(model, dict) and not model.get("moe")
        yield (
            "No expert load: the model is dense."
            if dense
            else "No expert load: no `experts` event was logged."
        )
    if steps and not record.samples:
        yield "No samples: no `samples` event was logged (generation.prompts)."


def is_finite(value: object) -> TypeGuard[float]:
    """Return whether a value from an event is a finite number; bool does not count."""
    # bool is a subclass of int
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _to_float(value: object) -> float:
    return (
        float(value) if isinstance(value, int | float) and not isinstance(value, bool) else MISSING
    )
