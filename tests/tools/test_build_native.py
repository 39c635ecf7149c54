"""The build of the compiled core never fails an installation."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.native_core import needs_compiler
from tests.helpers.stage_digest import ROOT
from tools import build_native
from tools.build_native import NativeBuildHook, build_library, find_compiler, read_source_digest


class WarningLog:
    """What a hook shows."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def build_hook(root: Path = ROOT) -> tuple[NativeBuildHook, WarningLog]:
    hook = object.__new__(NativeBuildHook)
    log = WarningLog()
    values: dict[str, Any] = {"root": str(root), "app": log}
    for name, value in values.items():
        setattr(hook, f"_BuildHookInterface__{name}", value)
    return hook, log


def test_without_a_compiler_the_reason_names_the_ways_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = build_library(ROOT, tmp_path / "core.so")
    assert reason == (
        "there is no C++ compiler (c++, g++, clang++, or $CXX). Install one, such as apt-get "
        "install g++, or set LLMSYS_NATIVE=ziglang"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["false", "no-such-compiler -O2"])
def test_a_compiler_that_fails_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("CXX", command)
    reason = build_library(ROOT, tmp_path / "core.so")
    assert reason is not None
    assert reason.startswith(f"`{command.split()[0]} ")
    assert not list(tmp_path.iterdir())


def test_the_switch_leaves_the_core_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMSYS_NATIVE", "0")
    assert build_library(ROOT, tmp_path / "core.so") == "LLMSYS_NATIVE=0 turns it off"


def test_the_compiler_of_the_package_index_is_asked_for_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook, _ = build_hook()
    monkeypatch.delenv("LLMSYS_NATIVE", raising=False)
    assert hook.dependencies() == []
    monkeypatch.setenv("LLMSYS_NATIVE", "ziglang")
    assert hook.dependencies() == ["ziglang>=0.13"]
    command = find_compiler()
    assert command is not None
    assert command[1:] == ["-m", "ziglang", "c++"]


def test_an_installation_without_a_core_is_pure_python_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLMSYS_NATIVE", "0")
    hook, log = build_hook()
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    assert data == {"force_include": {}}
    assert log.warnings == [
        "llmsys is installed without its compiled core: LLMSYS_NATIVE=0 turns it off. Data is "
        "prepared by Python, with the same result and more time."
    ]


@needs_compiler
def test_a_library_of_the_present_sources_is_kept(tmp_path: Path) -> None:
    library = tmp_path / "core.so"
    assert build_library(ROOT, library) is None
    assert read_source_digest(library) is not None
    before = os.stat(library).st_ino
    assert build_library(ROOT, library) is None
    assert os.stat(library).st_ino == before


@needs_compiler
def test_a_wheel_has_the_library_and_names_its_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def build(root: Path, output: Path) -> None:
        made.append(output)

    monkeypatch.setattr(build_native, "build_library", build)
    monkeypatch.delenv("LLMSYS_NATIVE", raising=False)
    hook, _ = build_hook()
    data: dict[str, Any] = {"force_include": {}}
    hook.initialize("standard", data)
    assert data["force_include"] == {str(made[0]): "llmsys/data_pipeline/core/llmsys_core.so"}
    assert data["tag"].startswith("py3-none-")
    assert data["pure_python"] is False
    editable: dict[str, Any] = {"force_include": {}}
    hook.initialize("editable", editable)
    assert editable == {"force_include": {}}
    assert made[1] == ROOT / "data_pipeline" / "core" / "llmsys_core.so"


def test_a_file_that_is_no_library_has_no_digest(tmp_path: Path) -> None:
    assert read_source_digest(tmp_path / "missing.so") is None
    (tmp_path / "text.so").write_text("text")
    assert read_source_digest(tmp_path / "text.so") is None
