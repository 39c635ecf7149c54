"""Values of profiles are those of the parser, whether they are stored or not."""

from pathlib import Path
from typing import Any

import pytest

from llmsys.data_pipeline.language import profile_files
from llmsys.data_pipeline.language.profile_files import read_profile_values
from llmsys.errors import ConfigError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMSYS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_profiles(folder: Path, *texts: str) -> list[Path]:
    paths = [folder / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return paths


def refuse_to_parse(*arguments: Any) -> None:
    raise AssertionError("a profile was parsed again")


def test_profiles_are_parsed_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_profiles(tmp_path, "name: One\nlist: [1, 2.5, no, x]", "", "{a: {b: [é]}}")
    expected = [{"name": "One", "list": [1, 2.5, "no", "x"]}, None, {"a": {"b": ["é"]}}]
    assert read_profile_values(paths) == expected
    (stored,) = (cache / "profiles").iterdir()
    monkeypatch.setattr(profile_files, "parse_profile", refuse_to_parse)
    assert read_profile_values(paths) == expected
    paths[0].write_text("name: Two")
    with pytest.raises(AssertionError, match="parsed again"):
        read_profile_values(paths)
    monkeypatch.undo()
    monkeypatch.setenv("LLMSYS_CACHE", str(cache))
    assert read_profile_values(paths) == [{"name": "Two"}, *expected[1:]]
    assert read_profile_values(paths[:1]) == [{"name": "Two"}]
    assert stored.exists()


def test_damaged_values_are_parsed_again(cache: Path, tmp_path: Path) -> None:
    paths = write_profiles(tmp_path, "name: One")
    assert read_profile_values(paths) == [{"name": "One"}]
    (stored,) = (cache / "profiles").iterdir()
    for content in (b"", stored.read_bytes()[:-3], stored.read_bytes().replace(b"One", b"Two")):
        stored.write_bytes(content)
        assert read_profile_values(paths) == [{"name": "One"}]
        assert b"One" in stored.read_bytes()


@pytest.mark.parametrize("text", ["a: .nan", "{b: [1, -.inf]}"])
def test_values_that_json_changes_are_not_stored(cache: Path, tmp_path: Path, text: str) -> None:
    paths = write_profiles(tmp_path, text)
    assert repr(read_profile_values(paths)) == repr(read_profile_values(paths))
    assert not (cache / "profiles").exists()


def test_no_folder_for_the_cache_is_no_error(cache: Path, tmp_path: Path) -> None:
    cache.write_text("a file")
    assert read_profile_values(write_profiles(tmp_path, "name: One")) == [{"name": "One"}]


def test_a_profile_that_is_no_text_is_refused(cache: Path, tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match=r"odd\.yaml is not UTF-8 text. Give a YAML file"):
        read_profile_values([path])
