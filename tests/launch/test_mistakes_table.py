"""Hundreds of mistakes, each with what its answer says: key or value, rule and remedy.

They run in one process that can neither import torch nor start ranks, so an answer is early.
`tests/data/mistakes.tsv` has a command and the words of its answer a line. Each answer was judged
when its line was written; `test_mistakes.py` has those whose remedy is tried too.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.command_server import CommandServer, start_server
from tests.helpers.mistaken_folders import build_mistaken_folders
from tests.launch.test_mistakes import COMMANDS, OVERRIDES, RAW, REMEDY

TABLE = Path(__file__).resolve().parents[1] / "data" / "mistakes.tsv"
ROWS = [tuple(line.split("\t")) for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]]
TRIED = [
    *((f"show train/demo {wrong}", says) for wrong, says, _ in OVERRIDES),
    *((wrong, says) for wrong, says, _ in COMMANDS),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the commands name."""
    root = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        build_mistaken_folders(root)
    return root


@pytest.fixture(scope="module")
def server() -> Iterator[CommandServer]:
    with start_server() as running:
        yield running


def find_fault(server: CommandServer, folder: Path, command: str, says: str) -> str | None:
    """What is wrong with the answer to a command; None if it is right."""
    answer = server.run(str(folder), shlex.split(command))
    text = answer.err.strip()
    fault = None
    if answer.status != 2 or "llmsys: error: " not in text:
        fault = f"status {answer.status}"
    elif answer.out:
        fault = f"printed {answer.out!r}"
    elif says not in text:
        fault = f"does not say {says!r}"
    elif RAW.search(text) or not REMEDY.search(text):
        fault = "has raw phrases, or no remedy"
    return fault and f"{command}: {fault}\n    {text}"


def test_every_mistake_is_answered_early_with_its_remedy(
    server: CommandServer, folder: Path
) -> None:
    faults = [find_fault(server, folder, command, says) for command, says in ROWS]
    assert not [fault for fault in faults if fault]


def test_mistakes_whose_remedies_are_tried_are_answered_early(
    server: CommandServer, folder: Path
) -> None:
    faults = [find_fault(server, folder, command, says) for command, says in TRIED]
    assert not [fault for fault in faults if fault]


def test_a_finished_run_is_known_without_torch(server: CommandServer, folder: Path) -> None:
    answer = server.run(str(folder), ["train", "finished.yaml"])
    assert answer.status == 0, answer.err
    assert "finished is finished: " in answer.out


def test_the_table_has_as_many_as_were_asked_for() -> None:
    commands = [command for command, _ in [*ROWS, *TRIED]]
    assert len(ROWS) >= 400
    assert len(set(commands)) == len(commands)
