"""tools/size.py counts the tokens of code, and of nothing else, once."""

import re
from pathlib import Path

import pytest

from tools import size

CODE = """def add(a, b):
    return a + b
"""
# def add ( a , b ) : return a + b
CODE_TOKENS = 12
AIRY_CODE = '''"""Add numbers."""

# Why there is an addition here.


def add(a, b):  # two numbers
    """Return the sum.

    Args:
        a: The first.
    """

    return a + b


class Sum:
    """A sum."""

    first = "a"
    """The first."""
'''
# class Sum : first = "a"
CLASS_TOKENS = 6


def test_air_comments_and_docstrings_are_free() -> None:
    assert size.count_tokens(CODE) == CODE_TOKENS
    assert size.count_tokens(AIRY_CODE) == CODE_TOKENS + CLASS_TOKENS


def test_a_string_that_is_a_value_counts() -> None:
    assert size.count_tokens('name = "text"\n') == 3
    assert size.count_tokens('print("text")\n') == 4


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which each package has one file of code and llmsys links to the others."""
    for name in (*size.PRODUCT, *size.OTHERS):
        room = tmp_path / name / "room"
        room.mkdir(parents=True)
        (room / "add.py").write_text(CODE)
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "notes.txt").write_text(CODE)
    for name in size.PRODUCT[1:]:
        (tmp_path / "llmsys" / name).symlink_to(f"../{name}")
    return tmp_path


def read_rows(printed: str) -> dict[str, tuple[int, int]]:
    rows = re.findall(r"^ *(\S+) +([\d,]+) +([\d,]+)$", printed, re.MULTILINE)
    return {name: (int(files), int(tokens)) for name, files, tokens in rows}


def test_links_of_the_wheel_are_not_counted_twice(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size.print_table(checkout, with_rooms=False)
    assert read_rows(capsys.readouterr().out) == {
        "llmsys": (2, CODE_TOKENS),
        "data_pipeline": (2, CODE_TOKENS),
        "launch": (2, CODE_TOKENS),
        "product": (6, 3 * CODE_TOKENS),
        "tools": (2, CODE_TOKENS),
        "tests": (2, CODE_TOKENS),
    }


def test_the_rooms_of_a_package_add_up_to_it(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size.print_table(checkout, with_rooms=True)
    rows = read_rows(capsys.readouterr().out)
    assert rows["llmsys/room"] == (1, CODE_TOKENS)
    assert rows["llmsys/*.py"] == (1, 0)
    assert rows["llmsys"] == (2, CODE_TOKENS)
    assert "llmsys/launch" not in rows


def test_named_paths_are_counted_and_a_missing_one_is_named(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = checkout / "tools" / "room" / "add.py"
    monkeypatch.setattr("sys.argv", ["size.py", str(file), str(checkout / "tests")])
    size.main()
    assert read_rows(capsys.readouterr().out)["total"] == (3, 2 * CODE_TOKENS)
    missing = str(checkout / "nowhere")
    monkeypatch.setattr("sys.argv", ["size.py", missing])
    with pytest.raises(SystemExit, match=f"size: {missing} does not exist: name files and folders"):
        size.main()
