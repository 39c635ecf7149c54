"""tools/commit_message.py accepts a short subject with a body that says why, and names what another
message lacks.
"""

from pathlib import Path

import pytest
import yaml

from tools import commit_message
from tools.commit_message import find_message_violations

GOOD = "Print the size of the code\n\nLines reward dense code.\n# a comment of git\n"


@pytest.mark.parametrize(
    "message",
    [
        GOOD,
        f"{'x' * 72}\n\nWhy.\n",
        "Merge branch 'a' into b\n",
        "fixup! Print the size\n",
        f"{GOOD}{commit_message.SCISSORS}\n{'x' * 100}\n",
    ],
)
def test_a_subject_and_a_reason_are_enough(message: str) -> None:
    assert list(find_message_violations(message)) == []


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (f"{'x' * 73}\n\nWhy.\n", "The subject has 73 characters, more than 72."),
        ("Print the size.\n\nWhy.\n", "The subject ends in a full stop."),
        ("Print the size\nWhy.\n", "The second line is not empty."),
        ("Print the size\n", "There is no body."),
        ("Print the size\n\n# only a comment\n", "There is no body."),
        ("\n\nWhy.\n", "The first line is empty."),
    ],
)
def test_what_a_message_lacks_is_named(message: str, sentence: str) -> None:
    [found] = find_message_violations(message)
    assert found.startswith(sentence)


def test_the_hook_fails_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "COMMIT_EDITMSG"
    monkeypatch.setattr("sys.argv", ["commit_message.py", str(file)])
    file.write_text(GOOD)
    assert commit_message.main() == 0
    file.write_text("Print the size\n")
    assert commit_message.main() == 1
    assert "commit message: There is no body. Say why" in capsys.readouterr().err


def test_hooks_run_programs_that_are_there(repository: Path) -> None:
    config = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["id"] for hook in hooks} >= {"ruff-format", "ruff-check", "lint", "commit-message"}
    for hook in hooks:
        named = [word for word in hook["entry"].split() if word.startswith("tools/")]
        assert all((repository / name).is_file() for name in named)
        assert hook["entry"].startswith(".venv/bin/")
