"""`evaluation:` — what a model is measured on while it trains and by `llmsys evaluate`: held-out documents, and sets of
questions scored by likelihood.
"""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from llmsys.config.local_path import LocalPath
from llmsys.config.section import Section
from llmsys.config.violation import Violation, raise_violations

MAX_DEFAULT_SEQUENCES = 8
"""Sequences of one forward pass of an evaluation, where neither it nor a training micro-batch says fewer."""

SUFFIXES = (".gz", ".jsonl", ".json")


class _EvaluationTaskConfig(Section):
    path: LocalPath = Field(description="A .jsonl or .jsonl.gz file, or a folder of them that are read in their order.")
    name: str = Field("", description="Name in logs and events; left out: the file's.")
    max_questions: int = Field(0, ge=0, description="Questions to ask, from the first on; 0 asks all.")

    @property
    def title(self) -> str:
        """What the set is called."""
        title = self.path.name
        for suffix in SUFFIXES:
            title = title.removesuffix(suffix)
        return self.name or title


class MultipleChoiceConfig(_EvaluationTaskConfig):
    """Multiple choice: the choice that is likeliest behind the question is the model's answer.

    One JSON object a line: `question` (or `context`), a text; `choices`, a list of texts; `answer`, the number of the
    right one, counted from 0.
    """

    kind: Literal["choices"] = "choices"
    separator: str = Field(" ", description="Stands between the question and each choice.")


class MinimalPairsConfig(_EvaluationTaskConfig):
    """Minimal pairs as in BLiMP (Warstadt 2020, arXiv:1912.00582): the good sentence should be likelier than the bad.

    One JSON object a line: `good` and `bad`, or `sentence_good` and `sentence_bad` as in BLiMP's own files.
    """

    kind: Literal["pairs"] = "pairs"


SetConfig = Annotated[MultipleChoiceConfig | MinimalPairsConfig, Field(discriminator="kind")]


class EvaluationConfig(Section):
    """`evaluation:` — loss on held-out documents, and answers to questions."""

    every_steps: int = Field(0, ge=0, description="Steps between two evaluations; 0 evaluates only at the end.")
    max_tokens: int = Field(0, ge=0, description="Held-out tokens to read; 0 reads all of them.")
    micro_sequences: int = Field(
        0,
        ge=0,
        description="Sequences in one forward pass of one rank, whose logits exist whole; 0 takes as many as "
        "batch.micro_sequences, at most 8.",
    )
    tasks: tuple[SetConfig, ...] = Field((), description="Questions that a model of text answers by likelihood.")

    @model_validator(mode="after")
    def _check_task_names(self) -> Self:
        titles = [one.title for one in self.tasks]
        raise_violations(
            Violation(f"tasks.{number}.name", f"two sets are called {title}. Give one of them another name.")
            for number, title in enumerate(titles)
            if title in titles[:number]
        )
        return self


def find_task_violations(evaluation: EvaluationConfig, objective: str) -> Iterator[Violation]:
    """What keeps questions from being asked."""
    if evaluation.tasks and objective != "next_token":
        yield Violation(
            "evaluation.tasks",
            f"{len(evaluation.tasks)} sets are scored by the likelihood of a text, which objective.kind={objective} "
            "does not learn. Use evaluation.tasks=[], or a model with family=decoder.",
        )
