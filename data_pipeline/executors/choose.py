"""The executor that a config names: a section in, what does the work out."""

from pathlib import Path

from data_pipeline.executors.event import Executor
from data_pipeline.executors.inline import InlineExecutor
from data_pipeline.executors.local import LocalExecutor
from llmsys.config.executor import ExecutorConfig, InlineExecutorConfig, LocalExecutorConfig, RayExecutorConfig


def build_executor(config: ExecutorConfig, folder: Path, lock: int) -> Executor:
    """Return what does the tasks of a dataset folder, whose lock is held under the file descriptor `lock`."""
    if isinstance(config, LocalExecutorConfig):
        return LocalExecutor(config.workers, lock)
    if isinstance(config, InlineExecutorConfig):
        return InlineExecutor()
    if isinstance(config, RayExecutorConfig):
        from data_pipeline.executors.ray_cluster import RayExecutor  # an extra: imported only where it was asked for

        return RayExecutor(config.address, config.workers)
    from data_pipeline.executors.slurm import SlurmExecutor

    return SlurmExecutor(config, folder / "slurm")
