"""The executor that a config names: a section in, what does the work out."""

from pathlib import Path

from data_pipeline.executors.event import Executor
from data_pipeline.executors.inline import Inline
from data_pipeline.executors.local import LocalPool
from llmsys.config.executor import ExecutorConfig, InlineExecutor, LocalExecutor, RayExecutor


def choose_executor(config: ExecutorConfig, folder: Path, lock: int) -> Executor:
    """Return what does the tasks of a dataset folder, whose lock is held under the file descriptor `lock`."""
    if isinstance(config, LocalExecutor):
        return LocalPool(config.workers, lock)
    if isinstance(config, InlineExecutor):
        return Inline()
    if isinstance(config, RayExecutor):
        from data_pipeline.executors.ray_cluster import RayCluster  # an extra: imported only where it was asked for

        return RayCluster(config.address, config.workers)
    from data_pipeline.executors.slurm import SlurmArrays

    return SlurmArrays(config, folder / "slurm")
