"""A regular expression from the cache matches what a compiled one matches, whatever is in the
cache folder.
"""

import re
from pathlib import Path

import pytest

from llmsys.data_pipeline.text import pattern_cache
from llmsys.data_pipeline.text.pattern_cache import load_pattern

TEXT = r"(?iu)(?P<name>[à-ÿ]+)(?<=é)(\d{2,3}|x)*$"
SAMPLE = "un café12x"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path))
    return tmp_path / "patterns"


def find_groups(pattern: re.Pattern[str]) -> tuple[object, ...]:
    found = pattern.search(SAMPLE)
    return pattern.flags, pattern.groups, pattern.groupindex, found and (found.span(), found[0])


def forbid_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(text: str) -> None:
        raise AssertionError(f"{text} was compiled again")

    monkeypatch.setattr(pattern_cache, "_compile_program", fail)


def test_a_stored_expression_is_the_compiled_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = find_groups(re.compile(TEXT))
    assert expected[-1] is not None
    assert find_groups(load_pattern(TEXT)) == expected
    assert len(list(folder.iterdir())) == 1
    forbid_compilation(monkeypatch)
    assert find_groups(load_pattern(TEXT)) == expected


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * 100])
def test_a_damaged_file_is_compiled_again(folder: Path, damage: bytes) -> None:
    load_pattern(TEXT)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + damage)
    assert find_groups(load_pattern(TEXT)) == find_groups(re.compile(TEXT))
    assert path.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_no_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.joinpath("file").write_text("")
    monkeypatch.setenv("LLMSYS_CACHE", str(folder.parent / "file"))
    assert find_groups(load_pattern(TEXT)) == find_groups(re.compile(TEXT))


def test_a_python_with_other_internals_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(pattern_cache._compiler, "_code")
    assert find_groups(load_pattern(TEXT)) == find_groups(re.compile(TEXT))
    assert not folder.exists()
