"""Questions: every mistake is named with its file and line, and rows hold exactly the tokens of
the choices.
"""

import gzip
import json
from pathlib import Path

import pytest

from llmsys.config.evaluation import EvaluationConfig, MinimalPairsConfig, MultipleChoiceConfig
from llmsys.data.batch import IGNORED
from llmsys.data.multiple_choice import ChoiceRows, MultipleChoiceQuestion, read_questions
from llmsys.data.packed_windows import PADDING
from llmsys.errors import DataError
from tests.helpers.letter_tokenizer import Letters


def write(path: Path, *rows: object) -> Path:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_folder_of_pairs_is_one_set_with_either_spelling(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"good": "she runs", "bad": "she run"})
    write(
        tmp_path / "a.jsonl.gz",
        {"sentence_good": "they run", "sentence_bad": "they runs"},
        "",
        {"x": 1},
    )
    (tmp_path / "notes.txt").write_text("not a set")
    with pytest.raises(
        DataError, match=r"a.jsonl.gz:3: no text under `good` or `sentence_good`. It has \[\"x\"\]"
    ):
        read_questions(MinimalPairsConfig(path=tmp_path))
    first = read_questions(MinimalPairsConfig(path=tmp_path, max_questions=1))
    assert first == [
        MultipleChoiceQuestion(f"{tmp_path}/a.jsonl.gz:1", "", "", ("they run", "they runs"), 0)
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "list is not an object"),
        ({"choices": ["a", "b"], "answer": 0}, "no text under `question` or `context`"),
        ({"question": "q", "answer": 0}, "`choices` must be a list of two or more texts, not null"),
        ({"question": "q", "choices": ["a", ""], "answer": 0}, "two or more texts, not"),
        (
            {"question": "q", "choices": ["a", "b"], "answer": 2},
            "answer 2 is not one of the 2 choices. Count from 0 to 1",
        ),
        ({"question": "q", "choices": ["a", "b"], "answer": "b"}, 'answer "b" is not one of'),
        ({"question": "q", "choices": ["a", "b"]}, "answer null is not one of"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    good = {"question": "q", "choices": ["a", "b"], "answer": 1}
    path = write(tmp_path / "set.jsonl", good, line)
    with pytest.raises(DataError, match=r"set.jsonl:2: ") as found:
        read_questions(MultipleChoiceConfig(path=path))
    assert message in str(found.value)


def test_files_that_are_not_there_empty_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.jsonl does not exist"):
        read_questions(MinimalPairsConfig(path=tmp_path / "nowhere.jsonl"))
    with pytest.raises(DataError, match="has no questions"):
        read_questions(MinimalPairsConfig(path=write(tmp_path / "empty.jsonl")))
    (tmp_path / "broken.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(DataError, match=r"broken.jsonl.gz cannot be read"):
        read_questions(MinimalPairsConfig(path=tmp_path / "broken.jsonl.gz"))
    with pytest.raises(ValueError, match="two entries have the name a"):
        EvaluationConfig(
            tasks=(
                MinimalPairsConfig(path=Path("x/a.jsonl")),
                MultipleChoiceConfig(path=Path("y/a.jsonl.gz")),
            )
        )


def test_the_targets_of_a_row_are_its_choice_and_nothing_else() -> None:
    asked = MultipleChoiceQuestion("here:1", "ab ", " ", ("c", "def"), 1)
    rows = ChoiceRows([asked], Letters(), [0], longest=7)  # type: ignore[arg-type]
    batch = rows.get_batch(0, 3)
    # opening, context, two spaces and all but the last of "def"
    assert batch.tokens_BT.shape == (3, 7)
    texts = ["".join(chr(t) for t in row.tolist() if t != IGNORED) for row in batch.targets_BT]
    assert texts == ["  c", "  def", ""]  # the context's own space at its end is the choice's
    assert (batch.documents_BT == PADDING).sum(1).tolist() == [2, 0, 0]
    assert batch.tokens_BT[0].tolist() == [0, *map(ord, "ab  "), 0, 0]
    with pytest.raises(
        DataError, match=r"here:1: choice 1 with its context has 7 tokens, but the limit is 6"
    ):
        ChoiceRows([asked], Letters(), [0], longest=6)  # type: ignore[arg-type]
