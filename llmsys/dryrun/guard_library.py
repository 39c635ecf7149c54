"""Compile and load the device guard of a pretended CUDA device.

Reads `pretended_device.cpp` and the headers of the installed torch. Writes the library into the
user's cache folder (`$XDG_CACHE_HOME/llmsys`, else `~/.cache/llmsys`), once for each version of
torch and of the source.

Invariants:
- torch is not imported here: it looks its CUDA hooks up once, and the library must be loaded
  before.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from llmsys.errors import ConfigError, build_missing_package_error

SOURCE = Path(__file__).with_name("pretended_device.cpp")
COMPILER_VARIABLE = "CXX"
DEFAULT_COMPILER = "g++"


def load_guard_library() -> ctypes.CDLL:
    """Return the guard's library, loaded into this process and compiled where the cache folder
    lacks it.

    Returns:
        The library; `llmsys_install_guard` is to be called after torch is imported.

    Raises:
        ConfigError: torch is imported already, is not installed, or the library cannot be compiled.
    """
    if "torch" in sys.modules:
        raise ConfigError(
            "torch is already imported in this process, and a pretended device must be registered "
            "before it. Start the dry run in a separate process: llmsys dryrun CONFIG nodes=1:8."
        )
    torch_folder = find_torch_folder()
    library = build_guard_library(torch_folder)
    # libtorch_cpu first and global: the guard's library takes its symbols from there.
    ctypes.CDLL(str(torch_folder / "lib" / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def find_torch_folder() -> Path:
    """Return the folder of the installed torch without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise build_missing_package_error("torch")
    return Path(spec.origin).parent


def build_guard_library(torch_folder: Path) -> Path:
    """Return the path of the compiled library.

    Raises:
        ConfigError: there is no compiler, it fails, or the cache folder cannot be made.
    """
    key = hashlib.sha256(
        SOURCE.read_bytes() + (torch_folder / "version.py").read_bytes()
    ).hexdigest()[:16]
    library = get_cache_folder() / f"pretended_device_{key}.so"
    if library.exists():
        return library
    compiler = os.environ.get(COMPILER_VARIABLE) or DEFAULT_COMPILER
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"The C++ compiler {compiler!r} is not on PATH, and a dry run compiles a device guard "
            "of 80 lines once. Install one (Debian and Ubuntu: apt install g++), or set "
            f"{COMPILER_VARIABLE} to another."
        )
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{library.parent}, where a dry run keeps its compiled device guard, cannot be made: "
            f"{error.strerror}. Set XDG_CACHE_HOME to a folder that you may write."
        ) from None
    partial = library.with_suffix(f".{os.getpid()}")
    flags = ("-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}")
    compiled = subprocess.run(
        (compiler, *flags, str(SOURCE), "-o", str(partial)),
        capture_output=True,
        text=True,
        check=False,
    )
    if compiled.returncode:
        raise ConfigError(
            f"{compiler} could not compile {SOURCE.name}: {_find_first_error(compiled.stderr)}. A "
            f"dry run needs a compiler with C++20, such as g++ 11; set {COMPILER_VARIABLE} to one."
        )
    partial.replace(library)  # atomic: several dry runs may start at once
    return library


def get_cache_folder() -> Path:
    """Return the folder of compiled libraries."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "llmsys"


def _find_first_error(output: str) -> str:
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
