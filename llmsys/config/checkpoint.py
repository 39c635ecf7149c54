"""Configuration of checkpoints (`checkpoint:`): interval, mode and retention."""

from typing import Literal

from pydantic import Field

from llmsys.config.section import Section

LOWER_IS_BETTER = ("loss", "bits_per_byte", "perplexity")


class CheckpointConfig(Section):
    """Interval and retention of checkpoints. A checkpoint is kept when any retention rule
    selects it.
    """

    every_steps: int = Field(
        100,
        ge=0,
        description="Steps between checkpoints. 0: the last step, and those of every_minutes.",
    )
    every_minutes: float = Field(
        0.0,
        ge=0,
        description="Minutes from one checkpoint to the next, unless every_steps comes first. 0: "
        "no checkpoint is due by the clock.",
    )
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="sync: training waits for the write. async: copy the state to host memory and "
        "write it in the background; needs host memory for the rank's shard of the state.",
    )
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_every_steps: int = Field(
        0,
        ge=0,
        description="Never delete the checkpoints of steps that are multiples of this. 0: no such "
        "step.",
    )
    keep_best: int = Field(
        0, ge=0, description="Number of checkpoints with the best evaluation to keep."
    )
    best_metric: Literal["loss", "bits_per_byte", "perplexity", "accuracy"] = Field(
        "loss",
        description="Evaluation metric that ranks checkpoints for keep_best. Lower is better, "
        "except for accuracy.",
    )
    average_last: int = Field(
        0,
        ge=0,
        description="Number of last checkpoints to average; evaluation, generation and conversion "
        "use the average. 0: use the last checkpoint.",
    )
