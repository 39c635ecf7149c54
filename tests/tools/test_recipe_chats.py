"""The chats of the recipe: the same on every machine, right, and without a held-out question in
training.
"""

import hashlib
import json
import re
from pathlib import Path

from tools.recipe_chats import build_files, write_chats

# The results in configs/recipes/README.md are those of these files.
HASHES = {
    "train.jsonl": "d0c1aadc0c211ce4",
    "heldout.jsonl": "4e430ad7b79fabac",
    "questions.jsonl": "886fb68beaae33f7",
    "chat.jinja": "525cf207bc38bc0c",
}


def test_files_are_those_that_the_results_were_measured_with(tmp_path: Path) -> None:
    write_chats(tmp_path / "chats")
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in (tmp_path / "chats").iterdir()
    }
    assert found == HASHES


def test_no_question_is_in_both_splits_and_answers_are_right() -> None:
    files = build_files()
    exchanges: dict[str, dict[str, str]] = {}
    for name in ("train", "heldout"):
        own = exchanges[name] = {}
        for line in files[f"{name}.jsonl"].splitlines():
            messages = [one for one in json.loads(line)["messages"] if one["role"] != "system"]
            own |= {
                ask["content"]: answer["content"]
                for ask, answer in zip(messages[::2], messages[1::2], strict=True)
            }
    assert not exchanges["train"].keys() & exchanges["heldout"].keys()
    for question, answer in (exchanges["train"] | exchanges["heldout"]).items():
        if found := re.match(r"What is (\d+) (plus|minus) (\d+)\?", question):
            sign = 1 if found[2] == "plus" else -1
            assert answer == f"It is {int(found[1]) + sign * int(found[3])}."
        elif question.startswith("Which is larger"):
            assert answer == f"{max(map(int, re.findall(r'[0-9]+', question)))} is larger."
    for line in files["questions.jsonl"].splitlines():
        row = json.loads(line)
        assert len(set(row["choices"])) == 4
        assert row["message"] not in exchanges["train"]
        known = exchanges["heldout"].get(row["message"])
        assert known in (None, row["choices"][row["answer"]])
