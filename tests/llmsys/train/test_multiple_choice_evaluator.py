"""Answers by likelihood: what a hand-made model gets right by each rule, and the same on any
number of ranks.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from llmsys.config.combinations import find_refused_combinations
from llmsys.config.evaluation import EvaluationConfig, MultipleChoiceConfig
from llmsys.config.objective import MaskedLmConfig, NextTokenConfig
from llmsys.data.batch import Batch
from llmsys.data.multiple_choice import ChoiceRows, MultipleChoiceQuestion
from llmsys.launch.commands.train import format_evaluation
from llmsys.train.evaluator import LogitsFunction, RowRanks, TargetEvaluation, compute_row_metrics
from llmsys.train.multiple_choice_evaluator import (
    EvaluatorWithTasks,
    MultipleChoiceEvaluator,
    QuestionScores,
)
from tests.helpers.letter_tokenizer import Letters
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")


def write_bigrams(probabilities: dict[str, float]) -> Callable[[Batch], Tensor]:
    """A model that gives letter b behind letter a the probability of "ab"; the rest is spread
    over the others.
    """
    table = torch.full((256, 256), 1e-6)
    for (before, after), probability in probabilities.items():
        table[ord(before), ord(after)] = probability
    logits = table.log()
    logits[:, 0] = (1 - table[:, 1:].sum(1)).log()  # rows sum to 1
    return lambda batch: logits[batch.tokens_BT]


def build_evaluator(
    *questions: MultipleChoiceQuestion, together: int = 1
) -> MultipleChoiceEvaluator:
    return MultipleChoiceEvaluator(
        ChoiceRows(questions, Letters(), [0], longest=64),  # type: ignore[arg-type]
        RowRanks(together),
    )


def test_each_rule_finds_the_answer_that_it_should() -> None:
    """a: 0.2 for one letter; b then é: 0.3 · 0.3, in all less likely, per token (2) and per byte
    (3) likelier.
    """
    model = write_bigrams({"qa": 0.2, "qb": 0.3, "bé": 0.3})
    long, short = (MultipleChoiceQuestion("x:1", "q", "", ("a", "bé"), answer) for answer in (1, 0))
    assert build_evaluator(long).evaluate(model, CPU) == QuestionScores(0.0, 1.0, 1.0, 1)
    assert build_evaluator(short).evaluate(model, CPU) == QuestionScores(1.0, 0.0, 0.0, 1)
    # both have two bytes, and "bc" has two tokens
    model = write_bigrams({"qä": 0.25, "qb": 0.3, "bc": 0.3})
    bytes_matter = MultipleChoiceQuestion("x:1", "q", "", ("bc", "ä"), 0)
    assert build_evaluator(bytes_matter).evaluate(model, CPU) == QuestionScores(0.0, 0.0, 1.0, 1)


def test_a_tie_is_no_right_answer_and_neither_is_a_number_that_is_none() -> None:
    asked = MultipleChoiceQuestion("x:1", "q", " ", ("a", "b"), 0)
    assert build_evaluator(asked).evaluate(write_bigrams({}), CPU).accuracy == 0
    assert build_evaluator(asked).evaluate(
        lambda batch: torch.full((*batch.tokens_BT.shape, 256), float("nan")), CPU
    ) == (QuestionScores(0.0, 0.0, 0.0, 1))


def build_questions() -> tuple[MultipleChoiceQuestion, ...]:
    """Questions with two to four choices of unlike lengths; more rows than one round of four
    ranks holds.
    """
    words = ["ab", "b", "cab", "bbcc", "a", "acab", "cc"]
    return tuple(
        MultipleChoiceQuestion(
            f"x:{n}",
            words[n % 7] * (n % 3),
            " " * (n % 2),
            tuple(words[(n + k) % 7] for k in range(2 + n % 3)),
            n % 2,
        )
        for n in range(23)
    )


def build_bigram_model() -> Callable[[Batch], Tensor]:
    logits = torch.randn(256, 256, generator=torch.Generator().manual_seed(3))
    return lambda batch: logits[batch.tokens_BT]


def score_by_hand(question: MultipleChoiceQuestion) -> list[float]:
    """Nats of each choice, letter by letter."""
    costs = -build_bigram_model()(Batch(torch.arange(256)[None], torch.zeros(1, 256))).log_softmax(
        -1
    )[0]
    found = []
    for choice in question.choices:
        text = "\0" + question.context + question.separator + choice
        first = 1 + len(question.context)
        found.append(
            sum(float(costs[ord(text[i - 1]), ord(text[i])]) for i in range(first, len(text)))
        )
    return found


def compute_numbers(together: int) -> list[list[float]]:
    rows = build_evaluator(*build_questions()).rows
    return compute_row_metrics(rows, build_bigram_model(), CPU, RowRanks(together)).tolist()


def on_ranks(rank: int) -> list[tuple[QuestionScores, list[list[float]]]]:
    asked = [
        (build_evaluator(*build_questions(), together=together), together) for together in (1, 2, 4)
    ]
    return [
        (one.evaluate(build_bigram_model(), CPU), compute_numbers(together))
        for one, together in asked
    ]


@pytest.mark.distributed
def test_any_number_of_ranks_gives_the_answers_that_a_hand_would() -> None:
    alone = build_evaluator(*build_questions()).evaluate(build_bigram_model(), CPU)
    costs = [score_by_hand(one) for one in build_questions()]
    right = sum(
        found[one.answer] == min(found) for one, found in zip(build_questions(), costs, strict=True)
    )
    assert alone.accuracy == right / 23
    assert 0 < right < 23
    assert all(found == [(alone, compute_numbers(1))] * 3 for found in run_ranks(on_ranks, 4))


class Heldout:
    def evaluate(self, compute_logits: LogitsFunction, device: torch.device) -> TargetEvaluation:
        return TargetEvaluation(1.0, 2.7, 0.5, 10)


def test_sets_stand_beside_the_loss_by_name() -> None:
    both = EvaluatorWithTasks(Heldout(), {"toy": build_evaluator(*build_questions())})
    fields = both.evaluate(build_bigram_model(), CPU).to_dict()
    assert fields["loss"] == 1.0
    assert fields["sets"]["toy"]["questions"] == 23
    assert "\ntoy: " in format_evaluation(fields)
    assert "of 23 questions right" in format_evaluation(fields)


def test_questions_for_a_model_that_learns_no_text_are_refused() -> None:
    sets = EvaluationConfig(tasks=(MultipleChoiceConfig(path=Path("a.jsonl")),))
    fits = SimpleNamespace(evaluation=sets, objective=NextTokenConfig())
    assert list(find_refused_combinations(fits)) == []
    learns_no_text = SimpleNamespace(evaluation=sets, objective=MaskedLmConfig())
    (problem,) = find_refused_combinations(learns_no_text)
    assert problem.key == "evaluation.tasks"
    assert (
        "1 tasks are scored by the likelihood of a text, which objective.kind=masked does not model"
        in problem.message
    )
