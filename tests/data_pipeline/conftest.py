"""The compiled core as a fixture: tests of what it computes run with it and without it."""

import pytest

from llmsys.data_pipeline.core.native import CoreUnavailableError, NativeCore
from tests.helpers.native_core import find_or_build_core, needs_compiler, use_core


@pytest.fixture(scope="session")
def built_core(tmp_path_factory: pytest.TempPathFactory) -> NativeCore:
    return find_or_build_core(tmp_path_factory.mktemp("native"))


@pytest.fixture(params=[pytest.param("compiled", marks=needs_compiler), "python"])
def either_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the compiled core, and without it."""
    compiled = request.param == "compiled"
    core = request.getfixturevalue("built_core") if compiled else CoreUnavailableError("off")
    use_core(monkeypatch, core)
    return str(request.param)
