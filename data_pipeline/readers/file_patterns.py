"""Match files by glob patterns, in which `**` enters every folder once, whatever symbolic links
lead to it.

Invariants:
- `**` enters a folder by a path without symbolic links where there is one, otherwise by the first
  link in alphabetical order. Links that form a cycle therefore end.
- Without `**` the result is that of `glob.glob`.
"""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

ANY_DEPTH = "**"


def match_files(pattern: str) -> list[str]:
    """Return the paths that a pattern with `*`, `?`, `[…]` and `**` matches, as `glob.glob`
    does.
    """
    parts = pattern.split(os.sep)
    if ANY_DEPTH not in parts:
        return glob.glob(pattern)
    index = parts.index(ANY_DEPTH)
    begin = os.sep.join(parts[:index])
    after = [part for part in parts[index + 1 :] if part]
    while after[:1] == [ANY_DEPTH]:
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
    # a link to a parent is a cycle
    seen = {(about.st_dev, about.st_ino) for about in map(Path.stat, real.parents)}
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
