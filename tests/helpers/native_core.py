"""The compiled core for tests: built from the present sources."""

import shutil
from pathlib import Path

import pytest

from llmsys.data_pipeline.core.native import NativeCore
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
