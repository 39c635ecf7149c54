"""Choose the model type of Hugging Face as which a model is exported. `llmsys convert` and every
promise of an export call `choose_export`, so that they cannot differ.

Reads: for a run that continues a Hugging Face folder, its config.json in `hugging_face/` of the
run folder or of the run that it begins with.

Invariants:
- The simplest type that computes the same is chosen: the first in `FAMILIES`.
"""

from dataclasses import dataclass
from typing import Any

from llmsys.config.export.config_json import Candidate, Difference, iter_candidates
from llmsys.config.export.kept_folder import find_run_of_checkpoint, read_kept_config
from llmsys.config.export.plain_model import find_other_pairing, remove_multipliers
from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, format_choices
from llmsys.hugging_face.families import FAMILIES


@dataclass(frozen=True)
class ExportChoice:
    """The model type of an export.

    Attributes:
        values: the config.json, with `model_type` and `architectures`.
        model: the model whose weights are written. It computes the same as the given one, and may
            have no multipliers or another pairing of rotated channels.
        left_out: what only training uses and the config.json cannot express.
    """

    values: dict[str, Any]
    model: ModelConfig
    left_out: tuple[Difference, ...] = ()

    @property
    def model_type(self) -> str:
        """Hugging Face model type."""
        return str(self.values["model_type"])


class NoExportError(ConfigError):
    """No model type can express the model.

    Attributes:
        nearest: the type that lacks least; None where none can be written at all.
        obstacles: what it lacks.
    """

    def __init__(self, message: str, nearest: Candidate | None) -> None:
        """Take the message and the nearest type."""
        super().__init__(message)
        self.nearest = None if nearest is None else nearest.model_type
        self.obstacles = () if nearest is None else nearest.obstacles


def choose_export(
    model: ModelConfig, kept: dict[str, Any] | None = None, model_type: str | None = None
) -> ExportChoice:
    """Choose the model type of an export: that of the folder which a run continues, or the
    simplest one that expresses the model.

    Fields that only training uses (dropout, initialization, weights of balancing losses) may be
    left out.

    Args:
        model: the architecture.
        kept: config.json of the folder that the run continues with the same model. Default: None,
            there is none.
        model_type: the type to write. Default: None, the simplest one whose weights are converted.

    Returns:
        The choice.

    Raises:
        NoExportError: no type, or not this one, can express the model.
        ConfigError: the type is unknown, or a multiplier fits into no weight.
    """
    plain = remove_multipliers(model)
    if kept is not None:
        return ExportChoice(kept, plain)
    if model_type is not None and model_type not in FAMILIES:
        raise ConfigError(
            f"model_type: {model_type!r} is not supported. Known: {', '.join(FAMILIES)}."
        )
    names = [name for name, one in FAMILIES.items() if one.has_weights]
    names = names if model_type is None else [model_type]
    candidates: list[Candidate] = []
    other = find_other_pairing(plain)
    for exported in [plain] if other is None else [plain, other]:
        for candidate in iter_candidates(exported, names):
            if not candidate.obstacles:
                return ExportChoice(candidate.values, exported, candidate.differences)
            candidates.append(candidate)
    nearest = min(candidates, key=_compute_distance, default=None)
    raise NoExportError(_format_refusal(nearest, model_type), nearest)


def _compute_distance(one: Candidate) -> tuple[bool, int]:
    """Return what is smallest for the nearest type; a type of another family is never near."""
    return any(found.key == "family" for found in one.obstacles), len(one.obstacles)


def choose_run_export(run: RunConfig) -> ExportChoice:
    """Choose the model type of a run's export, which may not have begun.

    A run that continues a folder of Hugging Face keeps its type while the model is the same.

    Args:
        run: the config.

    Returns:
        The choice.

    Raises:
        ConfigError: as `choose_export`.
    """
    folders = [run.run.folder]
    if (source := run.train.init_from or run.train.branch_from) is not None:
        folders.append(find_run_of_checkpoint(source))
    kept = (read_kept_config(folder, run.model) for folder in folders)
    return choose_export(run.model, next((one for one in kept if one is not None), None))


@dataclass(frozen=True)
class ExportPromise:
    """The export of a run, as it is known before the run.

    Attributes:
        line: one line for people.
        model_type: the type that `llmsys convert` will write; None where it will refuse.
        nearest: the type that lacks least, where none expresses the model.
        obstacles: what that one lacks.
    """

    line: str
    model_type: str | None = None
    nearest: str | None = None
    obstacles: tuple[Difference, ...] = ()


def build_export_promise(run: RunConfig) -> ExportPromise:
    """Return the model type as which a run will be exported, or what stands against it.

    Args:
        run: the config.

    Returns:
        The promise.
    """
    try:
        choice = choose_run_export(run)
    except NoExportError as error:
        listed = ", ".join(_format_obstacle(one) for one in error.obstacles)
        found = f"; for {error.nearest}, the nearest type: {listed}" if listed else ""
        line = f"does not export to Hugging Face{found}"
        return ExportPromise(line, None, error.nearest, error.obstacles)
    except ConfigError as error:
        return ExportPromise(f"does not export to Hugging Face: {error}")
    line = f"exports to Hugging Face as {choice.model_type}"
    return ExportPromise(line, choice.model_type)


def _format_refusal(nearest: Candidate | None, asked: str | None) -> str:
    head = (
        "No Hugging Face model type can represent this model"
        if asked is None
        else f"{asked} cannot represent this model"
    )
    if nearest is None:
        return f"{head}. Choose another type, or keep the model in llmsys format."
    fields = format_choices([_format_obstacle(one) for one in nearest.obstacles])
    name = f"The nearest is {nearest.model_type}, which" if asked is None else "It"
    return (
        f"{head}. {name} cannot represent {fields}. Change these fields, or keep the model in "
        "llmsys format."
    )


def _format_obstacle(one: Difference) -> str:
    return f"model.{one.key}={_format_value(one.value)} ({_format_value(one.possible)} would do)"


def _format_value(value: Any) -> str:
    """Return a value as it is written in a config; a kind with the fields that it needs."""
    if isinstance(value, dict):
        more = [f"{key}={_format_value(one)}" for key, one in value.items() if key != "kind"]
        return f"{value['kind']} with {' and '.join(more)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value) if isinstance(value, tuple) else value)
