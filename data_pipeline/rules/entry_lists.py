"""Read the user's lists of words and hosts, once per process, and search texts for their entries.

Reads the files of `EntryListConfig`s.

Invariants:
- A pattern of `build_alternation` matches in time linear in the text: words share common prefixes,
  so a position costs as many steps as the longest word that begins there.
- An `EntrySet` takes 24 bytes per entry and the bytes of the list, of a long list once per machine.
  It compares whole entries: hash collisions do not produce false matches.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from llmsys.config.custom_rules import EntryListConfig
from llmsys.data_pipeline.rules.entry_table import (
    EntryTable,
    Hashes,
    Integers,
    load_entry_table,
)
from llmsys.errors import DataError

_END = ""  # marks where a word ends; no character is the empty string


def build_alternation(words: Iterable[str]) -> str:
    """Build the source of a pattern that matches words of a list and nothing else.

    Args:
        words: The words, taken literally.

    Returns:
        Alternatives, longer ones first, because the first that matches wins.
    """
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[_END] = {}
    return _build_tree_pattern(root)


def _build_tree_pattern(root: dict[str, Any]) -> str:
    """Build the pattern of a prefix tree, without recursion so that words may be long."""
    done: dict[int, str] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        open_nodes = [child for child in node.values() if child and id(child) not in done]
        if open_nodes:
            stack += open_nodes
            continue
        stack.pop()
        done[id(node)] = _build_node_pattern(node, done)
    return done[id(root)]


def _build_node_pattern(node: dict[str, Any], done: dict[int, str]) -> str:
    branches = [
        re.escape(letter) + done.get(id(child), "")
        for letter, child in node.items()
        if letter != _END
    ]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"


_BLOCK_BYTES = 8 << 20


def read_entries(listed: EntryListConfig) -> list[str]:
    """Read the entries of a list.

    Args:
        listed: Files and entries of the config.

    Returns:
        All entries, stripped, without blank lines and comments.
    """
    return [entry.decode("utf-8", "replace") for block in _iter_blocks(listed) for entry in block]


def _iter_blocks(listed: EntryListConfig) -> Iterator[list[bytes]]:
    """Yield the entries of the files, some megabytes at a time, then those in the config."""
    for path in listed.files:
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                while lines := file.readlines(_BLOCK_BYTES):
                    yield _strip_entries(lines)
        except OSError as error:  # gzip.BadGzipFile included
            raise DataError(_format_read_error(path, error.strerror or str(error))) from None
        except (EOFError, zlib.error) as error:
            raise DataError(_format_read_error(path, f"its gzip is damaged ({error})")) from None
    yield _strip_entries(entry.encode() for entry in listed.entries)


def _format_read_error(path: Path, reason: str) -> str:
    return f"list {path} cannot be read: {reason}. Give an existing, complete file."


def _strip_entries(lines: Iterable[bytes]) -> list[bytes]:
    return [line for line in map(bytes.strip, lines) if line and not line.startswith(b"#")]


class EntrySet:
    """A set of many strings.

    Args:
        listed: the list.
        lower: whether to ignore the case of ASCII letters.
    """

    def __init__(self, listed: EntryListConfig, *, lower: bool = False) -> None:
        self._lower = lower
        self._table = load_entry_table(listed, lambda: _build_table(listed, lower), lower=lower)

    def __len__(self) -> int:
        return len(self._table.hashes)

    def contains(self, texts: Sequence[str]) -> list[bool]:
        """Return for each text whether it is an entry; an empty text never is."""
        table = self._table
        if not len(table.hashes):
            return [False] * len(texts)
        keys = [text.encode("utf-8", "surrogatepass") for text in texts]
        if self._lower:
            keys = [key.lower() for key in keys]
        hashes = _hash_entries(keys)
        indices = np.minimum(np.searchsorted(table.hashes, hashes), len(table.hashes) - 1)
        found = (table.hashes[indices] == hashes).tolist()
        pairs = zip(found, indices.tolist(), keys, strict=True)
        return [hit and self._is_entry(index, key) for hit, index, key in pairs]

    def _is_entry(self, index: int, key: bytes) -> bool:
        table = self._table
        begin = table.first + int(table.starts[index])
        end = table.first + int(table.ends[index])
        return table.blob[begin:end] == key or key in table.others


def _build_table(listed: EntryListConfig, lower: bool) -> EntryTable:
    """Read a list and build its table."""
    blobs: list[bytes] = []
    lengths = [np.zeros(0, np.int64)]
    hashes = [np.zeros(0, np.uint64)]
    for block in _iter_blocks(listed):
        entries = [entry.lower() for entry in block] if lower else block
        blobs.append(b"".join(entries))
        lengths.append(np.fromiter(map(len, entries), np.int64, len(entries)))
        hashes.append(_hash_entries(entries))
    return _index_entries(b"".join(blobs), np.concatenate(lengths), np.concatenate(hashes))


def _index_entries(blob: bytes, lengths: Integers, hashes: Hashes) -> EntryTable:
    """Sort the distinct entries by hash."""
    ends = np.cumsum(lengths)
    distinct, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    starts = (ends - lengths)[first]
    # Entries whose hash another entry has: repeated entries, and collisions, which are none in
    # practice.
    again = np.flatnonzero(first[inverse] != np.arange(len(hashes)))
    others = set()
    for number, place in zip(again.tolist(), inverse[again].tolist(), strict=True):
        entry = blob[ends[number] - lengths[number] : ends[number]]
        if entry != blob[starts[place] : ends[first[place]]]:
            others.add(entry)
    return EntryTable(distinct, starts, ends[first], blob, 0, frozenset(others))


def _hash_entries(entries: Sequence[bytes]) -> Hashes:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, entries), np.uint64, len(entries))
