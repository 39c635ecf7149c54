"""Configuration of evaluation (`evaluation:`): held-out loss, and tasks scored by likelihood.

Read during training and by `llmsys evaluate`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from llmsys.config.harness import HarnessConfig
from llmsys.config.python_code import PythonCode
from llmsys.config.section import LocalPath, Section, raise_violations
from llmsys.errors import Violation

# Sequences of one forward pass of an evaluation; fewer where evaluation or training micro-batches
# are smaller.
MAX_DEFAULT_SEQUENCES = 8

# Positions of a held-out window unless `evaluation.sequence_length` sets more: one rank computes
# all of them.
MAX_DEFAULT_LENGTH = 32_768

Named = Any  # an entry with `title`

SUFFIXES = (".gz", ".jsonl", ".json")


class _EvaluationTaskConfig(Section):
    path: LocalPath = Field(
        description="A .jsonl or .jsonl.gz file, or a folder of them, read in order of their names."
    )
    name: str = Field("", description="Name in logs and events. Default: the file name.")
    max_questions: int = Field(
        0, ge=0, description="Maximum number of questions, from the first. 0: all."
    )

    @property
    def title(self) -> str:
        """Name of the task: `name`, or the file name without its suffixes."""
        title = self.path.name
        for suffix in SUFFIXES:
            title = title.removesuffix(suffix)
        return self.name or title


class MultipleChoiceConfig(_EvaluationTaskConfig):
    """Multiple choice: the answer is the choice with the highest likelihood given the question.

    Each line is a JSON object: `question` (or `context`), a text; `choices`, a list of texts;
    `answer`, the index of the right choice, counted from 0.
    """

    kind: Literal["choices"] = "choices"
    separator: str = Field(" ", description="Text inserted between the question and each choice.")


class MinimalPairsConfig(_EvaluationTaskConfig):
    """Minimal pairs (BLiMP; Warstadt et al. 2020, arXiv:1912.00582): the good sentence should be
    likelier.

    Each line is a JSON object: `good` and `bad`, or `sentence_good` and `sentence_bad` as in
    BLiMP's own files.
    """

    kind: Literal["pairs"] = "pairs"


QuestionsConfig = MultipleChoiceConfig | MinimalPairsConfig
SetConfig = Annotated[
    MultipleChoiceConfig | MinimalPairsConfig | HarnessConfig, Field(discriminator="kind")
]


class PythonMetricConfig(PythonCode):
    """A metric of your own: a class that extends `llmsys.train.python_metric.PythonMetric`,
    averaged over targets.
    """

    kind: Literal["python"] = "python"
    name: str = Field(
        "", description="Name in logs, events and reports. Default: the class in lower case."
    )

    __hash__ = PythonCode.__hash__

    @property
    def title(self) -> str:
        """Name of the metric: `name`, or that of its class."""
        return self.name or self.class_name.lower()


class EvaluationConfig(Section):
    """`evaluation:` — held-out loss and evaluation tasks."""

    every_steps: int = Field(
        0, ge=0, description="Steps between evaluations. 0: evaluate only at the end."
    )
    max_tokens: int = Field(
        0, ge=0, description="Maximum number of held-out tokens to evaluate. 0: all."
    )
    micro_sequences: int = Field(
        0,
        ge=0,
        description="Sequences in one forward pass of one rank; their full logits are held in "
        "memory. 0: batch.micro_sequences, at most 8.",
    )
    sequence_length: int = Field(
        0,
        ge=0,
        description="Positions of a held-out window, all of which one rank computes. 0: "
        "batch.sequence_length, at most 32768.",
    )
    tasks: tuple[SetConfig, ...] = Field(
        (),
        validate_default=False,
        description="Tasks with questions that a language model answers by likelihood.",
    )
    metrics: tuple[PythonMetricConfig, ...] = Field(
        (),
        validate_default=False,
        description="Further numbers of each held-out target, computed by classes of yours.",
    )

    def resolve_sequence_length(self, training: int) -> int:
        """Return the positions of a held-out window.

        Args:
            training: `batch.sequence_length`.

        Returns:
            The same on every number of ranks, so that a loss does not depend on the layout.
        """
        return self.sequence_length or min(training, MAX_DEFAULT_LENGTH)

    @field_validator("tasks", "metrics")
    @classmethod
    def _check_names(cls, entries: tuple[Named, ...]) -> tuple[Named, ...]:
        titles = [entry.title for entry in entries]
        raise_violations(
            Violation(f"{number}.name", f"two entries have the name {title}. Rename one of them.")
            for number, title in enumerate(titles)
            if title in titles[:number]
        )
        return entries
