"""Find the input files that a configuration names: paths, URLs, patterns and lists of them.

Reads `data.inputs`; returns each existing file once, sorted, and an identity per file that changes
when the file does.

Patterns may lead through symbolic links. A folder of Hugging Face's datasets is replaced by the
files of one split.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmsys.config.cleaning import ReadConfig
from llmsys.config.data import CrawlConfig
from llmsys.config.input_files import FIELDS, InputEntry, InputFilesConfig
from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.readers.dataset_folders import list_split_files, open_local_folder
from llmsys.data_pipeline.readers.file_patterns import ANY_DEPTH, match_files
from llmsys.data_pipeline.readers.input_stream import (
    PACKED,
    compute_stat_stamp,
    format_file_name,
    open_input_stream,
    remove_compression_suffix,
)
from llmsys.data_pipeline.readers.remote_file import (
    compute_remote_digest,
    get_remote_identity,
    get_remote_size,
    list_remote_files,
    open_remote_folder,
)
from llmsys.errors import DataError
from llmsys.log import REDACTED, redact_url
from llmsys.storage.paths import is_remote

_DATA_FILE = (
    ".warc",
    ".wet",
    ".arc",
    ".gz",
    ".zst",
    ".lz4",
    ".bz2",
    ".xz",
    ".zip",
    ".json",
    ".jsonl",
    ".ndjson",
    ".parquet",
    ".arrow",
    ".feather",
    ".txt",
    ".md",
    ".html",
    ".htm",
)
_CRAWL = (".warc", ".wet", ".arc")
_CSV = (".csv", ".tsv", ".tab")
_LISTS_IN_LISTS = 8
_HUB = "hf://"  # a repository of the hub is a dataset, with or without a head in its README.md


@dataclass(frozen=True)
class InputFiles:
    """The files of a dataset of documents.

    Attributes:
        paths: paths and URLs, sorted; those of held-out documents too.
        entries: by path, the entry of a file whose fields have their own names.
        heldout: names of the files, as documents have them, whose documents are held out.
    """

    paths: list[str]
    entries: dict[str, InputFilesConfig]
    heldout: tuple[str, ...] = ()

    def get_read_config(self, path: str, read: ReadConfig) -> ReadConfig:
        """Return the options of reading a file.

        Args:
            path: One of `paths`, in the same spelling.
            read: The `data.read:` section.

        Returns:
            `read` with the fields and the reader of the file's entry; `read` itself where it has
            none.
        """
        entry = self.entries.get(path)
        return read if entry is None else entry.replace_fields(read)


def list_late_formats(path: str) -> list[str]:
    """List what an earlier version did not read in a file, so that it is read again.

    Args:
        path: A path or URL, with or without the ending of a compression.

    Returns:
        Entries for the key of the task that reads the file; [] for most files.
    """
    # Both were one damaged record, and then had texts alone.
    late = [("typed rows of CSV", _CSV), ("members of zip, with typed rows", (".zip",))]
    name = remove_compression_suffix(path)
    return [entry for entry, endings in late if name.endswith(endings)]


def may_have_fields(path: str, read: ReadConfig) -> bool:
    """Return whether the rows of a file may have further fields that are kept.

    Args:
        path: The path or URL of the file.
        read: The options of reading it.

    Returns:
        False for a name of a crawl file (.warc, .wet, .arc), whose records have none.
    """
    is_crawl = read.reader is None and remove_compression_suffix(path).endswith(_CRAWL)
    return read.keep_fields != "none" and not is_crawl


def find_input_files(data: CrawlConfig) -> InputFiles:
    """Return the files that `data.inputs` and `data.heldout_inputs` name.

    Args:
        data: the config of the dataset.

    Returns:
        The files.

    Raises:
        DataError: an entry has no file, or a file is in both or has two names for a field.
    """
    entries: dict[str, InputFilesConfig] = {}
    # A dataset for evaluations alone has no other inputs.
    is_heldout_alone = not data.inputs and bool(data.heldout_inputs)
    train = set[str]() if is_heldout_alone else _find_entries(data.inputs, "data.inputs", entries)
    heldout = _find_entries(data.heldout_inputs, "data.heldout_inputs", entries)
    if both := sorted(train & heldout):
        raise DataError(
            f"data.heldout_inputs: '{both[0]}' is also in data.inputs, so its documents would be "
            "in training. Name it in one of them."
        )
    return InputFiles(
        sorted(train | heldout), entries, tuple(sorted(map(get_document_file, heldout)))
    )


def find_heldout_files(data: CrawlConfig) -> tuple[str, ...]:
    """Return the names of the files of `data.heldout_inputs`.

    Args:
        data: the config of the dataset.

    Returns:
        Names as documents have them in the column `file`, sorted.
    """
    return tuple(
        sorted(
            map(get_document_file, _find_entries(data.heldout_inputs, "data.heldout_inputs", {}))
        )
    )


def _find_entries(
    inputs: Sequence[InputEntry], where: str, entries: dict[str, InputFilesConfig]
) -> set[str]:
    """Return the files of some inputs, and add the entries with fields to `entries`."""
    plain = [entry for entry in inputs if isinstance(entry, str)]
    found = (
        set(find_inputs(plain, where))
        if plain or (where == "data.inputs" and not inputs)
        else set[str]()
    )
    owners = dict.fromkeys(found, InputFilesConfig(path="-"))
    for number, entry in enumerate(inputs):
        if isinstance(entry, str):
            continue
        paths = find_inputs([entry.path], f"{where}.{number}", entry.split, entry.subset)
        for path in paths:
            other = owners.setdefault(path, entry)
            if any(getattr(other, field) != getattr(entry, field) for field in FIELDS):
                raise DataError(
                    f"{where}.{number}: '{path}' is in another entry too, with other fields. Name "
                    "a file in one entry."
                )
        found.update(paths)
        if any(getattr(entry, field) is not None for field in FIELDS):
            entries.update(dict.fromkeys(paths, entry))
    return found


def get_document_file(path: str) -> str:
    """Return the name of an input as its documents have it in the column `file`."""
    return redact_url(path) if is_remote(path) else format_file_name(path)


def find_inputs(
    patterns: Sequence[str], where: str = "data.inputs", split: str = "", subset: str = ""
) -> list[str]:
    """Return the files that the patterns match, sorted and each once.

    Args:
        patterns: paths or URLs, with `*`, `?`, `[…]` and `**`; or `@` and the path of a list, one
            pattern a line. `**` enters each folder once, whatever symbolic links lead to it.
        where: key of the patterns, for messages.
        split: split of a folder of Hugging Face's datasets; "" for `train`. With a split every
            folder is one.
        subset: its subset; "" for the default one.

    Returns:
        Paths and URLs. A path that is not UTF-8 holds surrogates (PEP 383).

    Raises:
        DataError: if a pattern matches no file, a list cannot be read, or a URL is redacted.
    """
    if not patterns:
        raise DataError(
            f"{where} is empty. Name crawl files, such as data.inputs='[crawl/*.warc.gz]'."
        )
    found: set[str] = set()
    for pattern, line in _iter_patterns(patterns, where, 0):
        if is_remote(pattern) and REDACTED in pattern:
            raise DataError(
                f"{line}: '{pattern}' comes from the stored config of an earlier run, without its "
                "secrets. Give the URL again, with its password, token or signature."
            )
        list_files = _list_remote_files if is_remote(pattern) else _list_local_files
        found.update(list_files(pattern, line, split, subset))
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
    """Return size, modification time and inode of a local file: a file with an unchanged stamp is
    not read again.

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
    return (
        get_remote_identity(path, compute_remote_digest)
        if is_remote(path)
        else journal.get_input_digest(Path(path))
    )


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
                yield from _iter_patterns(
                    [line.strip()], f"{pattern[1:]}, line {number}", depth + 1
                )


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
            f"{where}: the list '@{path}' cannot be read: {error}. Give a text file with one path "
            "per line."
        ) from error


def _list_local_files(pattern: str, where: str, split: str, subset: str) -> list[str]:
    matches = [os.path.normpath(match) for match in match_files(pattern)]
    if not matches and os.path.exists(pattern):
        matches = [os.path.normpath(pattern)]  # a name with brackets in it
    files = [
        match
        for match in matches
        if not os.path.isdir(match) or _is_folder_named_like_file(match, pattern)
    ]
    if not files and len(matches) == 1:  # a folder, which no wildcard matched by chance
        folder = open_local_folder(matches[0])
        if split or subset or folder.is_dataset():
            names = list_split_files(folder, split, subset, where, _DATA_FILE)
            return [os.path.join(matches[0], name) for name in names]
    if not files:
        raise DataError(_format_no_match(pattern, matches, where))
    return files


def _is_folder_named_like_file(folder: str, pattern: str) -> bool:
    """Return whether a wildcard matched a folder that is named like a data file: reading it
    reports the error.
    """
    return folder.endswith(_DATA_FILE) and os.path.normpath(pattern) != folder


def _list_remote_files(pattern: str, where: str, split: str, subset: str) -> list[str]:
    files, is_folder = list_remote_files(pattern)
    if is_folder:
        folder = open_remote_folder(pattern)
        if split or subset or pattern.startswith(_HUB) or folder.is_dataset():
            names = list_split_files(folder, split, subset, where, _DATA_FILE)
            return [f"{pattern.rstrip('/')}/{name}" for name in names]
    if not files:
        raise DataError(
            _format_no_match(pattern, [pattern.rstrip("/")] if is_folder else [], where)
        )
    return files


def _find_pattern(folder: str) -> str | None:
    """Return the pattern of the first data file of a folder, such as /*.parquet; None if there
    is none.
    """
    for parent, below, names in os.walk(folder):
        below.sort()
        for name in sorted(names):
            if ends := [end for end in _DATA_FILE if end in name and name.endswith((end, *PACKED))]:
                deep = "" if os.path.samefile(parent, folder) else f"/{ANY_DEPTH}"
                return f"{deep}/*{name[name.index(ends[0]) :]}"
    return None


def _format_no_match(pattern: str, folders: Sequence[str], where: str) -> str:
    if folders:
        inside = "/*.warc.gz" if is_remote(pattern) else _find_pattern(folders[0])
        if inside is None:
            return (
                f"{where}: '{pattern}' is a folder without files to read. Give one with "
                f"{', '.join(_DATA_FILE)}."
            )
        return (
            f"{where}: '{pattern}' is a folder, not a file. Give the files in it: "
            f"'{folders[0]}{inside}'."
        )
    working_directory = "" if is_remote(pattern) else f" (in {Path.cwd()})"
    fix = (
        "Correct the address."
        if is_remote(pattern)
        else "Correct the pattern; relative paths start in the working directory."
    )
    return f"{where}: no file matches '{pattern}'{working_directory}. {fix}"
