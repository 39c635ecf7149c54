"""Ranges of remote files, in blocks that stay on the local disk for as long as the cache has room.

Reads objects of a remote dataset. Reads/Writes: blocks/ in the cache folder, which the processes of
a host share.

Invariants:
- A block is named by the digest of its file: an object that was replaced, or another dataset, never
  shares a block.
- A block is written aside, where a sweep of another thread or process leaves it for an hour.
- Blocks are verified by whoever reads them (checked_file.py); a damaged one is fetched once more.
- A full disk costs the blocks, never the run.
"""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from llmsys.errors import ConfigError, DataError
from llmsys.log import get_logger
from llmsys.storage.arrow_file import REMAKE
from llmsys.storage.local_files import get_cache_folder
from llmsys.storage.object_store import open_object_folder

# Small against the time of a request, large against a window of tokens.
BLOCK_BYTES = 1 << 18
DEFAULT_GIB = 16.0
# A block that was being written for this long belongs to a process that has died.
ABANDONED_SECONDS = 3600

log = get_logger(__name__)


class RangeCache:
    """Blocks of files on the local disk, at most `max_bytes` of them; the ones used longest ago
    go first.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        # Eight processes of a host stay within the limit together: each may add this much before it
        # looks.
        self._room = 0
        self._lock = threading.Lock()
        self._is_full_logged = False
        self._block_locks = [threading.Lock() for _ in range(256)]

    def lock_block(self, name: str) -> threading.Lock:
        """Return a lock for the fetch of a block, which a few other blocks share."""
        return self._block_locks[hash(name) % len(self._block_locks)]

    def find_block(self, name: str) -> bytes | None:
        """Return a block, None if it is not here."""
        path = self.folder / name
        try:
            data = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return data

    def add_block(self, name: str, data: bytes) -> None:
        """Keep a block."""
        with self._lock:  # threads that wrote at the same time would pass the limit together
            self._room -= len(data)
            if self._room < 0:
                self._room = self.max_bytes // 16
                self.remove_old_blocks()
            self._write_block(name, data)

    def _write_block(self, name: str, data: bytes) -> None:
        aside = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(data)
            os.replace(aside, self.folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            if not self._is_full_logged:
                self._is_full_logged = True
                log.warning(
                    "%s cannot keep what is read from remote files (%s), so it will be read again "
                    "when it is needed. Free space, or set LLMSYS_CACHE to another disk or "
                    "LLMSYS_CACHE_GIB to less than %g",
                    *(self.folder, error.strerror, self.max_bytes / 2**30),
                )
            self.remove_old_blocks()

    def discard_block(self, name: str) -> None:
        """Remove a damaged block."""
        (self.folder / name).unlink(missing_ok=True)

    def remove_old_blocks(self) -> None:
        """Remove the blocks used longest ago until half of the limit is free, unless another
        process does.
        """
        with self._lock_sweep() as is_locked:
            if not is_locked:
                return
            with os.scandir(self.folder) as entries:
                found = [
                    (status.st_mtime_ns, status.st_size, entry.path)
                    for entry, status in _iter_files(entries)
                    if not entry.name.startswith(".")
                    or status.st_mtime < time.time() - ABANDONED_SECONDS
                ]
            excess = sum(size for _, size, _ in found) - self.max_bytes // 2
            for _, size, path in sorted(found):
                if excess <= 0:
                    return
                with contextlib.suppress(OSError):
                    os.unlink(path)
                excess -= size

    @contextlib.contextmanager
    def _lock_sweep(self) -> Iterator[bool]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
        except OSError:  # a disk that cannot be written keeps no blocks
            yield False
            return
        try:
            yield _try_lock(handle)
        finally:
            os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _iter_files(
    entries: "Iterator[os.DirEntry[str]]",
) -> Iterator[tuple["os.DirEntry[str]", os.stat_result]]:
    for entry in entries:
        with contextlib.suppress(OSError):  # another process removed it
            yield entry, entry.stat()


class RemoteFile:
    """A file of a remote dataset. Threads may read at the same time."""

    is_open = False

    def __init__(self, url: str, digest: str) -> None:
        """Name a file by its URL and a digest of its bytes."""
        folder, _, self._name = url.rpartition("/")
        self._objects, self._digest, self.url = open_object_folder(folder), digest, url
        self._cache = open_cache()
        self.size: int | None = None
        self.read: Callable[[int, int], bytes] = self._read_blocks

    def require_complete(self, size: int) -> None:
        """Implement `ByteFile.require_complete`: what is read is verified, and a request that
        fails is reported.
        """

    def _read_blocks(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset`, fewer at the end of the file.

        Raises:
            DataError: the object is gone, or the storage did not give it.
        """
        first, last = offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)
        names = [self._get_block_name(number) for number in range(first, last)]
        blocks = [self._cache.find_block(name) for name in names]
        for begin, end in _iter_gaps(blocks):
            # Threads that need the same block wait for the first of them.
            with self._cache.lock_block(names[begin]):
                if end == begin + 1 and (found := self._cache.find_block(names[begin])) is not None:
                    blocks[begin] = found
                    continue
                fetched = self._fetch_range(
                    (first + begin) * BLOCK_BYTES, (first + end) * BLOCK_BYTES
                )
                for number in range(begin, end):
                    at = (number - begin) * BLOCK_BYTES
                    data = blocks[number] = fetched[at : at + BLOCK_BYTES]
                    self._cache.add_block(names[number], data)
        skipped = offset - first * BLOCK_BYTES
        return b"".join(block or b"" for block in blocks)[skipped : skipped + size]

    def discard_range(self, size: int, offset: int) -> bool:
        """Implement `ByteFile.discard_range`: the object itself may be intact."""
        for number in range(offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES)):
            self._cache.discard_block(self._get_block_name(number))
        return True

    def describe(self) -> str:
        """Implement `ByteFile.describe`: size and time of the object."""
        found = self._objects.find_object(self._name)
        if found is None:
            return f" {self.url} is gone."
        return (
            f" {self.url} has {found.size:,} bytes, written {found.modified}: it may have been "
            "replaced."
        )

    def _fetch_range(self, begin: int, end: int) -> bytes:
        try:
            return self._objects.read_range(self._name, begin, end)
        except FileNotFoundError:
            raise DataError(f"{self.url} is missing, but the manifest lists it. {REMAKE}") from None

    def _get_block_name(self, number: int) -> str:
        return f"{self._digest}-{number}"


def _iter_gaps(blocks: list[bytes | None]) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each run of missing blocks, as they are now."""
    begin = 0
    while begin < len(blocks):
        end = begin
        while end < len(blocks) and blocks[end] is None:
            end += 1
        if end > begin:
            yield begin, end
        begin = end + 1


@cache
def open_cache() -> RangeCache:
    """Return the cache of this host; ConfigError when its limit in the environment is no number."""
    text = os.environ.get("LLMSYS_CACHE_GIB") or str(DEFAULT_GIB)
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not 0 < gib < float("inf"):
        raise ConfigError(
            f"LLMSYS_CACHE_GIB={text} is not a positive number. Set the size of the cache in GiB."
        )
    return RangeCache(get_cache_folder() / "blocks", int(gib * 2**30))
