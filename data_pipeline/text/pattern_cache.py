"""Compile regular expressions once per machine.

Python compiles an expression with classes of thousands of characters in 10 to 100 ms, in every
process anew. Its program is a list of integers that only depends on the expression and on the
version of Python, so the first process writes it into the cache folder, and others read it.

Reads and writes `patterns/` in the cache folder.

Invariants:
- The expression is the one that `re.compile` returns. Without the internals of `re` that are
  used here, with a file that does not fit, or without a folder to write to, `re.compile` is used.
"""

import hashlib
import marshal
import re
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.paths import get_cache_folder

try:
    _sre: Any = import_module("_sre")
    _parser: Any = import_module("re._parser")
    _compiler: Any = import_module("re._compiler")
except ImportError:  # another Python than CPython
    _sre = None

_DIGEST_BYTES = 16


def load_pattern(text: str) -> re.Pattern[str]:
    """Return a compiled expression.

    Args:
        text: The expression, with its flags inside.

    Returns:
        What `re.compile(text)` returns, from the cache if it was compiled before.
    """
    if _sre is None:
        return re.compile(text)
    path = _locate_program(text)
    if (known := _read_program(path)) is not None:
        return _build_pattern(text, known)
    program = _compile_program(text)
    if program is None:
        return re.compile(text)
    # A full or read-only disk costs the time to compile, and nothing else.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        data = marshal.dumps(program)
        write_bytes_atomically(path, _compute_digest(data) + data)
    return _build_pattern(text, program)


def _read_program(path: Path) -> tuple[Any, ...] | None:
    """Return a stored program; None if there is none, or its digest does not fit."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    data = stored[_DIGEST_BYTES:]
    if stored[:_DIGEST_BYTES] != _compute_digest(data):
        return None
    program: tuple[Any, ...] = marshal.loads(data)
    return program


def _compute_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def _locate_program(text: str) -> Path:
    """Return the path of an expression's program. Its name has the version of Python, whose
    Unicode tables are in the program.
    """
    version = f"{sys.version}\0{_sre.MAGIC}\0{text}".encode("utf-8", "surrogatepass")
    return get_cache_folder() / "patterns" / _compute_digest(version).hex()


def _compile_program(text: str) -> tuple[Any, ...] | None:
    """Return flags, code, number of groups and names of groups; None where `re` differs."""
    try:
        parsed = _parser.parse(text)
        code = _compiler._code(parsed, 0)
        state = parsed.state
        # marshal knows plain integers only, and the compiler writes named ones too
        plain = [int(word) for word in code]
        return int(state.flags), plain, state.groups, dict(state.groupdict)
    except (AttributeError, TypeError):
        return None


def _build_pattern(text: str, program: tuple[Any, ...]) -> re.Pattern[str]:
    flags, code, groups, names = program
    by_number: list[str | None] = [None] * groups
    for name, number in names.items():
        by_number[number] = name
    pattern: re.Pattern[str] = _sre.compile(text, flags, code, groups - 1, names, tuple(by_number))
    return pattern
