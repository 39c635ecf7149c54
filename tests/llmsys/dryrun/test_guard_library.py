"""Laws of the compiled device guard: once for each torch, with a message where it cannot be
compiled.
"""

from pathlib import Path

import pytest

from llmsys.dryrun import guard_library
from llmsys.dryrun.guard_library import build_guard_library, find_torch_folder, load_guard_library
from llmsys.errors import ConfigError


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_missing_compiler_is_named_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError, match=r"'no-such-compiler' is not on PATH.*apt install g\+\+.*set CXX"
    ):
        build_guard_library(find_torch_folder())


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "old-compiler"
    compiler.write_text("#!/bin/sh\necho 'x.cpp:1: error: no C++20 here' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        ConfigError,
        match=r"could not compile pretended_device.cpp: x.cpp:1: error: no C\+\+20 here",
    ):
        build_guard_library(find_torch_folder())
    assert not list((tmp_path / "llmsys").glob("*.so"))


def test_a_cache_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError,
        match=r"file/llmsys, where .*: Not a directory\. Set XDG_CACHE_HOME to a folder",
    ):
        build_guard_library(find_torch_folder())


def test_the_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_guard_library(find_torch_folder())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build_guard_library(find_torch_folder()) == library
    assert library.parent == guard_library.get_cache_folder()


def test_a_process_that_has_imported_torch_is_too_late() -> None:
    import torch

    assert torch.__version__
    with pytest.raises(ConfigError, match="torch is already imported in this process"):
        load_guard_library()
