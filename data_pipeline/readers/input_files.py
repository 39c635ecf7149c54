"""Find the input files that a configuration names: paths, URLs, patterns and lists of them.

Reads `data.inputs`; returns each existing file once, sorted, and an identity per file that changes when the file does.

Patterns may lead through symbolic links.

Invariants:
- `**` enters every folder once: by a path without symbolic links where there is one, otherwise by the first link in
  alphabetical order. Links that form a cycle therefore end.
- Without `**` the result is that of `glob.glob`.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_pipeline.core.journal import Journal
from data_pipeline.readers.input_stream import compute_stat_stamp, format_file_name, open_input_stream
from data_pipeline.readers.remote_file import (
    compute_remote_digest,
    get_remote_identity,
    get_remote_size,
    list_remote_files,
)
from llmsys.errors import DataError
from llmsys.local_files import is_remote
from llmsys.log import REDACTED

_ANY_DEPTH = "**"


def match_files(pattern: str) -> list[str]:
    """Return the paths that a pattern with `*`, `?`, `[…]` and `**` matches, as `glob.glob` does."""
    parts = pattern.split(os.sep)
    if _ANY_DEPTH not in parts:
        return glob.glob(pattern)
    index = parts.index(_ANY_DEPTH)
    begin, after = os.sep.join(parts[:index]), [part for part in parts[index + 1 :] if part]
    while after[:1] == [_ANY_DEPTH]:
        del after[0]
    rest = os.sep.join(after)
    found: dict[str, None] = {}  # keeps the order
    for base in [os.sep if index else os.curdir] if not begin else glob.glob(begin):
        for folder in _iter_folders(base) if os.path.isdir(base) else ():
            found.update(dict.fromkeys(match_files(os.path.join(glob.escape(folder), rest or "*"))))
    return list(found)


def _iter_folders(top: str) -> Iterator[str]:
    """Yield a folder and all folders below it, each once; those reached by symbolic links last."""
    real = Path(top).resolve()
    seen = {(about.st_dev, about.st_ino) for about in map(Path.stat, real.parents)}  # a link to a parent is a cycle
    waiting = [top]
    while waiting:
        links: list[str] = []
        for start in sorted(waiting):
            yield from _walk_folders(start, seen, links)
        waiting = links


def _walk_folders(top: str, seen: set[tuple[int, int]], links: list[str]) -> Iterator[str]:
    """Yield unseen folders that no link leads to, and append links to folders to `links`."""
    stack = [top]
    while stack:
        folder = stack.pop()
        try:
            about = Path(folder).stat()
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:  # a folder that nobody may read matches nothing, as with glob
            continue
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        yield folder
        # As in glob, a leading dot hides a folder from patterns.
        below = [entry for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]
        links += [entry.path for entry in below if entry.is_symlink()]
        stack += [entry.path for entry in reversed(below) if not entry.is_symlink()]


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


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
    ".txt",
    ".md",
)
_LISTS_IN_LISTS = 8


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """Return the files that the patterns match, sorted and each once.

    Args:
        patterns: paths or URLs, with `*`, `?`, `[…]` and `**`; or `@` and the path of a list, one pattern a line. `**`
            enters each folder once, whatever symbolic links lead to it.

    Returns:
        Paths and URLs. A path that is not UTF-8 holds surrogates (PEP 383).

    Raises:
        DataError: if a pattern matches no file, a list cannot be read, or a URL is redacted.
    """
    if not patterns:
        raise DataError("data.inputs is empty. Name crawl files, such as data.inputs='[crawl/*.warc.gz]'.")
    found: set[str] = set()
    for pattern, where in _iter_patterns(patterns, "data.inputs", 0):
        if is_remote(pattern) and REDACTED in pattern:
            raise DataError(
                f"{where}: '{pattern}' comes from the stored config of an earlier run, without its secrets. "
                "Give the URL again, with its password, token or signature."
            )
        found.update(_list_remote_files(pattern, where) if is_remote(pattern) else _list_local_files(pattern, where))
    return sorted(found)


def get_input_name(path: str) -> str:
    """Return the last component of an input's path as UTF-8.

    Args:
        path: a path or URL; the query of a URL is ignored.

    Returns:
        The file name, see `format_file_name`.
    """
    return format_file_name(Path(path.split("?", 1)[0] if is_remote(path) else path).name)


def get_input_size(path: str) -> int:
    """Return the size of an input.

    Args:
        path: a path or URL.

    Returns:
        Bytes; 0 if the size cannot be found.
    """
    if is_remote(path):
        return get_remote_size(path)
    return os.path.getsize(path) if os.path.exists(path) else 0


def compute_file_stamp(path: str) -> list[int]:
    """Return size, modification time and inode of a local file: a file with an unchanged stamp is not read again.

    Args:
        path: a path.

    Returns:
        The stamp, see `compute_stat_stamp`; [] if there is no such file.
    """
    try:
        return compute_stat_stamp(os.stat(path))
    except OSError:
        return []


def compute_input_identity(journal: Journal, path: str) -> str:
    """Return the identity of an input: it is read again when its identity changes.

    Args:
        journal: caches the digests of local files.
        path: a path or URL.

    Returns:
        The digest of a local file; the entity tag or modification time of a remote one.
    """
    return get_remote_identity(path, compute_remote_digest) if is_remote(path) else journal.get_input_digest(Path(path))


def _iter_patterns(patterns: Sequence[str], where: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield each pattern and the location that names it; lists are replaced by their patterns."""
    for pattern in patterns:
        if not pattern.startswith("@"):
            yield pattern, where
            continue
        if depth == _LISTS_IN_LISTS:
            raise DataError(f"{where}: '{pattern}' is nested in {depth} lists. Use fewer levels.")
        for number, line in enumerate(_read_list_lines(pattern[1:], where), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                yield from _iter_patterns([line.strip()], f"{pattern[1:]}, line {number}", depth + 1)


def _read_list_lines(path: str, where: str) -> list[str]:
    try:
        with open_input_stream(path) as source:
            # A path may hold bytes that are not UTF-8 (PEP 383); a text file holds no NUL.
            content = source.read_block(0, source.size)
            if b"\0" in content:
                raise OSError("it is not a text file")
            return content.decode("utf-8", "surrogateescape").splitlines()
    except OSError as error:
        raise DataError(
            f"{where}: the list '@{path}' cannot be read: {error}. Give a text file with one path per line."
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
    """Return whether a wildcard matched a folder that is named like a data file: reading it reports the error."""
    return folder.endswith(_DATA_FILE) and os.path.normpath(pattern) != folder


def _list_remote_files(pattern: str, where: str) -> list[str]:
    files, is_folder = list_remote_files(pattern)
    if not files:
        raise DataError(_format_no_match(pattern, [pattern.rstrip("/")] if is_folder else [], where))
    return files


def _find_pattern(folder: str) -> str | None:
    """Return the pattern of the first data file of a folder, such as /*.parquet; None if there is none."""
    for parent, below, names in os.walk(folder):
        below.sort()
        for name in sorted(names):
            if ends := [end for end in _DATA_FILE if end in name and name.endswith((end, ".gz", ".zst", ".lz4"))]:
                deep = "" if os.path.samefile(parent, folder) else f"/{_ANY_DEPTH}"
                return f"{deep}/*{name[name.index(ends[0]) :]}"
    return None


def _format_no_match(pattern: str, folders: Sequence[str], where: str) -> str:
    if folders:
        inside = "/*.warc.gz" if is_remote(pattern) else _find_pattern(folders[0])
        if inside is None:
            return f"{where}: '{pattern}' is a folder without files to read. Give one with {', '.join(_DATA_FILE)}."
        return f"{where}: '{pattern}' is a folder, not a file. Give the files in it: '{folders[0]}{inside}'."
    working_directory = "" if is_remote(pattern) else f" (in {Path.cwd()})"
    fix = (
        "Correct the address."
        if is_remote(pattern)
        else "Correct the pattern; relative paths start in the working directory."
    )
    return f"{where}: no file matches '{pattern}'{working_directory}. {fix}"
