"""Sections with `kind: python`: a class of the user's own code, its options, and the files that
fingerprint it.

Reads the user's Python files. Loading a config reads none and runs no code; `load_python_object`
does, where the object is used.

Invariants:
- The fields of the class are its options, so that a wrong option is an error with the key, as in
  any section.
- A file is compiled from its present text, never from a cached .pyc: what runs is what its digest
  says.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError, field_validator

from llmsys.config.loading.merge import ConfigLayer
from llmsys.config.loading.validation_errors import build_config_error
from llmsys.config.section import LocalPath, Section
from llmsys.errors import ConfigError

ENTRY_POINTS = "llmsys"
_PATH = re.compile(r"(?P<source>[^:]+):(?P<name>[A-Za-z_]\w*)")

Loaded = TypeVar("Loaded", bound=Section)


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
        return (_find_source(_resolve_entry_point(self.path)), *self.sources)

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
        digest.update(hashlib.blake2b(_read_source(path).encode()).digest())
    return digest.hexdigest()


def load_python_object(code: PythonCode, base: type[Loaded], key: str) -> Loaded:
    """Run the user's code and build the object of a section.

    Args:
        code: the section.
        base: class that the user's class must extend.
        key: key of the section, for messages, such as data.rules.1.

    Returns:
        The object, with its options validated.

    Raises:
        ConfigError: the file or class is missing, is not of the base, or an option is wrong.
    """
    path = _resolve_entry_point(code.path)
    source, _, name = path.rpartition(":")
    module = _run_file(Path(source)) if source.endswith(".py") else _import_module(source, key)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, base) and found is not base):
        known = [
            one.__name__
            for one in vars(module).values()
            if isinstance(one, type) and issubclass(one, base) and one is not base
        ]
        there = (
            f"Use one of these: {', '.join(known)}"
            if known
            else f"Write class {name}({base.__name__})"
        )
        raise ConfigError(
            f"{key}.path: {source} has no class {name} that extends {base.__name__}. {there}."
        )
    if missing := getattr(found, "__abstractmethods__", None):
        raise ConfigError(
            f"{key}.path: {code.path} has no {' and no '.join(sorted(missing))}. Write def "
            f"{min(missing)}."
        )
    try:
        return found.model_validate(code.options)
    except ValidationError as error:
        layer = ConfigLayer(code.options, {(): f"{key}.options"})
        raise build_config_error(error, found, layer, f"{key}.options") from None


def _resolve_entry_point(path: str) -> str:
    """Return the path of a class; that of the entry point where a name is given."""
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
    try:
        spec = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise ConfigError(
            f"path: {path!r}: there is no Python module {source}. Install its package, or use "
            "FILE.py:Class."
        )
    return Path(spec.origin)


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"path: {path} cannot be read (in {Path.cwd()}): {error}. Correct the path; relative "
            "paths start in the working directory."
        ) from None


def _run_file(path: Path) -> types.ModuleType:
    module = types.ModuleType(f"llmsys_python_{path.stem}")
    module.__file__ = str(path)
    text = _read_source(path)
    sys.modules[module.__name__] = module  # pydantic resolves annotations in it
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be imported: {describe_error(error, path)}. Correct it: python {path}"
        ) from error
    return module


def _import_module(source: str, key: str) -> types.ModuleType:
    try:
        return importlib.import_module(source)
    except Exception as error:
        raise ConfigError(
            f"{key}.path: {source} cannot be imported: {type(error).__name__}: {error}. Install "
            "its package, or correct it."
        ) from error


def describe_error(error: BaseException, path: Path) -> str:
    """Return the type, text and line of an error in the user's code.

    Args:
        error: the error, with its traceback.
        path: file of the code.

    Returns:
        Such as `ZeroDivisionError: division by zero, line 12`.
    """
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == str(path):
            line = frame.tb_lineno
        frame = frame.tb_next
    return f"{type(error).__name__}: {error}" + ("" if line is None else f", line {line}")
