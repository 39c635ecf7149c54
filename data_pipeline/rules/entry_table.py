"""Tables of the entries of long lists, built once per machine and mapped by every process.

Reads and writes `entry_lists/` in the cache folder: one file per list, named after the sha256 of
its contents, with a header that has the format version and a checksum. A file may be deleted at
any time.

Invariants:
- A table has the entries of its list, whether it is built or mapped.
- One process of a machine builds a table, and the others wait for it. Without a folder to write to,
  each builds its own.
- A file whose version, size or checksum differs is built again; a damaged one is reported.
"""

import fcntl
import hashlib
import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from llmsys.config.custom_rules import EntryListConfig
from llmsys.log import get_logger
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.paths import get_cache_folder

_log = get_logger(__name__)

LEAST_CACHED_BYTES = 1 << 20  # of the files of a list; shorter ones are built in milliseconds
_MAGIC = b"llmsys entries\0\0"
_VERSION = 1
# Magic, version, entries, bytes of the entries, bytes of the others, checksum of what follows.
_HEADER = struct.Struct("<16s4Q16s")

Integers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


class EntryTable(NamedTuple):
    """Distinct entries by hash.

    Attributes:
        hashes: Hashes in ascending order, (N,).
        starts: First byte of each entry in `blob`, (N,).
        ends: Byte after its last, (N,).
        blob: The bytes of all entries, from byte `first` on.
        first: First byte of the entries in `blob`.
        others: Entries whose hash another entry has.
    """

    hashes: Hashes
    starts: Integers
    ends: Integers
    blob: bytes | mmap.mmap
    first: int
    others: frozenset[bytes]


def load_entry_table(
    listed: EntryListConfig, build: Callable[[], EntryTable], *, lower: bool
) -> EntryTable:
    """Load the table of a list.

    Args:
        listed: The list.
        build: Reads the list and builds its table.
        lower: Whether the entries are in lower case.

    Returns:
        The table, mapped from the cache folder if the list is long.

    Raises:
        DataError: if the list cannot be read.
    """
    with suppress(OSError):  # `build` names a file that cannot be read
        if sum(path.stat().st_size for path in listed.files) >= LEAST_CACHED_BYTES:
            path = get_cache_folder() / "entry_lists" / _compute_list_digest(listed, lower=lower)
            return _map_or_build(path, build)
    return build()


def _compute_list_digest(listed: EntryListConfig, *, lower: bool) -> str:
    """Return the sha256 of what decides the entries of a list, in hex."""
    state = hashlib.sha256(f"{_VERSION} {lower}\n".encode())
    for path in listed.files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        state.update(f"{digest} {path.suffix == '.gz'}\n".encode())
    for entry in listed.entries:
        state.update(f"{len(entry.encode())}:{entry}\n".encode())
    return state.hexdigest()


def _map_or_build(path: Path, build: Callable[[], EntryTable]) -> EntryTable:
    """Return the mapped table; OSError without a folder to write to."""
    if (table := _map_table(path)) is not None:
        return table
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock_file(path.with_suffix(".lock")):
        # Another process may have built it meanwhile.
        if (table := _map_table(path)) is not None:
            return table
        if path.exists():
            _log.warning("%s is damaged: it is built again from its list", path)
        built = build()
        with suppress(OSError):  # a full disk costs memory, and nothing else
            write_bytes_atomically(path, _pack_table(built))
            return _map_table(path) or built
        return built


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _pack_table(table: EntryTable) -> bytes:
    """Return the bytes of a file."""
    others = b"".join(len(entry).to_bytes(8, "little") + entry for entry in sorted(table.others))
    arrays = (table.hashes.tobytes(), table.starts.tobytes(), table.ends.tobytes())
    body = b"".join([*arrays, others, table.blob])
    checksum = xxhash.xxh3_128_digest(body)
    sizes = (len(table.hashes), len(table.blob), len(others))
    return _HEADER.pack(_MAGIC, _VERSION, *sizes, checksum) + body


def _map_table(path: Path) -> EntryTable | None:
    """Return the table of a file; None if there is none, or it is not whole."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # a file of no bytes cannot be mapped
        return None
    if len(data) < _HEADER.size:
        return None
    magic, version, count, blob_bytes, other_bytes, checksum = _HEADER.unpack_from(data)
    begin = _HEADER.size
    expected = begin + 3 * 8 * count + other_bytes + blob_bytes
    if magic != _MAGIC or version != _VERSION or len(data) != expected:
        return None
    with memoryview(data) as view, view[begin:] as body:
        if xxhash.xxh3_128_digest(body) != checksum:
            return None
    hashes = np.frombuffer(data, np.uint64, count, begin)
    starts, ends = np.frombuffer(data, np.int64, 2 * count, begin + 8 * count).reshape(2, count)
    first = expected - blob_bytes
    others = frozenset(_iter_others(data[first - other_bytes : first]))
    return EntryTable(hashes, starts, ends, data, first, others)


def _iter_others(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        size = int.from_bytes(data[position : position + 8], "little")
        yield data[position + 8 : position + 8 + size]
        position += 8 + size
