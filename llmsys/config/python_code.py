"""Sections with `kind: python`: a class of the user's own code, its options, and the files that
fingerprint it.

Reads the user's Python files. Loading a config reads none and runs no code; `load_python_object`
does, where the object is used.
"""

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from llmsys.config.section import LocalPath, Section
from llmsys.errors import ConfigError

ENTRY_POINTS = "llmsys"
_PATH = re.compile(r"(?P<source>[^:]+):(?P<name>[A-Za-z_]\w*)")


class PythonCode(Section):
    """Fields of every section with `kind: python`."""

    path: str = Field(
        description="FILE.py:Class, package.module:Class, or the name of an entry point of the "
        "group `llmsys`. Relative paths start in the working directory."
    )
    options: dict[str, Any] = Field({}, description="Values of the fields of the class.")
    sources: tuple[LocalPath, ...] = Field(
        (),
        description="Further files that the code imports or reads; a change of one is a change of "
        "the code.",
    )

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        if not path or (":" in path and not _PATH.fullmatch(path)) or path.endswith(".py"):
            raise ValueError(
                f"{path!r} is not FILE.py:Class or package.module:Class. Use, say, "
                "my_rules.py:NoRecipes"
            )
        return path

    def __hash__(self) -> int:
        """Return a hash; pydantic's needs options that are hashable."""
        return hash((type(self), self.path, json.dumps(self.options, sort_keys=True, default=str)))

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that the fingerprint of the code covers: the one of the class, and `sources`."""
        return (_find_source(resolve_entry_point(self.path)), *self.sources)

    @property
    def class_name(self) -> str:
        """Name of the class, or of the entry point."""
        return self.path.rpartition(":")[2]


def compute_code_digest(code: PythonCode) -> str:
    """Return a digest of the source of a class and of its further files.

    Args:
        code: the section.

    Returns:
        32 hex digits.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in code.files:
        digest.update(hashlib.blake2b(read_source(path).encode()).digest())
    return digest.hexdigest()


def resolve_entry_point(path: str) -> str:
    """Return the path of a class.

    Args:
        path: `FILE.py:Class`, `package.module:Class`, or the name of an entry point.

    Returns:
        `FILE.py:Class` or `package.module:Class`.

    Raises:
        ConfigError: no installed package has an entry point of that name.
    """
    if ":" in path:
        return path
    known = {
        entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)
    }
    if path not in known:
        names = ", ".join(sorted(known)) or "none is installed"
        raise ConfigError(
            f"path: {path!r} is no entry point of the group {ENTRY_POINTS} ({names}). Use "
            "FILE.py:Class, or install the package that has it."
        )
    return known[path]


def _find_source(path: str) -> Path:
    source = path.rpartition(":")[0]
    if source.endswith(".py"):
        return Path(source)
    return _find_module_files(source)[-1]


def _find_module_files(module: str) -> list[Path]:
    """Return the files that an import of a module runs first: those of its packages, then its own.

    Nothing is imported, where `find_spec` of the standard library runs the packages of a module.
    """
    files: list[Path] = []
    names = module.split(".")
    spec = None
    for number in range(1, len(names) + 1):
        name = ".".join(names[:number])
        try:
            if number == 1:
                spec = importlib.util.find_spec(name)
            else:
                assert spec is not None
                spec = PathFinder.find_spec(name, spec.submodule_search_locations or [])
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            break
        if spec.origin and spec.origin.endswith(".py"):
            files.append(Path(spec.origin))
        elif number == len(names) or spec.origin:  # compiled, or no code; namespaces have no origin
            spec = None
            break
    if spec is None:
        raise ConfigError(
            f"path: {module!r}: there is no Python module {module}. Install its package, or use "
            "FILE.py:Class."
        )
    return files


def list_run_files(code: PythonCode) -> list[Path]:
    """List the files that run or are read when the class of a section is loaded.

    Args:
        code: the section.

    Returns:
        The packages of its module, the file of the class, and `sources`.

    Raises:
        ConfigError: there is no such module.
    """
    source = resolve_entry_point(code.path).rpartition(":")[0]
    own = [Path(source)] if source.endswith(".py") else _find_module_files(source)
    return [*own, *code.sources]


def read_source(path: Path) -> str:
    """Return the text of a Python file.

    Args:
        path: The file; relative to the working directory.

    Returns:
        Its text.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return io.TextIOWrapper(io.BytesIO(read_bytes(path)), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        raise _build_read_error(path, error) from None


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a Python file, or of a file that it reads.

    Args:
        path: The file; relative to the working directory.

    Returns:
        Its bytes.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise _build_read_error(path, error) from None


def _build_read_error(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"path: {path} cannot be read (in {Path.cwd()}): {error}. Correct the path; relative "
        "paths start in the working directory."
    )
