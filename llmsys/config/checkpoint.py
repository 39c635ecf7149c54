"""Configuration of checkpoints (`checkpoint:`): interval, mode and retention."""

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from llmsys.config.section import Section, Violation, raise_violations

LOWER_IS_BETTER = ("loss", "bits_per_byte", "perplexity")


class CheckpointConfig(Section):
    """Interval and retention of checkpoints. A checkpoint is kept when any retention rule selects it."""

    every_steps: int = Field(100, ge=0, description="Steps between checkpoints. 0: save the last step only.")
    mode: Literal["sync", "async"] = Field(
        "sync",
        description="sync: training waits for the write. async: copy the state to host memory and write it in the "
        "background; needs host memory for the rank's shard of the state.",
    )
    keep_last: int = Field(2, ge=1, description="Number of newest checkpoints to keep.")
    keep_every_steps: int = Field(
        0, ge=0, description="Never delete the checkpoints of steps that are multiples of this. 0: no such step."
    )
    keep_best: int = Field(0, ge=0, description="Number of checkpoints with the best evaluation to keep.")
    best_metric: Literal["loss", "bits_per_byte", "perplexity", "accuracy"] = Field(
        "loss",
        description="Evaluation metric that ranks checkpoints for keep_best. Lower is better, except for accuracy.",
    )
    average_last: int = Field(
        0,
        ge=0,
        description="Number of last checkpoints to average; evaluation, generation and conversion use the average. "
        "0: use the last checkpoint.",
    )

    @model_validator(mode="after")
    def _check_average_last(self) -> Self:
        if self.average_last > self.keep_last:
            text = f"{self.keep_last} cannot hold the {self.average_last} of average_last. Use {self.average_last}."
            raise_violations([Violation("keep_last", text)])
        return self


def find_retention_violations(checkpoint: CheckpointConfig, evaluation_every_steps: int) -> Iterator[Violation]:
    """Yield retention rules that would select no checkpoint.

    Args:
        checkpoint: the `checkpoint:` section.
        evaluation_every_steps: steps between two evaluations; 0 evaluates at the end only.
    """
    saved, kept = checkpoint.every_steps, checkpoint.keep_every_steps
    if kept and (not saved or kept % saved):
        near = max(1, round(kept / saved)) * saved if saved else 0
        remedy = f"Use keep_every_steps={near}" if saved else "Set checkpoint.every_steps"
        yield Violation(
            "checkpoint.keep_every_steps",
            f"{kept} is not a multiple of checkpoint.every_steps={saved}, so few or none of its steps are saved. "
            f"{remedy}, or 0.",
        )
    if checkpoint.keep_best and (not evaluation_every_steps or not saved or saved % evaluation_every_steps):
        yield Violation(
            "checkpoint.keep_best",
            f"{checkpoint.keep_best} best checkpoints need an evaluation of each checkpoint, but "
            f"evaluation.every_steps={evaluation_every_steps} does not divide checkpoint.every_steps={saved}. "
            f"Use evaluation.every_steps={saved or 100}, or checkpoint.keep_best=0.",
        )
