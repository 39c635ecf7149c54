"""TensorBoard and Weights & Biases beside events.jsonl, through accelerate's trackers. Off unless the config asks."""

from typing import Any

from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError


class Trackers:
    """The services that the config names; none is the usual case. Lives on rank 0."""

    def __init__(self, config: RunConfig) -> None:
        self._trackers: list[Any] = []
        settings = config.model_dump(mode="json")
        if config.tracking.tensorboard:
            tracker = _tracker("TensorBoardTracker", "tensorboard")(config.run.name, config.run.folder / "tensorboard")
            self._trackers.append(tracker)
        if config.tracking.wandb:
            tracker = _tracker("WandBTracker", "wandb")(config.tracking.project, name=config.run.name)
            tracker.store_init_configuration(settings)
            self._trackers.append(tracker)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Send the numbers of one step."""
        for tracker in self._trackers:
            tracker.log(values, step=step)

    def finish(self) -> None:
        """Flush and close."""
        for tracker in self._trackers:
            tracker.finish()


def _tracker(name: str, package: str) -> Any:
    import accelerate.tracking
    from accelerate.utils.imports import _is_package_available

    if not _is_package_available(package):
        raise ConfigError(
            f"tracking.{package}=true needs the package {package}, which is not installed. "
            f"Run `pip install {package}` or set tracking.{package}=false."
        )
    return getattr(accelerate.tracking, name)
