"""The compiled core for tests: built from the present sources, or turned off."""

import shutil
from pathlib import Path

import pytest

from llmsys.data_pipeline.core.native import LIBRARY, CoreUnavailableError, NativeCore
from llmsys.data_pipeline.rules import datatrove_repetition, gopher_quality
from llmsys.data_pipeline.text import compiled_words
from tests.helpers.stage_digest import ROOT
from tools.build_native import build_library, find_compiler


def has_compiler() -> bool:
    command = find_compiler()
    return command is not None and shutil.which(command[0]) is not None


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


def build_core(folder: Path) -> NativeCore:
    library = folder / "llmsys_core.so"
    reason = build_library(ROOT, library)
    assert reason is None, reason
    return NativeCore(library)


def find_or_build_core(folder: Path) -> NativeCore:
    """Return the installed core, or one that is built where it does not fit."""
    try:
        return NativeCore(LIBRARY)
    except CoreUnavailableError:
        return build_core(folder)


def use_core(monkeypatch: pytest.MonkeyPatch, core: NativeCore | CoreUnavailableError) -> None:
    """Let words, n-grams and lines be found by this core."""
    for module in (compiled_words, datatrove_repetition, gopher_quality):
        monkeypatch.setattr(module, "load_core", lambda: core)
