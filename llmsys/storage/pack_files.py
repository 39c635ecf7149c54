"""Keep many small files in few large ones: packs, to which processes append.

A folder whose name ends in `.packs` holds packs of about 1 GiB each. A file that is written into
it, such as `filtered.packs/block.arrow`, becomes a part of a pack; it is read under the path
`filtered.packs/1f09c3-000/007.pack/START-LENGTH`. So a stage makes as many files as it has workers
and gigabytes, not as it has tasks.

Reads/Writes: `*.packs/HOST-NNN/NNN.pack`. A pack is a row of parts; a part is a header of 64 bytes
(magic, length, xxh3_128 of the bytes, a checksum of the header) and its bytes, and begins at a
multiple of 64.

Invariants:
- One process at a time appends to a pack: it holds the kernel's lock of the file, which ends with
  the process. Each host has packs of its own: some shared file systems keep locks to one host
  without saying so (Lustre with localflock).
- A header is written after its bytes. What a killed writer left has no header, and the next writer
  cuts it off.
- Bytes of a part never change, and depend on nothing else in the pack.
"""

import fcntl
import itertools
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa
import xxhash

PACKS = ".packs"
PACK = ".pack"
# A pack that has reached it takes no further part.
FULL_BYTES = 1 << 30
_PACKS_PER_FOLDER = 1_000
_ALIGNMENT = 64
# Where the first part of a pack begins.
FIRST_START = _ALIGNMENT
_MAGIC = b"llmpack1"
# Magic, length, xxh3_128 of the bytes, xxh3_64 of the fields before.
_HEADER = struct.Struct("<8sQ16s")
_CHECK = struct.Struct("<Q")
_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file that is a part of a pack: `length` bytes from `start`."""

    pack: Path
    start: int
    length: int

    @property
    def stop(self) -> int:
        """The end of its bytes in the pack."""
        return self.start + self.length

    @property
    def path(self) -> Path:
        """The path under which it is read."""
        return self.pack / f"{self.start}-{self.length}"

    def map_bytes(self) -> pa.Buffer:
        """Return its bytes, mapped. Raise OSError if the pack ends before they do."""
        with pa.memory_map(str(self.pack)) as file:
            # The rest of the pack is neither read nor announced to the kernel.
            file.seek(self.start)
            data = file.read_buffer(self.length)
        if len(data) < self.length:
            raise OSError(f"{self.pack} ends before byte {self.stop}")
        return data


def find_packed_file(path: Path) -> PackedFile | None:
    """Return the part of a pack that a path names.

    Args:
        path: Any path.

    Returns:
        The part, or None if the path names a file of its own. The pack need not exist.
    """
    parsed = parse_packed_name(os.fspath(path))
    return None if parsed is None else PackedFile(Path(parsed[0]), *parsed[1:])


def parse_packed_name(name: str) -> tuple[str, int, int] | None:
    """Return what the name of a part says, without a path: a journal has millions of them.

    Args:
        name: Any name of a file.

    Returns:
        Name of the pack, start and length; None if it names a file of its own.
    """
    pack, _, place = name.rpartition("/")
    if not pack.endswith(PACK):
        return None
    start, _, length = place.partition("-")
    return pack, int(start), int(length)


def is_packed_name(name: str) -> bool:
    """Return whether a file that is written under a name becomes a part of a pack.

    Args:
        name: A name with its folder.

    Returns:
        True if its folder is one of packs.
    """
    return name.rpartition("/")[0].endswith(PACKS)


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part that this process wrote.

    Attributes:
        file: The part.
        digest: xxh3_128 of its bytes, in hex.
        modified_ns: Time of the pack after the part.
    """

    file: PackedFile
    digest: str
    modified_ns: int


class _Pack:
    """A pack whose lock this process holds."""

    def __init__(self, path: Path, handle: int, end: int) -> None:
        self.path = path
        self.handle = handle
        self.end = end

    def is_usable(self) -> bool:
        """Return whether another part fits, and the file is still in its folder."""
        return self.end < FULL_BYTES and os.fstat(self.handle).st_nlink > 0


# The packs that this process holds and does not write at the moment, by folder; and the parts
# that it wrote, by the path that they were written to, until they are asked for.
_idle: dict[Path, list[_Pack]] = {}
_written: dict[Path, WrittenPart] = {}


class PackWriter:
    """A binary file that becomes a part of a pack: written in one go, then kept or cut off."""

    def __init__(self, path: Path) -> None:
        """Append to a pack of the folder of `path`, which no other writer appends to."""
        self._path = path
        self._pack = _take_pack(path.parent)
        self._start = self._pack.end + _ALIGNMENT
        self._hash = xxhash.xxh3_128()
        self._length = 0
        self._is_done = False
        self._file = os.fdopen(os.dup(self._pack.handle), "wb", buffering=_READ)
        self._file.seek(self._start)

    @property
    def closed(self) -> bool:
        """True when no more can be written."""
        return self._file.closed

    def write(self, data: bytes) -> int:
        """Append bytes and return their number."""
        self._hash.update(data)
        count = self._file.write(data)
        self._length += count
        return count

    def tell(self) -> int:
        """Return the number of bytes written: a part begins at 0 wherever it is."""
        return self._length

    def flush(self) -> None:
        """Give the bytes to the system."""
        self._file.flush()

    def keep(self) -> None:
        """Write the header, by which the part exists."""
        self._file.close()
        pack = self._pack
        fields = _HEADER.pack(_MAGIC, self._length, self._hash.digest())
        header = fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
        os.pwrite(pack.handle, header.ljust(_ALIGNMENT, b"\0"), pack.end)
        file = PackedFile(pack.path, self._start, self._length)
        modified = os.fstat(pack.handle).st_mtime_ns
        _written[self._path] = WrittenPart(file, self._hash.hexdigest(), modified)
        pack.end = _align(file.stop)
        self._release_pack()

    def discard(self) -> None:
        """Cut off what was written, unless it was kept."""
        if self._is_done:
            return
        with suppress(OSError):  # closing flushes, which a full disk refuses again
            self._file.close()
        os.ftruncate(self._pack.handle, self._pack.end)
        self._release_pack()

    def _release_pack(self) -> None:
        self._is_done = True
        _idle.setdefault(self._path.parent, []).append(self._pack)


def take_written_part(path: Path) -> WrittenPart | None:
    """Return the part that this process last wrote to a path, once.

    Args:
        path: The path that was written to.

    Returns:
        The part, or None if nothing was written there.
    """
    return _written.pop(path, None)


def release_packs(folder: Path) -> None:
    """Let other processes append to the packs that this process holds.

    Args:
        folder: Only packs below it.
    """
    for packs in [each for each in _idle if each.is_relative_to(folder)]:
        for pack in _idle.pop(packs):
            os.close(pack.handle)
    for path in [each for each in _written if each.is_relative_to(folder)]:
        del _written[path]


def _take_pack(folder: Path) -> _Pack:
    """Return a pack of a folder that this process may append to."""
    idle = _idle.get(folder, [])
    while idle:
        pack = idle.pop()
        if pack.is_usable():
            return pack
        os.close(pack.handle)
    for number in itertools.count():
        if (found := _lock_pack(build_pack_path(folder, number))) is not None:
            return found
    raise AssertionError


def build_pack_path(folder: Path, number: int) -> Path:
    """Return the path of a pack of this host: at most 1,000 are in one folder.

    Args:
        folder: The folder of packs.
        number: Number of the pack among those of the host, from 0.

    Returns:
        The path.
    """
    group, member = divmod(number, _PACKS_PER_FOLDER)
    return folder / f"{_get_host_key()}-{group:03d}" / f"{member:03d}{PACK}"


@cache
def _get_host_key() -> str:
    """Return six hex digits of this host: of its name alone where it has no identity of a boot."""
    name = platform.node()
    with suppress(OSError):
        # Hosts of one image may have one name.
        name += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return xxhash.xxh3_64_hexdigest(name.encode())[:6]


def _lock_pack(path: Path) -> _Pack | None:
    """Return a pack, which is created if it is missing; None if it is full, damaged, or another
    process appends to it.
    """
    try:
        if path.stat().st_size >= FULL_BYTES:
            return None
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end = find_torn_tail(handle)
        if end is not None and end < FULL_BYTES:
            if end < os.fstat(handle).st_size:
                os.ftruncate(handle, end)
            return _Pack(path, handle, end)
    except BlockingIOError:
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def find_torn_tail(handle: int) -> int | None:
    """Find the end of the last complete part.

    Args:
        handle: File descriptor of a pack, to which nobody appends.

    Returns:
        The position where the next part begins; None if something else than a torn tail is wrong.
    """
    end = 0
    size = os.fstat(handle).st_size
    for start, length, _ in _iter_headers(handle, size):
        if start < 0:
            return None
        end = _align(start + length)
    return end


def list_intact_parts(path: Path) -> tuple[set[tuple[int, int]], bool]:
    """Read a pack and find the parts whose bytes have their checksum.

    Args:
        path: The pack.

    Returns:
        (start, length) of each intact part, and whether all are, up to a torn tail.

    Raises:
        OSError: The pack cannot be read.
    """
    intact = set[tuple[int, int]]()
    is_sound = True
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start, length, digest in _iter_headers(file.fileno(), size):
            if start < 0:
                return intact, False
            if _hash_bytes(file.fileno(), start, length) == digest:
                intact.add((start, length))
            else:
                is_sound = False
    return intact, is_sound


def has_part(path: Path, start: int, length: int, digest: str) -> bool:
    """Return whether a pack has a part, by its header: another pack may have come to the same path.

    Args:
        path: The pack.
        start: First byte of the part.
        length: Number of bytes.
        digest: xxh3_128 of the bytes, in hex.

    Returns:
        False if the pack is missing, or another part is there.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start - _ALIGNMENT)
            header = file.read(_ALIGNMENT)
            is_long = os.fstat(file.fileno()).st_size >= start + length
    except OSError:
        return False
    fields = _HEADER.pack(_MAGIC, length, bytes.fromhex(digest))
    check = _CHECK.pack(xxhash.xxh3_64_intdigest(fields))
    return is_long and header == (fields + check).ljust(_ALIGNMENT, b"\0")


def cut_torn_tail(path: Path) -> bool:
    """Cut off what a killed writer left at the end of a pack.

    Args:
        path: The pack.

    Returns:
        False if another process appends to the pack, which then stays as it is.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end = find_torn_tail(handle)
        if end is not None and end < os.fstat(handle).st_size:
            os.ftruncate(handle, end)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def _iter_headers(handle: int, size: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield start, length and digest of each part; a last start of -1 says that a header is
    damaged. End silently at a torn tail.
    """
    position = 0
    while position + _ALIGNMENT <= size:
        header = os.pread(handle, _ALIGNMENT, position)
        if not any(header):
            return
        fields = header[: _HEADER.size]
        magic, length, digest = _HEADER.unpack(fields)
        (check,) = _CHECK.unpack_from(header, _HEADER.size)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(fields):
            yield -1, 0, b""
            return
        start = position + _ALIGNMENT
        if start + length > size:
            return
        yield start, length, digest
        position = _align(start + length)


def _hash_bytes(handle: int, start: int, length: int) -> bytes:
    state = xxhash.xxh3_128()
    stop = start + length
    for position in range(start, stop, _READ):
        state.update(os.pread(handle, min(_READ, stop - position), position))
    return state.digest()


def _align(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT
