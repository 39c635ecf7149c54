"""Log the metrics of a run to events.jsonl, and to TensorBoard, Weights & Biases or MLflow by
accelerate's trackers.

Writes on rank 0 alone. All trackers are off by default.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.events import EventWriter
from llmsys.log import get_logger, redact_values
from llmsys.train.checkpoint_saver import SaveResult


class Trackers:
    """The experiment trackers of `tracking`, usually none. Exists on rank 0."""

    def __init__(self, config: RunConfig) -> None:
        self._trackers: list[Any] = []
        if config.tracking.tensorboard:
            tracker = _load_tracker_class("TensorBoardTracker", "tensorboard")(
                config.run.name, config.run.folder / "tensorboard"
            )
            self._trackers.append(tracker)
        if config.tracking.wandb:
            tracker = _load_tracker_class("WandBTracker", "wandb")(
                config.tracking.project, name=config.run.name, dir=str(config.run.folder)
            )
            self._trackers.append(tracker)
        if config.tracking.mlflow:
            folder = config.run.folder.resolve()
            os.environ.setdefault(
                "MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}"
            )  # MLflow keeps no files now
            tracker = _load_tracker_class("MLflowTracker", "mlflow")(
                config.tracking.project,
                logging_dir=str(folder / "mlruns"),
                run_name=config.run.name,
            )
            self._trackers.append(tracker)
        for tracker in self._trackers:
            _start_tracker(tracker)
            tracker.store_init_configuration(
                _flatten_settings(redact_values(config.model_dump(mode="json")))
            )

    def log_step(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of one step."""
        for tracker in self._trackers:
            tracker.log(values, step=step)

    def finish(self) -> None:
        """Flush and close."""
        for tracker in self._trackers:
            tracker.finish()


def _start_tracker(tracker: Any) -> None:
    try:
        tracker.start()
    except Exception as error:  # services fail with their own errors: no key, no network
        raise ConfigError(
            f"tracking.{tracker.name}=true, but it failed to start: {str(error).rstrip('.')}. Fix "
            f"this, or set tracking.{tracker.name}=false."
        ) from error


def _flatten_settings(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings with dotted keys, such as `{"model.hidden_size": 256}`, as numbers
    and texts.
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flatten_settings(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = (
                value if isinstance(value, bool | int | float | str) else str(value)
            )
    return flat


def _iter_numbers(fields: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested fields by name, such as `norms/gradient/blocks.0`."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _iter_numbers(value, f"{prefix}/{key}")
        elif isinstance(value, int | float):
            yield f"{prefix}/{key}", float(value)


def _load_tracker_class(name: str, package: str) -> Any:
    # Imported here: accelerate is slow to import, and trackers are off by default.
    import accelerate.tracking
    import torch
    from accelerate.state import PartialState

    if find_spec(package) is None:
        raise ConfigError(
            f"tracking.{package}=true needs the package {package}, which is not installed. "
            f"Run `pip install {package}` or set tracking.{package}=false."
        )
    PartialState(cpu=not torch.cuda.is_available())  # the trackers ask it for the rank
    return getattr(accelerate.tracking, name)


log = get_logger(__name__)


@dataclass
class MetricLogger:
    """A logger of events and metrics. On ranks other than 0 it writes nothing."""

    events: EventWriter | None
    trackers: Trackers | None

    def log_event(self, event: str, step: int, **fields: Any) -> None:
        """Write one event to events.jsonl, and send its numbers to the trackers.

        Args:
            event: Its kind.
            step: The step, counted from 1.
            fields: Its fields.
        """
        if self.events is None:
            return
        self.events.write(event, step=step, **fields)
        if self.trackers is not None:
            self.trackers.log_step(step, dict(_iter_numbers(fields, event)))

    def log_save(self, save: SaveResult) -> None:
        """Log the result of a save: a `checkpoint` event, or `save_failed` with the reason."""
        times = {"seconds": save.seconds, "stalled_seconds": save.stalled_seconds}
        if save.failure is None:
            self.log_event("checkpoint", save.steps, folder=str(save.folder), **times)
        elif self.events is not None:
            log.warning("%s The run continues; it ends if the next save fails too.", save.failure)
            self.log_event("save_failed", save.steps, reason=str(save.failure), **times)
