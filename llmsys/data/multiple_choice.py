"""Questions that a language model answers by likelihood: read from JSON lines, and laid out as
rows.

Multiple choice has a context followed by choices; a minimal pair is two choices without context. A
row is one choice after its context. Rows are sorted by length to reduce padding.

Invariants:
- The rows of a batch depend on the questions alone, never on the number of ranks.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import torch

from llmsys.config.evaluation import (
    SUFFIXES,
    MinimalPairsConfig,
    MultipleChoiceConfig,
    QuestionsConfig,
)
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.packed_windows import PADDING
from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import Tokenizer


@dataclass(frozen=True)
class MultipleChoiceQuestion:
    """Choices of which number `answer` should be the likeliest continuation of `context`.

    Attributes:
        location: File and line.
        context: Text before every choice.
        separator: Text between context and choice, not counted in a choice's length.
        choices: The texts.
        answer: Index of the right choice.
    """

    location: str
    context: str
    separator: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ChoiceRow:
    """One choice of a question: the tokens of the full text, of which those from `first` on are
    the choice's.
    """

    question: int
    choice: int
    tokens: list[int]
    first: int


def read_questions(asked: QuestionsConfig) -> list[MultipleChoiceQuestion]:
    """Read the questions of an evaluation task.

    Args:
        asked: The task's config.

    Returns:
        The questions in file order, at most `max_questions`.

    Raises:
        DataError: A file or line is not as documented; the message names it.
    """
    questions: list[MultipleChoiceQuestion] = []
    for file in _list_question_files(asked.path):
        for number, line in enumerate(_read_lines(file), start=1):
            if line.strip():
                questions.append(
                    _parse_question(
                        asked, _parse_object(line, f"{file}:{number}"), f"{file}:{number}"
                    )
                )
            if len(questions) == asked.max_questions > 0:
                return questions
    if not questions:
        raise DataError(
            f"evaluation set {asked.title}: {asked.path} has no questions. Correct the path, or "
            "remove the task."
        )
    return questions


def _list_question_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(
            file for file in path.iterdir() if file.name.endswith((".jsonl", ".jsonl.gz"))
        )
    if not path.is_file():
        raise DataError(
            f"evaluation set {path} does not exist. Give evaluation.tasks a file of JSON lines "
            f"({', '.join(SUFFIXES)}), or a folder of them."
        )
    return [path]


def _read_lines(file: Path) -> list[str]:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read ({error}). It must be UTF-8 with one JSON object per line."
        ) from None


def _parse_object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}). Write one object per line.") from None
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: {type(value).__name__} is not an object. Write one object per line."
        )
    return value


def _parse_question(
    asked: QuestionsConfig, fields: dict[str, Any], where: str
) -> MultipleChoiceQuestion:
    match asked:
        case MinimalPairsConfig():
            good, bad = (
                _require_text(fields, (name, f"sentence_{name}"), where) for name in ("good", "bad")
            )
            return MultipleChoiceQuestion(where, "", "", (good, bad), 0)
        case MultipleChoiceConfig():
            return _parse_multiple_choice(asked, fields, where)
        case unreachable:
            assert_never(unreachable)


def _parse_multiple_choice(
    asked: MultipleChoiceConfig, fields: dict[str, Any], where: str
) -> MultipleChoiceQuestion:
    choices = fields.get("choices")
    answer = fields.get("answer")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise DataError(
            f"{where}: `choices` must be a list of two or more texts, not {_format_value(choices)}."
        )
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < len(choices):
        raise DataError(
            f"{where}: answer {_format_value(answer)} is not one of the {len(choices)} choices. "
            f"Count from 0 to {len(choices) - 1}."
        )
    return MultipleChoiceQuestion(
        where,
        _require_text(fields, ("question", "context"), where),
        asked.separator,
        tuple(choices),
        answer,
    )


def _require_text(fields: dict[str, Any], names: Sequence[str], where: str) -> str:
    for name in names:
        if isinstance(value := fields.get(name), str) and value:
            return value
    raise DataError(
        f"{where}: no text under {' or '.join(f'`{name}`' for name in names)}. It has "
        f"{_format_value([*fields])}."
    )


def _format_value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:80]


class ScoredRows:
    """Rows in order of their lengths; the targets of a row are its tokens from `first` on."""

    def __init__(self, rows: Sequence[ChoiceRow]) -> None:
        """Sort the rows by length, so that rows of a batch need little padding.

        Args:
            rows: One row per question and choice.
        """
        # Ties are broken by number, so that the rows of a batch do not depend on the sorting
        # algorithm.
        self.sorted = sorted(rows, key=lambda row: (len(row.tokens), row.question, row.choice))
        self.num_rows = len(rows)

    def get_batch(self, first: int, count: int) -> Batch:
        """Return consecutive rows of `sorted`; rows after the last have no targets.

        Args:
            first: number of the first row, counted from 0.
            count: rows of the batch.
        """
        rows = self.sorted[first : first + count]
        length = max((len(row.tokens) - 1 for row in rows), default=1)
        tokens_BT = torch.zeros(count, length, dtype=torch.int64)
        targets_BT = torch.full((count, length), IGNORED, dtype=torch.int64)
        documents_BT = torch.full((count, length), PADDING, dtype=torch.int64)
        documents_BT[len(rows) :] = 0  # a row of padding alone would have no key to attend to
        for number, row in enumerate(rows):
            ids = torch.tensor(row.tokens)
            tokens_BT[number, : len(ids) - 1] = ids[:-1]
            targets_BT[number, row.first - 1 : len(ids) - 1] = ids[row.first :]
            documents_BT[number, : len(ids) - 1] = 0
        return Batch(tokens_BT, targets_BT, documents_BT)


class ChoiceRows(ScoredRows):
    """Every choice of every question as a row whose targets are the choice's tokens.

    Args:
        questions: The questions.
        tokenizer: The model's tokenizer.
        opening: Ids that begin every text; at least one.
        longest: The model's max_position_embeddings.
    """

    def __init__(
        self,
        questions: Sequence[MultipleChoiceQuestion],
        tokenizer: Tokenizer,
        opening: Sequence[int],
        longest: int,
    ) -> None:
        self.questions = questions
        rows = [
            row
            for number in range(len(questions))
            for row in self._iter_rows(number, tokenizer, list(opening))
        ]
        for row in rows:
            if (length := len(row.tokens) - 1) > longest:
                raise DataError(
                    f"{questions[row.question].location}: choice {row.choice} with its context "
                    f"has {length} tokens, but the limit is {longest} "
                    "(model.max_position_embeddings). Shorten it, or leave it out."
                )
        super().__init__(rows)

    def _iter_rows(
        self, number: int, tokenizer: Tokenizer, opening: list[int]
    ) -> Iterator[ChoiceRow]:
        """Yield a row per choice.

        Context and choice are tokenized as one text; a space at the context's end belongs to the
        choice.
        """
        question = self.questions[number]
        context = question.context.rstrip()
        separator = question.context[len(context) :] + question.separator
        first = len(opening) + len(tokenizer.encode(context)) if context else len(opening)
        for choice, text in enumerate(question.choices):
            tokens = opening + tokenizer.encode(context + separator + text)
            # The joined text can have fewer tokens than its context alone; one is left for the
            # choice.
            yield ChoiceRow(number, choice, tokens, min(first, len(tokens) - 1))
