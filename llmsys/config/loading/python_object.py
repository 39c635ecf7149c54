"""Run the user's code of a section with `kind: python`, and build its object.

Invariants:
- The fields of the class are its options, so that a wrong option is an error with the key, as in
  any section.
- Nothing runs before the user has consented to its bytes (`trusted_code.py`).
- A file is compiled from the bytes that were checked, and a module from its source, never from a
  cached .pyc: what runs is what its digest says.
"""

import importlib
import os
import sys
import types
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from llmsys.config.loading.merge import ConfigLayer
from llmsys.config.loading.trusted_code import require_trusted_code
from llmsys.config.loading.validation_errors import build_config_error
from llmsys.config.python_code import (
    PythonCode,
    list_run_files,
    read_bytes,
    resolve_entry_point,
)
from llmsys.config.section import Section
from llmsys.errors import ConfigError

Loaded = TypeVar("Loaded", bound=Section)


def load_python_object(code: PythonCode, base: type[Loaded], key: str) -> Loaded:
    """Run the user's code and build the object of a section.

    Args:
        code: the section.
        base: class that the user's class must extend.
        key: key of the section, for messages, such as data.rules.1.

    Returns:
        The object, with its options validated.

    Raises:
        UntrustedCodeError: the user has not consented to the code; none of it has run.
        ConfigError: the file or class is missing, is not of the base, or an option is wrong.
    """
    path = resolve_entry_point(code.path)
    source, _, name = path.rpartition(":")
    files = require_trusted_section(code, key)
    module = _run_file(*files[0]) if source.endswith(".py") else _import_module(source, key)
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


def require_trusted_section(code: PythonCode, key: str) -> list[tuple[Path, bytes]]:
    """Check that the user consents to the code of a section; none of it runs.

    Args:
        code: the section.
        key: key of the section, for messages.

    Returns:
        The files that would run or be read, with their bytes; without packages, that of the class
        is the first.

    Raises:
        UntrustedCodeError: the user has not consented.
        ConfigError: a file is missing.
    """
    files = [(file, read_bytes(file)) for file in list_run_files(code)]
    require_trusted_code(files, key)
    return files


def _run_file(path: Path, source: bytes) -> types.ModuleType:
    module = types.ModuleType(f"llmsys_python_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # pydantic resolves annotations in it
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be imported: {describe_error(error, path)}. Correct it: python {path}"
        ) from error
    return module


def _import_module(source: str, key: str) -> types.ModuleType:
    prefix = sys.pycache_prefix
    # a folder without .pyc files: those next to a source may be of another one
    sys.pycache_prefix = os.devnull
    try:
        return importlib.import_module(source)
    except Exception as error:
        raise ConfigError(
            f"{key}.path: {source} cannot be imported: {type(error).__name__}: {error}. Install "
            "its package, or correct it."
        ) from error
    finally:
        sys.pycache_prefix = prefix


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
