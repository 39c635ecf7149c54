"""Configuration of the executor (`data.executor:`): workers, task size and retries.

Invariants:
- The executor never changes the bytes of a dataset.
"""

from typing import Annotated, Literal

from pydantic import Field

from llmsys.config.section import Section


class _BaseExecutorConfig(Section):
    """Fields of all executors: task size and retries."""

    block_bytes: int = Field(
        4_000_000,
        ge=1,
        description="Bytes of a crawl file per task, about; of a long file a 64th. A crash loses no more than that.",
    )
    max_attempts: int = Field(3, ge=1, description="How often a task is tried before its input is quarantined.")
    backoff_seconds: float = Field(
        1.0, ge=0, le=3_600, description="Wait before the second try; doubled before each further one, to a minute."
    )


class _ProcessExecutorConfig(_BaseExecutorConfig):
    """Executors that run a task in its own process, which a timeout can end."""

    task_seconds: float = Field(
        3_600,
        ge=0,
        description="Wall clock of a try on one input, then its process is ended; 0: for ever. It decides nothing but "
        "quarantine, which is named.",
    )


class LocalExecutorConfig(_ProcessExecutorConfig):
    """Worker processes on this machine."""

    kind: Literal["local"] = "local"
    workers: int = Field(0, ge=0, description="Number of processes; 0: one per core this process may use.")


class InlineExecutorConfig(_BaseExecutorConfig):
    """The current process, one task at a time, for debugging and tests."""

    kind: Literal["inline"] = "inline"


class RayExecutorConfig(_ProcessExecutorConfig):
    """Tasks on a Ray cluster whose nodes see the inputs and the dataset folder under the same paths."""

    kind: Literal["ray"] = "ray"
    address: str = Field(
        "", description="Address of the cluster, such as 10.0.0.1:6379 or auto; empty: one of this machine's own."
    )
    workers: int = Field(0, ge=0, description="Tasks at a time; 0: one per core of the cluster.")


class SlurmExecutorConfig(_ProcessExecutorConfig):
    """Slurm job arrays on nodes that see the inputs and the dataset folder under the same paths."""

    kind: Literal["slurm"] = "slurm"
    workers: int = Field(0, ge=0, description="Tasks at a time; 0: as many as Slurm gives.")
    sbatch_options: tuple[str, ...] = Field((), description="Options of sbatch, such as --partition=cpu or --mem=4G.")
    array_tasks: int = Field(1_000, ge=1, description="Tasks per array; Slurm's own limit (MaxArraySize) is 1000.")
    jobs_per_task: int = Field(
        8, ge=1, description="Blocks that one task of an array does one after the other: starting takes seconds."
    )
    poll_seconds: float = Field(5.0, gt=0, description="How often results and the queue are looked at.")


ExecutorConfig = Annotated[
    LocalExecutorConfig | InlineExecutorConfig | RayExecutorConfig | SlurmExecutorConfig, Field(discriminator="kind")
]
