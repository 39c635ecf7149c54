"""Build the compiled core while the package is built or installed: a hook of hatchling.

The compiler is $CXX, else c++, g++ or clang++ of the machine. With LLMSYS_NATIVE=ziglang it is that
of the package `ziglang` (100 MB), for machines without one. Without any, or with LLMSYS_NATIVE=0,
the package has no core: Python does the same work with the same result, and a warning says so.

Reads `native/`, writes `data_pipeline/core/llmsys_core.so`, for a wheel `build/llmsys_core.so`.

Invariants:
- A compiler that fails costs the core and never the installation.
- A library that was built from the present sources is kept.
"""

import ctypes
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILERS = ("c++", "g++", "clang++")
PACKAGE = "ziglang"  # of the package index: a compiler for machines without one
COMPILE_SECONDS = 600
# In the wheel `data_pipeline` is a package of llmsys.
IN_WHEEL = "llmsys/data_pipeline/core/llmsys_core.so"


def load_native_module(root: Path) -> ModuleType:
    """Load `data_pipeline/core/native.py` by its path: llmsys is not installed yet.

    Args:
        root: The checkout.

    Returns:
        The module.
    """
    path = root / "data_pipeline" / "core" / "native.py"
    if not path.exists():
        path = root / "llmsys" / "data_pipeline" / "core" / "native.py"
    spec = importlib.util.spec_from_file_location("llmsys_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_compiler() -> list[str] | None:
    """Find a C++ compiler.

    Returns:
        Its command, or None.
    """
    if os.environ.get("LLMSYS_NATIVE") == PACKAGE:
        return [sys.executable, "-m", PACKAGE, "c++"]
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    if found := next(filter(shutil.which, COMPILERS), None):
        return [found]
    return None


def build_library(root: Path, output: Path, flags: tuple[str, ...] = ()) -> str | None:
    """Compile the core, unless the output was built from the same sources.

    Args:
        root: The checkout.
        output: The library to write.
        flags: More flags of the compiler, such as those of a sanitizer.

    Returns:
        None, or the reason why there is no library.
    """
    native = load_native_module(root)
    if os.environ.get(native.SWITCH) == "0":
        return f"{native.SWITCH}=0 turns it off"
    compiler = find_compiler()
    if compiler is None:
        return (
            f"there is no C++ compiler ({', '.join(COMPILERS)}, or $CXX). Install one, such as "
            f"apt-get install g++, or set LLMSYS_NATIVE={PACKAGE}"
        )
    digest = native.compute_source_digest(root / "native")
    if not flags and read_source_digest(output) == digest:
        return None
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        made = Path(folder) / output.name
        command = [
            *compiler,
            *native.FLAGS,
            f'-DLLMSYS_SOURCES="{digest}"',
            *flags,
            str(root / "native" / "core.cpp"),
            "-o",
            str(made),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"`{shlex.join(command)}` did not finish: {error}"
        if done.returncode:
            return f"`{shlex.join(command)}` ended with {done.returncode}: {done.stderr[-2000:]}"
        # By rename: a process may have the old one mapped.
        made.replace(output)
    return None


def read_source_digest(library: Path) -> str | None:
    """Read the digest of the sources from a library.

    Args:
        library: A file that may be missing, or no library.

    Returns:
        The digest, or None.
    """
    try:
        function = ctypes.CDLL(str(library)).llmsys_sources
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_char_p
    return str(function().decode())


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Builds the core before the files of a wheel or of an editable install are collected."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Ask for the compiler of the package index, where that is wanted."""
        return [f"{PACKAGE}>=0.13"] if os.environ.get("LLMSYS_NATIVE") == PACKAGE else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library, and add it to a wheel, whose tag then names the platform."""
        root = Path(self.root)
        native = load_native_module(root)
        output = native.LIBRARY if version == "editable" else root / "build" / native.LIBRARY.name
        output.parent.mkdir(exist_ok=True)
        reason = build_library(root, output)
        if reason is not None:
            self.app.display_warning(
                f"llmsys is installed without its compiled core: {reason}. Data is prepared by "
                "Python, with the same result and more time."
            )
            return
        if version == "editable":
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"
        build_data["force_include"][str(output)] = IN_WHEEL
