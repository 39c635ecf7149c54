"""Many words as one regular expression that follows them letter by letter.

Reads words, gives a pattern. Words with a common beginning share it, so that a position of a text costs as many steps
as the longest word that begins there, however many words there are: the time is linear in the text.

Lists of the user's, read once per process: a few words as strings, or a million hosts as columns.

Reads `EntryListConfig`s, gives their entries, or an `EntrySet` that answers membership. An `EntrySet` holds about 40
bytes an entry beside the bytes of the list, compares whole entries, and so never takes one for another.
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

from llmsys.config.entry_list import EntryListConfig
from llmsys.errors import DataError

_END = ""  # marks where a word ends; no character is the empty string


def build_alternation(words: Iterable[str]) -> str:
    """Return the source of a pattern that matches each of the words and nothing else, longer ones first."""
    root: dict[str, Any] = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[_END] = {}
    return _build_tree_pattern(root)


def _build_tree_pattern(root: dict[str, Any]) -> str:
    """Write a tree of letters as a pattern; without recursion, so that words may be long."""
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
    branches = [re.escape(letter) + done.get(id(child), "") for letter, child in node.items() if letter != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"


Integers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_PORTION_BYTES = 8 << 20


def read_entries(listed: EntryListConfig) -> list[str]:
    """Return every entry, stripped, without blank lines and comments."""
    return [entry.decode("utf-8", "replace") for portion in _iter_portions(listed) for entry in portion]


def _iter_portions(listed: EntryListConfig) -> Iterator[list[bytes]]:
    """Yield the entries of the files, and those written in the config, some megabytes at a time."""
    for path in listed.files:
        try:
            with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
                while lines := file.readlines(_PORTION_BYTES):
                    yield _strip_entries(lines)
        except OSError as error:  # gzip's own error is one too
            raise DataError(_format_read_error(path, error.strerror or str(error))) from None
        except (EOFError, zlib.error) as error:
            raise DataError(_format_read_error(path, f"its gzip is damaged ({error})")) from None
    yield _strip_entries(entry.encode() for entry in listed.entries)


def _format_read_error(path: Path, reason: str) -> str:
    return f"list {path} cannot be read: {reason}. Name a file that exists and is whole."


def _strip_entries(lines: Iterable[bytes]) -> list[bytes]:
    return [line for line in map(bytes.strip, lines) if line and not line.startswith(b"#")]


class EntrySet:
    """Membership of many strings.

    Args:
        listed: where the entries are.
        lower: whether the letter case of ASCII letters does not matter.
    """

    def __init__(self, listed: EntryListConfig, *, lower: bool = False) -> None:
        self._lower = lower
        blobs: list[bytes] = []
        lengths, hashes = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for portion in _iter_portions(listed):
            entries = [entry.lower() for entry in portion] if lower else portion
            blobs.append(b"".join(entries))
            lengths.append(np.fromiter(map(len, entries), np.int64, len(entries)))
            hashes.append(_hash_entries(entries))
        self._blob = b"".join(blobs)
        self._index_entries(np.concatenate(lengths), np.concatenate(hashes))

    def _index_entries(self, lengths: Integers, hashes: Hashes) -> None:
        """Sort the entries by hash, each once."""
        ends = np.cumsum(lengths)
        self._hashes, first = np.unique(hashes, return_index=True)
        self._starts, self._ends = (ends - lengths)[first], ends[first]
        # Of two entries with one hash the second is kept aside: there are none in practice, and none is lost.
        again = np.flatnonzero(first[np.searchsorted(self._hashes, hashes)] != np.arange(len(hashes)))
        twins = (self._blob[ends[number] - lengths[number] : ends[number]] for number in again.tolist())
        self._others = frozenset(twins)

    def __len__(self) -> int:
        return len(self._hashes)

    def contains(self, texts: Sequence[str]) -> list[bool]:
        """Return which of the texts are entries; an empty text never is."""
        if not len(self._hashes):
            return [False] * len(texts)
        keys = [text.encode("utf-8", "surrogatepass") for text in texts]
        if self._lower:
            keys = [key.lower() for key in keys]
        hashes = _hash_entries(keys)
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        found = (self._hashes[places] == hashes).tolist()
        pairs = zip(found, places.tolist(), keys, strict=True)
        return [hit and self._is_entry(place, key) for hit, place, key in pairs]

    def _is_entry(self, place: int, key: bytes) -> bool:
        return self._blob[self._starts[place] : self._ends[place]] == key or key in self._others


def _hash_entries(entries: Sequence[bytes]) -> Hashes:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, entries), np.uint64, len(entries))
