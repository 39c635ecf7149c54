"""Reject a config that cannot train, before any rank starts and imports torch.

Reads the config and the manifests of its datasets.
"""

import shlex
from collections.abc import Sequence

from llmsys.config.bitwise_constraints import list_micro_batch_counts, require_ranks
from llmsys.config.data import list_dataset_folders
from llmsys.config.loading.trusted_run import require_trusted_run
from llmsys.config.optimizer import PythonOptimizerConfig
from llmsys.config.run import RunConfig
from llmsys.config.schedule import PythonScheduleConfig
from llmsys.data.step_plan import RunPlan
from llmsys.dataset.manifest import MANIFEST_NAME
from llmsys.dataset.remote_dataset import is_prepared
from llmsys.errors import DataError
from llmsys.events import require_events
from llmsys.optim.lr_schedule import load_python_schedule
from llmsys.storage.paths import find_folder_url, format_folder
from llmsys.train.checkpoint_record import build_missing_error, list_checkpoints


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
