"""Order the files of a repository so that imported files come before those that import them.

Imports are found by expressions, one for each of the usual languages, and resolved by path: first
in the folder of the importing file and those above it, then anywhere in the repository.

Invariants:
- The order depends on paths and imports alone, not on the order in which files are given.
- Time grows with files and imports as a sort does, whatever the files import. One repository at a
  time is in memory: paths of at most `MAX_FILES` files, and at most `MAX_EDGES` imports.
"""

import heapq
import posixpath
import re
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.document_order import RepositoryOrder
from llmsys.data_pipeline.core.document_schema import hash_positions
from llmsys.errors import DataError

# Columns of encoded files, only with data.document_order.kind=repository.
REPOSITORY_FIELDS = (
    pa.field("repository", pa.string()),
    pa.field("path", pa.string()),
    pa.field("imports", pa.list_(pa.string())),
)
MAX_IMPORTS = 256  # of a file
MAX_FILES = 50_000  # a larger repository is not ordered: its files are only next to each other
MAX_EDGES = 2_000_000  # further imports of a repository do not count
_MAX_PACKAGE_FILES = 64  # of a folder that is imported as one
_MAX_FOLDERS = 32  # above a file, in which an import is searched
_MAX_PARTS = 8  # of the end of a path by which a file is found
_MAX_NAME = 512
_MAX_PATH = 1_024

_PYTHON = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]*(?:\(([^()]{0,8192})|([\w, \t]*))"
    r"|import[ \t]+([\w., \t]+))",
    re.MULTILINE,
)
_QUOTED = {
    "c": re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]{1,512})[">]', re.MULTILINE),
    "javascript": re.compile(
        r"""(?:\bfrom|\bimport|\brequire[ \t]*\(|\bimport[ \t]*\()[ \t]*['"]([^'"\n]{1,512})['"]"""
    ),
    "java": re.compile(r"^[ \t]*import[ \t]+(?:static[ \t]+)?([\w.]{1,512})", re.MULTILINE),
    "go": re.compile(r'^[ \t]*(?:import[ \t]+)?(?:[\w.]+[ \t]+)?"([^"\n]{1,512})"', re.MULTILINE),
}
_LANGUAGES = {
    "python": (".py", ".pyi"),
    "c": (".c", ".h", ".cc", ".hh", ".cpp", ".hpp", ".cxx", ".hxx", ".cu", ".cuh", ".m", ".mm"),
    "javascript": (".js", ".jsx", ".mjs", ".cjs", ".ts", ".tsx", ".vue", ".svelte"),
    "java": (".java", ".kt", ".scala", ".groovy"),
    "go": (".go",),
}
_BY_ENDING = {ending: name for name, endings in _LANGUAGES.items() for ending in endings}
# A file of this name stands for its folder.
_FOLDER_FILES = ("__init__", "index")


def find_imports(path: str, text: str) -> list[str]:
    """Find what a file imports.

    Args:
        path: Its path in the repository, with `/`.
        text: Its text.

    Returns:
        Paths without the ending that the language leaves out, at most `MAX_IMPORTS`: from the root
        with a leading `/`, or to be searched. Empty for an unknown language.
    """
    language = _BY_ENDING.get(posixpath.splitext(path)[1].lower())
    if language is None:
        return []
    found: dict[str, None] = {}
    pattern = _PYTHON if language == "python" else _QUOTED[language]
    for match in pattern.finditer(text):
        if language == "python":
            module, inside, names, modules = match.groups(default="")
            targets = _list_python_targets(path, module, inside or names, modules)
        else:
            targets = [_convert_target(path, language, match[1])]
        found |= dict.fromkeys(target for target in targets if 0 < len(target) <= _MAX_NAME)
        if len(found) >= MAX_IMPORTS:
            break
    return list(found)[:MAX_IMPORTS]


def _list_python_targets(path: str, module: str, names: str, modules: str) -> list[str]:
    if modules:
        words = [part.split()[0] for part in modules.split(",") if part.split()]
        return [word.strip(".").replace(".", "/") for word in words]
    inner = module.lstrip(".")
    base = inner.replace(".", "/")
    if dots := len(module) - len(inner):
        folder = _join("/" + posixpath.dirname(path), *[".."] * (dots - 1))
        base = _join(folder, base)
    # Each name may be a module of the package.
    found = [part.split()[0] for part in names.split(",") if part.split()]
    return [base, *(f"{base.rstrip('/')}/{name}" for name in found)]


def _convert_target(path: str, language: str, target: str) -> str:
    if language == "java":
        return target.strip(".").replace(".", "/")
    if language == "javascript":
        if not target.startswith("."):
            return target
        target = _join("/" + posixpath.dirname(path), target)
        stem, ending = posixpath.splitext(target)
        return stem if ending in _LANGUAGES["javascript"] else target
    return posixpath.normpath(target)


def _join(*parts: str) -> str:
    return posixpath.normpath(posixpath.join(*parts)).replace("//", "/")


class _FileIndex:
    """Files of a repository by what an import may call them."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._exact: dict[str, int] = {}
        self._suffixes: dict[str, int] = {}
        self._folders: dict[str, list[int]] = {}
        self._folder_suffixes: dict[str, str] = {}
        # The first of several in the order of paths has a name.
        for number in sorted(range(len(paths)), key=lambda number: (paths[number], number)):
            folder, name = posixpath.split(paths[number])
            stem, ending = posixpath.splitext(name)
            names = [name, stem] if _BY_ENDING.get(ending) == "c" else [stem]
            known = [posixpath.join(folder, one) for one in names]
            known += [folder] if stem in _FOLDER_FILES and folder else []
            for one in known:
                self._exact.setdefault(one, number)
                for suffix in _list_suffixes(one):
                    self._suffixes.setdefault(suffix, number)
            if ending == ".go":
                self._folders.setdefault(folder, []).append(number)
                for suffix in _list_suffixes(folder):
                    self._folder_suffixes.setdefault(suffix, folder)

    def find_files(self, importer: str, target: str) -> Sequence[int]:
        """Return the files that an import names; () for one of another project."""
        if importer.endswith(".go"):
            return self._find_package(target)
        if target.startswith("/"):
            found = self._exact.get(target.strip("/"))
            return () if found is None else (found,)
        folder = posixpath.dirname(importer)
        for _ in range(_MAX_FOLDERS):
            found = self._exact.get(posixpath.join(folder, target))
            if found is not None:
                return (found,)
            if not folder:
                break
            folder = posixpath.dirname(folder)
        found = self._suffixes.get(target)
        return () if found is None else (found,)

    def _find_package(self, target: str) -> Sequence[int]:
        """Return the files of a Go package, whose name begins with that of its module."""
        parts = target.split("/")
        if len(parts) == 1:  # as most packages of the standard library are named
            return ()
        for start in range(min(len(parts), _MAX_FOLDERS)):
            folder = self._folder_suffixes.get("/".join(parts[start:]))
            if folder is not None:
                return self._folders[folder][:_MAX_PACKAGE_FILES]
        return ()


def _list_suffixes(path: str) -> list[str]:
    parts = path[-_MAX_NAME:].split("/")[-_MAX_PARTS:]
    return ["/".join(parts[start:]) for start in range(len(parts))]


def order_files(paths: Sequence[str], imports: Iterable[Sequence[str]]) -> list[int]:
    """Order files so that a file follows what it imports.

    Of files that wait for each other, the one that waits for fewest comes next.

    Args:
        paths: Paths in the repository.
        imports: What `find_imports` found in each.

    Returns:
        Numbers of the files; those that may change places are in the order of their paths.
    """
    index = _FileIndex(paths)
    dependents: list[list[int]] = [[] for _ in paths]
    waiting = [0] * len(paths)
    edges = 0
    for number, (path, targets) in enumerate(zip(paths, imports, strict=True)):
        files = {file for target in targets for file in index.find_files(path, target)} - {number}
        edges += len(files)
        if edges > MAX_EDGES:
            break
        waiting[number] = len(files)
        for file in files:
            dependents[file].append(number)
    heap = [(count, paths[number], number) for number, count in enumerate(waiting)]
    heapq.heapify(heap)
    order: list[int] = []
    is_done = [False] * len(paths)
    while heap:
        _, _, number = heapq.heappop(heap)
        if is_done[number]:
            continue  # an entry from before a file that it needs was placed
        is_done[number] = True
        order.append(number)
        for dependent in dependents[number]:
            waiting[dependent] -= 1
            if not is_done[dependent]:
                heapq.heappush(heap, (waiting[dependent], paths[dependent], dependent))
    return order


def read_repositories(
    batch: pa.RecordBatch, config: RepositoryOrder, source: Path
) -> list[pa.Array]:
    """Read the repository, the path and the imports of documents.

    Args:
        batch: Documents.
        config: Names of the columns.
        source: Their file, for messages.

    Returns:
        Columns of `REPOSITORY_FIELDS`; nulls for a document without repository or path.

    Raises:
        DataError: There is no such column.
    """
    columns = []
    for key, name in (("repository", config.repository_field), ("path", config.path_field)):
        if name not in batch.schema.names:
            raise DataError(
                f"data.document_order.{key}_field is {name!r}, which is no column of {source}. It "
                f"has {', '.join(batch.schema.names)}. Name one of them, and see that "
                "data.read.keep_fields keeps it."
            )
        columns.append(batch.column(name).to_pylist())
    rows = [
        (None, None, None)
        if repository in (None, "") or path in (None, "")
        else (str(repository), cleaned := _clean_path(str(path)), find_imports(cleaned, text))
        for repository, path, text in zip(*columns, batch.column("text").to_pylist(), strict=True)
    ]
    return [
        pa.array([row[number] for row in rows], field.type)
        for number, field in enumerate(REPOSITORY_FIELDS)
    ]


def _clean_path(path: str) -> str:
    return posixpath.normpath(path.replace("\\", "/")).lstrip("/")[:_MAX_PATH]


def compute_places(
    ids: Sequence[str], repositories: pa.Array, purpose: str, seed: int
) -> npt.NDArray[np.uint64]:
    """Compute the places of documents in the shuffle: one for all files of a repository.

    Args:
        ids: Ids of the documents.
        repositories: Their repositories; null for none.
        purpose: See `hash_positions`.
        seed: Seed of the order.

    Returns:
        uint64 of shape (len(ids),).
    """
    # An id has no space in front.
    names = [
        name if repository is None else f" {repository}"
        for name, repository in zip(ids, repositories.to_pylist(), strict=True)
    ]
    return hash_positions(names, purpose, seed)


def order_documents(
    batches: Sequence[pa.RecordBatch], table: npt.NDArray[np.int64], places: npt.NDArray[np.uint64]
) -> npt.NDArray[np.int64]:
    """Order documents by their places, and those of one repository by their imports.

    Args:
        batches: Encoded documents.
        table: (R, 2) [batch, row] of the documents.
        places: (R,) their places.

    Returns:
        (R,) indices into `table`.
    """
    order = np.argsort(places, kind="stable")
    edges = np.flatnonzero(np.diff(places[order])) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(order)]):
        if 1 < stop - start <= MAX_FILES:
            order[start:stop] = _order_one_place(batches, table, order[start:stop].tolist())
    return order


def _order_one_place(
    batches: Sequence[pa.RecordBatch], table: npt.NDArray[np.int64], documents: Sequence[int]
) -> list[int]:
    """Order the documents of one place; two repositories may share it."""

    def read(document: int, name: str) -> Any:
        batch, row = table[document].tolist()
        return batches[batch].column(name)[row].as_py()

    def get_repository(document: int) -> str:
        return read(document, "repository") or ""

    ordered: list[int] = []
    for repository, group in groupby(sorted(documents, key=get_repository), get_repository):
        files = list(group)
        if repository:
            paths = [read(file, "path") for file in files]
            numbers = order_files(paths, (read(file, "imports") for file in files))
            files = [files[number] for number in numbers]
        ordered += files
    return ordered
