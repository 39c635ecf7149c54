"""Which files a configuration names: paths, URLs, patterns and lists in, existing files out, each once, in order.

Reads `data.inputs`; gives paths and URLs as text, sorted, and for each an identity that changes when the file does.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_pipeline.core.journal import Journal
from data_pipeline.readers.file_name import format_file_name
from data_pipeline.readers.input_stream import compute_stat_stamp, open_input_stream
from data_pipeline.readers.match_files import match_files
from data_pipeline.readers.remote_file import (
    compute_remote_digest,
    get_remote_identity,
    get_remote_size,
    is_remote,
    list_remote_files,
)
from llmsys.errors import DataError
from llmsys.redact import REDACTED

_DATA_FILE = (
    ".warc",
    ".wet",
    ".arc",
    ".gz",
    ".zst",
    ".lz4",
    ".json",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".arrow",
    ".feather",
)
_LISTS_IN_LISTS = 8


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the files that the patterns match, sorted; DataError when a pattern matches none.

    A pattern is a path or a URL, with `*`, `?`, `[…]` and `**`, or `@` and a file with one pattern a line. `**` enters
    each folder once, whatever symbolic links lead to it.
    """
    if not patterns:
        raise DataError("data.inputs is empty. Name crawl files, such as data.inputs='[crawl/*.warc.gz]'.")
    found: set[str] = set()
    for pattern, where in _iter_patterns(patterns, "data.inputs", 0):
        if is_remote(pattern) and REDACTED in pattern:
            raise DataError(
                f"{where}: '{pattern}' comes from a record of an earlier run, which holds no secrets. "
                f"Give the address again, with its password, token or signature."
            )
        found.update(_list_remote_files(pattern, where) if is_remote(pattern) else _list_local_files(pattern, where))
    return sorted(found)


def get_input_name(path: str) -> str:
    """Return the last part of a path or URL, as UTF-8."""
    return format_file_name(Path(path.split("?", 1)[0] if is_remote(path) else path).name)


def get_input_size(path: str) -> int:
    """Bytes of an input; 0 when it cannot be known."""
    if is_remote(path):
        return get_remote_size(path)
    return os.path.getsize(path) if os.path.exists(path) else 0


def compute_file_stamp(path: str) -> list[int]:
    """Return what a local file must change to be looked at again, see `compute_stat_stamp`; [] without a file."""
    try:
        return compute_stat_stamp(os.stat(path))
    except OSError:
        return []


def compute_input_identity(journal: Journal, path: str) -> str:
    """Return what decides whether an input is read again: the digest of a local file, tag or time of a remote one."""
    return get_remote_identity(path, compute_remote_digest) if is_remote(path) else journal.get_input_digest(Path(path))


def _iter_patterns(patterns: Sequence[str], where: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield each pattern with the place that names it, those of lists in their place."""
    for pattern in patterns:
        if not pattern.startswith("@"):
            yield pattern, where
            continue
        if depth == _LISTS_IN_LISTS:
            raise DataError(f"{where}: '{pattern}' is a list in {depth} lists. Name the files in fewer.")
        for number, line in enumerate(_read_list_lines(pattern[1:], where), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                yield from _iter_patterns([line.strip()], f"{pattern[1:]}, line {number}", depth + 1)


def _read_list_lines(path: str, where: str) -> list[str]:
    try:
        with open_input_stream(path) as source:
            # A path may hold bytes that are not UTF-8 (PEP 383); a text file holds no NUL.
            content = source.read_at(0, source.size)
            if b"\0" in content:
                raise OSError("it is no text")
            return content.decode("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise DataError(
            f"{where}: the list '@{path}' cannot be read: {error}. Name a text file with a path a line."
        ) from error


def _list_local_files(pattern: str, where: str) -> list[str]:
    matches = [os.path.normpath(match) for match in match_files(pattern)]
    if not matches and os.path.exists(pattern):
        matches = [os.path.normpath(pattern)]  # a name with brackets in it
    files = [match for match in matches if not os.path.isdir(match) or _is_folder_named_like_file(match, pattern)]
    if not files:
        raise DataError(_format_no_match(pattern, matches, where))
    return files


def _is_folder_named_like_file(folder: str, pattern: str) -> bool:
    """Whether a folder that a wildcard matches stands where a file should be: reading it will say so."""
    return folder.endswith(_DATA_FILE) and os.path.normpath(pattern) != folder


def _list_remote_files(pattern: str, where: str) -> list[str]:
    files, is_folder = list_remote_files(pattern)
    if not files:
        raise DataError(_format_no_match(pattern, [pattern.rstrip("/")] if is_folder else [], where))
    return files


def _format_no_match(pattern: str, folders: Sequence[str], where: str) -> str:
    if folders:
        return f"{where}: '{pattern}' is a folder, not a file. Name the files in it: '{folders[0]}/*.warc.gz'."
    place = "" if is_remote(pattern) else f" (in {Path.cwd()})"
    mend = (
        "Correct the address."
        if is_remote(pattern)
        else "Correct the pattern; relative ones start in the working directory."
    )
    return f"{where}: no file matches '{pattern}'{place}. {mend}"
