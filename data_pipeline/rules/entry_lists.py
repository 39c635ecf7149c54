"""Read the user's lists of words and hosts, once per process, and search texts for their entries.

Reads the files of `EntryListConfig`s.

Invariants:
- A pattern of `build_alternation` matches in time linear in the text: words share common prefixes,
  so a position costs as many steps as the longest word that begins there.
- An `EntrySet` takes about 40 bytes per entry and the bytes of the list. It compares whole entries:
  hash collisions do not produce false matches.
"""

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from llmsys.config.custom_rules import EntryListConfig
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


Integers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

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
        blobs: list[bytes] = []
        lengths = [np.zeros(0, np.int64)]
        hashes = [np.zeros(0, np.uint64)]
        for block in _iter_blocks(listed):
            entries = [entry.lower() for entry in block] if lower else block
            blobs.append(b"".join(entries))
            lengths.append(np.fromiter(map(len, entries), np.int64, len(entries)))
            hashes.append(_hash_entries(entries))
        self._blob = b"".join(blobs)
        self._index_entries(np.concatenate(lengths), np.concatenate(hashes))

    def _index_entries(self, lengths: Integers, hashes: Hashes) -> None:
        """Sort the distinct entries by hash."""
        ends = np.cumsum(lengths)
        self._hashes, first = np.unique(hashes, return_index=True)
        self._starts, self._ends = (ends - lengths)[first], ends[first]
        # Entries whose hash another entry has: repeated entries, and collisions, which are none in
        # practice.
        again = np.flatnonzero(
            first[np.searchsorted(self._hashes, hashes)] != np.arange(len(hashes))
        )
        twins = (
            self._blob[ends[number] - lengths[number] : ends[number]] for number in again.tolist()
        )
        self._others = frozenset(twins)

    def __len__(self) -> int:
        return len(self._hashes)

    def contains(self, texts: Sequence[str]) -> list[bool]:
        """Return for each text whether it is an entry; an empty text never is."""
        if not len(self._hashes):
            return [False] * len(texts)
        keys = [text.encode("utf-8", "surrogatepass") for text in texts]
        if self._lower:
            keys = [key.lower() for key in keys]
        hashes = _hash_entries(keys)
        indices = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        found = (self._hashes[indices] == hashes).tolist()
        pairs = zip(found, indices.tolist(), keys, strict=True)
        return [hit and self._is_entry(index, key) for hit, index, key in pairs]

    def _is_entry(self, index: int, key: bytes) -> bool:
        return self._blob[self._starts[index] : self._ends[index]] == key or key in self._others


def _hash_entries(entries: Sequence[bytes]) -> Hashes:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, entries), np.uint64, len(entries))
