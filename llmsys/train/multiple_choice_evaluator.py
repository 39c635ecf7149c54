"""Evaluate multiple choice and minimal pairs by likelihood, together with the loss on held-out
data.

A choice's likelihood is the sum of the log-probabilities of its tokens after the context. Texts
differ in length, so there are three accuracies: by the sum (`acc` in lm-evaluation-harness), by the
sum over the choice's bytes (its `acc_norm`, which counts characters), and by the sum over its
tokens. A tie counts as wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, assert_never

import torch

from llmsys.config.evaluation import (
    MAX_DEFAULT_SEQUENCES,
    MinimalPairsConfig,
    MultipleChoiceConfig,
    SetConfig,
)
from llmsys.config.harness import HarnessConfig
from llmsys.config.run import RunConfig
from llmsys.data.multiple_choice import ChoiceRows, MultipleChoiceQuestion, read_questions
from llmsys.errors import ConfigError
from llmsys.train.evaluator import (
    ALONE,
    EvaluationResult,
    Evaluator,
    LogitsFunction,
    RowRanks,
    compute_row_metrics,
)
from llmsys.train.harness_evaluator import HarnessEvaluator
from llmsys.train.run_data import get_prefix_ids
from llmsys.vocabulary.tokenizer import Tokenizer


@dataclass(frozen=True)
class QuestionScores:
    """Accuracies over the questions of one task."""

    accuracy: float
    accuracy_per_byte: float
    accuracy_per_token: float
    questions: int

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for events and JSON."""
        return asdict(self)


@dataclass(frozen=True)
class MultipleChoiceEvaluator:
    """An evaluator of one task.

    Attributes:
        rows: one row per choice.
        row_ranks: the ranks that compute the logits of a row together.
        sequences: rows in one forward pass of a rank.
    """

    rows: ChoiceRows
    row_ranks: RowRanks = ALONE
    sequences: int = MAX_DEFAULT_SEQUENCES

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> QuestionScores:
        """Score this rank's rows and sum over all ranks. Collective.

        Args:
            compute_logits: Runs the model on a batch.
            device: Device of this rank.

        Returns:
            The accuracies, the same on every rank.
        """
        found = compute_row_metrics(
            self.rows, compute_logits, device, self.row_ranks, self.sequences
        )
        nats = {
            (row.question, row.choice): (float(numbers[0]), float(numbers[2]))
            for row, numbers in zip(self.rows.sorted, found, strict=True)
        }
        correct = [_compare_likelihoods(question, [nats[number,
            choice] for choice in range(len(question.choices))])
                 for number, question in enumerate(self.rows.questions)]  # fmt: skip
        shares = [sum(one) / len(correct) for one in zip(*correct, strict=True)]
        return QuestionScores(shares[0], shares[1], shares[2], questions=len(correct))


def _compare_likelihoods(
    question: MultipleChoiceQuestion, found: Sequence[tuple[float, float]]
) -> list[bool]:
    """Return whether the answer is the most likely choice: in sum, per byte and per token.

    Args:
        question: the question with its choices.
        found: (nats, tokens) of each choice.
    """
    nats = [one for one, _ in found]
    per_byte = [one / len(text.encode()) for one, text in zip(nats, question.choices, strict=True)]
    per_token = [one / tokens for one, tokens in found]
    return [_is_cheapest_choice(costs, question.answer) for costs in (nats, per_byte, per_token)]


def _is_cheapest_choice(costs: Sequence[float], answer: int) -> bool:
    # Strictly less: a model that knows nothing gives ties, and no tie counts.
    return all(costs[answer] < cost for choice, cost in enumerate(costs) if choice != answer)


@dataclass(frozen=True)
class EvaluationWithTasks:
    """The result on held-out data, and the scores of each task by name."""

    heldout: EvaluationResult
    answers: Mapping[str, EvaluationResult]

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers of the held-out data, and under `sets` the scores of each task."""
        return self.heldout.to_dict() | {
            "sets": {name: one.to_dict() for name, one in self.answers.items()}
        }


@dataclass(frozen=True)
class EvaluatorWithTasks:
    """An evaluator of held-out data and then of every task."""

    heldout: Evaluator
    tasks: dict[str, MultipleChoiceEvaluator | HarnessEvaluator]

    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> EvaluationResult:
        """Evaluate held-out data and every task. Collective."""
        measured = self.heldout.evaluate(compute_logits, device)
        answers: dict[str, EvaluationResult] = {}
        for name, one in self.tasks.items():
            match one:
                case MultipleChoiceEvaluator():
                    answers[name] = one.evaluate(compute_logits, device)
                case HarnessEvaluator():
                    found = one.evaluate(compute_logits, device)
                    if both := answers.keys() & found.keys():
                        raise ConfigError(
                            f"evaluation.tasks: two entries score {min(both)}. Set the name of "
                            "one, or leave it out."
                        )
                    answers |= found
                case unreachable:
                    assert_never(unreachable)
        return EvaluationWithTasks(measured, answers)


def build_task_evaluator(
    heldout: Evaluator, config: RunConfig, tokenizer: Tokenizer, row_ranks: RowRanks
) -> Evaluator:
    """Add the tasks of `evaluation.tasks` to an evaluator.

    Args:
        heldout: The evaluator of the held-out set.
        config: The config of the run.
        tokenizer: The tokenizer of the run.
        row_ranks: The division of rows over ranks.

    Returns:
        An evaluator of both; `heldout` itself where there are no tasks.

    Raises:
        DataError: A question is malformed or too long, or a task of the harness lacks its files.
        ConfigError: lm_eval is not installed.
    """
    tasks = {
        one.title: _build_evaluator(one, config, tokenizer, row_ranks)
        for one in config.evaluation.tasks
    }
    return EvaluatorWithTasks(heldout, tasks) if tasks else heldout


def _build_evaluator(
    asked: SetConfig, config: RunConfig, tokenizer: Tokenizer, row_ranks: RowRanks
) -> MultipleChoiceEvaluator | HarnessEvaluator:
    match asked:
        case MultipleChoiceConfig() | MinimalPairsConfig():
            longest = config.model.max_position_embeddings
            opening = get_prefix_ids(config.generation, tokenizer)
            rows = ChoiceRows(
                read_questions(asked), tokenizer, opening or [tokenizer.eos_id], longest
            )
            return MultipleChoiceEvaluator(rows, row_ranks, config.evaluation_sequences)
        case HarnessConfig():
            return HarnessEvaluator(asked, config, row_ranks)
        case unreachable:
            assert_never(unreachable)
