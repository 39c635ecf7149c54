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
        description="Approximate bytes of a crawl file per task (at least 1/64 of the file). A "
        "crash loses at most the blocks in progress.",
    )
    max_attempts: int = Field(
        3, ge=1, description="Maximum attempts of a task before its input is quarantined."
    )
    backoff_seconds: float = Field(
        1.0,
        ge=0,
        le=3_600,
        description="Delay before the second attempt, in seconds; doubles up to one minute.",
    )

    earlier_results_bytes: int = Field(
        10_000_000_000,
        ge=0,
        description="Maximum bytes of results of earlier configs to keep in the dataset folder, so "
        "that a return to one of them takes seconds; those unused for longest go first. 0: remove "
        "them.",
    )


class _ProcessExecutorConfig(_BaseExecutorConfig):
    """Executors that run a task in its own process, which a timeout can end."""

    task_seconds: float = Field(
        3_600,
        ge=0,
        description="Timeout of one attempt on one input, in seconds of wall-clock time; its "
        "process is then terminated. 0: no timeout.",
    )


class LocalExecutorConfig(_ProcessExecutorConfig):
    """Worker processes on this machine."""

    kind: Literal["local"] = "local"
    workers: int = Field(0, ge=0, description="Number of processes. 0: one per available core.")


class InlineExecutorConfig(_BaseExecutorConfig):
    """The current process, one task at a time, for debugging and tests."""

    kind: Literal["inline"] = "inline"


class RayExecutorConfig(_ProcessExecutorConfig):
    """Tasks on a Ray cluster whose nodes see the inputs and the dataset folder under the same
    paths.
    """

    kind: Literal["ray"] = "ray"
    address: str = Field(
        "",
        description="Address of the Ray cluster, such as 10.0.0.1:6379 or auto. Empty: start a "
        "local cluster.",
    )
    workers: int = Field(
        0, ge=0, description="Maximum concurrent tasks. 0: one per core of the cluster."
    )


class SlurmExecutorConfig(_ProcessExecutorConfig):
    """Slurm job arrays on nodes that see the inputs and the dataset folder under the same paths."""

    kind: Literal["slurm"] = "slurm"
    workers: int = Field(
        0, ge=0, description="Maximum tasks in Slurm at a time. 0: twice `array_tasks`."
    )
    sbatch_options: tuple[str, ...] = Field(
        (), description="Options for sbatch, such as --partition=cpu or --mem=4G."
    )
    array_tasks: int = Field(
        1_000,
        ge=1,
        description="Tasks per job array; Slurm's default limit (MaxArraySize) is 1000.",
    )
    jobs_per_task: int = Field(
        8,
        ge=1,
        description="Blocks that one array task processes in sequence; starting a task takes "
        "seconds.",
    )
    poll_seconds: float = Field(
        5.0, gt=0, description="Interval between polls of the results and the queue, in seconds."
    )


ExecutorConfig = Annotated[
    LocalExecutorConfig | InlineExecutorConfig | RayExecutorConfig | SlurmExecutorConfig,
    Field(discriminator="kind"),
]
