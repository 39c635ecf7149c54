"""Reject a config that cannot train, before any rank starts and imports torch.

Reads the config and the manifests of its datasets.
"""

import os
import shlex
from collections.abc import Sequence
from importlib.util import find_spec

from llmsys.config.bitwise_constraints import list_micro_batch_counts, require_ranks
from llmsys.config.data import list_dataset_folders
from llmsys.config.export.kept_folder import find_run_of_checkpoint
from llmsys.config.loading.trusted_run import require_trusted_run
from llmsys.config.optimizer import PythonOptimizerConfig
from llmsys.config.run import RunConfig
from llmsys.config.schedule import PythonScheduleConfig
from llmsys.data.step_plan import RunPlan
from llmsys.dataset.manifest import MANIFEST_NAME, load_manifest
from llmsys.dataset.remote_dataset import is_prepared
from llmsys.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    build_missing_package_error,
)
from llmsys.estimate.device_profile import load_device_profile
from llmsys.events import require_events
from llmsys.optim.lr_schedule import load_python_schedule
from llmsys.storage.paths import find_folder_url, format_folder
from llmsys.train.checkpoint_record import RECORD, build_missing_error, list_checkpoints
from llmsys.train.run_settings import require_resumable_settings


def require_layout(config: RunConfig, ranks: int) -> None:
    """Check that the ranks can share the model and the steps.

    Args:
        config: The run.
        ranks: Number of processes.

    Raises:
        LayoutError: The axes do not divide the ranks.
        UntrustedCodeError: The user has not consented to code of the config.
        ConfigError: The batch does not divide over the data-parallel ranks.
    """
    require_trusted_run(config, "training")
    # before any rank trains to the step that needs it
    if isinstance(config.schedule, PythonScheduleConfig):
        load_python_schedule(config.schedule).compute_multiplier(
            config.train.tokens, config.train.tokens
        )
    if isinstance(config.optimizer, PythonOptimizerConfig):
        from llmsys.optim.python_optimizer import load_python_optimizer

        load_python_optimizer(config.optimizer)
    if config.evaluation.metrics:
        from llmsys.train.python_metric import load_python_metrics

        load_python_metrics(config.evaluation.metrics, config.model.vocab_size)
    layout = config.resolve_layout(ranks)
    windows = config.objective.uses_windows
    if config.train.reproducibility == "bitwise":
        require_ranks(
            layout.data_parallel_size, list_micro_batch_counts(config.batch, windows=windows)
        )
    elif windows:
        RunPlan(config.batch, layout.data_parallel_size, 0)


def require_packages(config: RunConfig) -> None:
    """Check that what ranks import is installed.

    Args:
        config: The run.

    Raises:
        ConfigError: A package is missing, with the command that installs it.
    """
    trackers = config.tracking.wandb or config.tracking.tensorboard or config.tracking.mlflow
    needed = {
        "torch": True,
        "safetensors": True,
        "deepspeed": config.engine.kind == "deepspeed",
        "accelerate": config.engine.kind == "accelerate" or trackers,
    }
    for package, is_needed in needed.items():
        if is_needed and find_spec(package) is None:
            raise build_missing_package_error(package)


def require_startable(config: RunConfig, words: Sequence[str]) -> None:
    """Check what ranks would find seconds later: packages, device profile, run folder, initial
    weights, the settings of the checkpoint that the run would continue, and the tokenizer.

    Args:
        config: The run.
        words: CONFIG and overrides as they were given, for the commands that messages suggest.

    Raises:
        ConfigError, DataError, CheckpointError: One of them does not fit. Missing datasets are
            said by `require_datasets`.
    """
    require_packages(config)
    if config.flops.device is not None:
        load_device_profile(config.flops.device)
    require_run_folder(config)
    require_initial_weights(config)
    require_resumable_settings(config)
    require_own_tokenizer(config, words)


def require_run_folder(config: RunConfig) -> None:
    """Check that the run folder can be written. A remote one is not checked.

    Args:
        config: The run.

    Raises:
        DataError: It is a file or below one, belongs to a dataset, or may not be written.
    """
    folder = config.run.folder
    if find_folder_url(folder) is not None:
        return
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise DataError(
            f"run.folder={folder}: {existing} is a file, not a folder. Set run.folder to another "
            "folder."
        )
    if (folder / MANIFEST_NAME).is_file():
        raise DataError(
            f"run.folder={folder} is a dataset folder ({MANIFEST_NAME}). Set run.folder to a "
            "folder of its own."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise DataError(
            f"run.folder={folder}: {existing} may not be written. Set run.folder to another "
            "folder, or change its permissions."
        )


def require_initial_weights(config: RunConfig) -> None:
    """Check that what a new run begins with has a checkpoint. A remote one is not checked.

    Args:
        config: The run.

    Raises:
        CheckpointError: `train.init_from` names no run and no checkpoint.
    """
    source = config.train.init_from
    if source is None or find_folder_url(source) is not None:
        return
    # A run that has begun reads its own checkpoint, and may outlive what it began with.
    is_remote = find_folder_url(config.run.folder) is not None
    if is_remote or list_checkpoints(config.run.folder / "checkpoints"):
        return
    folder = find_run_of_checkpoint(source)
    if list_checkpoints(folder / "checkpoints") or (source / RECORD).is_file():
        return
    if (folder / "config.json").is_file():
        raise CheckpointError(
            f"train.init_from={source} is a Hugging Face folder, not a run. Run llmsys convert "
            f"{source} RUN, and set train.init_from=RUN."
        )
    held = "has no checkpoint" if folder.is_dir() else "does not exist"
    raise CheckpointError(
        f"train.init_from={source}: {folder} {held}. Give a run folder, RUN@STEP or the folder of "
        "a checkpoint."
    )


def require_own_tokenizer(config: RunConfig, words: Sequence[str]) -> None:
    """Check that a tokenizer whose settings are given is the one that the dataset has: a run takes
    that of the dataset, whatever its config says.

    Args:
        config: The run.
        words: CONFIG and overrides as they were given.

    Raises:
        ConfigError: A setting that is given differs from that of the dataset.
    """
    folders = list_dataset_folders(config.data)
    if len(folders) != 1 or find_folder_url(folders[0]) or not is_prepared(folders[0]):
        return
    made = load_manifest(folders[0]).config.get("tokenizer") or {}
    given = config.tokenizer.model_dump(mode="json")
    if made.get("kind") != given["kind"]:  # a kind that nobody gave is the default
        return
    for name in sorted(config.tokenizer.model_fields_set - {"kind", "path"}):
        if name in made and made[name] != given[name]:
            raise ConfigError(
                f"tokenizer.{name}={given[name]}, but {format_folder(folders[0])} was prepared "
                f"with {made[name]}, and a run has the tokenizer of its dataset. Set "
                f"tokenizer.{name}={made[name]}, or prepare another dataset: llmsys prepare "
                f"{shlex.join(words)} data.folder=FOLDER"
            )


def require_datasets(config: RunConfig, words: Sequence[str], purpose: str = "training") -> None:
    """Check that every dataset of the config is prepared.

    Args:
        config: The run.
        words: CONFIG and overrides as they were given, for the command that the message suggests.
        purpose: What needs them, for the message.

    Raises:
        DataError: A dataset folder has no manifest.
    """
    for folder in list_dataset_folders(config.data):
        if is_prepared(folder):
            continue
        command = f"Prepare it first: llmsys prepare {shlex.join(words)}"
        if config.data.kind == "mixture":
            command = (
                f"Prepare it first, with the config that has data.folder={format_folder(folder)}: "
                "llmsys prepare CONFIG"
            )
        raise DataError(
            f"{format_folder(folder)} is not a prepared dataset ({MANIFEST_NAME} is missing), "
            f"which {purpose} needs. {command}"
        )


def require_checkpoint(config: RunConfig) -> None:
    """Check that the run has a checkpoint. Of a run in a remote storage nothing is checked.

    Args:
        config: The run.

    Raises:
        CheckpointError: The run folder has none.
    """
    folder = config.run.folder / "checkpoints"
    if find_folder_url(folder) is None and not list_checkpoints(folder):
        raise build_missing_error(folder)


def require_trained_run(config: RunConfig) -> None:
    """Check that a run was trained in its folder. Of a remote storage nothing is checked.

    Args:
        config: The run.

    Raises:
        DataError: The folder has no events.
    """
    if find_folder_url(config.run.folder) is None:
        require_events(config.run.folder)
