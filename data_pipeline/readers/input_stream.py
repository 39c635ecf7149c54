"""Random-access bytes of one local or remote file; failed reads are retried with exponential
back-off.

An `InputStream` is a binary file for FastWARC, Arrow and the readers of this package.

Invariants:
- Every read is complete and of one version of the file (size, modification time and inode locally,
  entity tag remotely), or raises `ReadError`.
- A stream that ends before the size of the file is an error and retried like any other.
- Retries change when bytes arrive, never which.
"""

import errno
import io
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from llmsys.data_pipeline.readers.remote_file import ASKED_BY
from llmsys.log import redact_secrets, redact_url
from llmsys.storage.object_store import get_entity_tag, open_file_system
from llmsys.storage.paths import is_remote

# os.fsdecode's surrogates for bytes that are not UTF-8 (PEP 383)
_UNDECODED = re.compile("[\udc80-\udcff]")


def format_file_name(path: str) -> str:
    """Return a path as valid UTF-8 text.

    Args:
        path: A path as the operating system gives it.

    Returns:
        A byte that is not UTF-8 becomes `%E9`, as in a URL.
    """
    return _UNDECODED.sub(lambda match: f"%{os.fsencode(match[0])[0]:02X}", path)


PACKED = (".gz", ".zst", ".zstd", ".lz4", ".bz2", ".xz")
"""Ends of the names of compressed files."""


def remove_compression_suffix(path: str) -> str:
    """Return a path in lower case without the ends that name compressions.

    Args:
        path: A path or URL.
    """
    name = path.lower()
    for end in PACKED:
        name = name.removesuffix(end)
    return name


_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 60.0
_READ_AHEAD = 8 << 20
_READ_COSTS = 128  # overhead of one read, in bytes

Result = TypeVar("Result")
sleep = time.sleep  # tests wait less


class ReadError(OSError):
    """A read failed after all retries, at byte `position`."""

    def __init__(self, position: int, attempts: int, cause: Exception) -> None:
        self.position = position
        reason = redact_secrets(str(cause))
        super().__init__(
            f"unreadable after {attempts} {'tries' if attempts > 1 else 'try'}: {reason}"
        )


class FileChangedError(OSError):
    """The file is not the one that was opened first: its bytes do not belong to those read
    before.
    """


class NotRegularError(OSError):
    """The path is a pipe, a socket or a device."""


_CHANGED = "the file changed while it was read"
# Retrying does not help.
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotRegularError,
    FileChangedError,
)
# A loop of symbolic links, and a name that is too long.
_FINAL_NUMBERS = (errno.ELOOP, errno.ENAMETOOLONG)


class _OpenFile(Protocol):
    """An open file of some storage."""

    size: int
    version: str  # changes when the file does

    def read_block(self, position: int, size: int) -> bytes: ...
    def close(self) -> None: ...


class _LocalFile:
    """A local file, read by absolute position.

    Each read is followed by a check that the file is still the one opened: one rewritten in place
    mixes two versions.
    """

    def __init__(self, path: str) -> None:
        about = os.stat(path)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(about.st_mode):
            raise NotRegularError("Not a regular file")  # opening a pipe would block for ever
        self._handle = os.open(path, os.O_RDONLY)
        self.size = about.st_size
        self.version = str(compute_stat_stamp(about))

    def read_block(self, position: int, size: int) -> bytes:
        data = os.pread(self._handle, size, position)
        if str(compute_stat_stamp(os.fstat(self._handle))) != self.version:
            raise FileChangedError(_CHANGED)
        return data

    def close(self) -> None:
        os.close(self._handle)


def compute_stat_stamp(about: os.stat_result) -> list[int]:
    """Compute the identity of a local file without reading it.

    Args:
        about: Its status.

    Returns:
        Size, modification time (ns) and inode: a file with other values is another file.
    """
    return [about.st_size, about.st_mtime_ns, about.st_ino]


class _RemoteFile:
    """A file opened by fsspec."""

    def __init__(self, url: str, read_ahead: int | None = None) -> None:
        files, path = open_file_system(url, ASKED_BY)
        files.invalidate_cache(path)  # fsspec caches listings; the file may be newer
        about = files.info(path)
        self.size = int(about["size"])
        self.version = f"{about['size']} {get_entity_tag(about)}"
        self._stream: Any = files.open(
            path, "rb", block_size=read_ahead or _READ_AHEAD, cache_type="readahead"
        )

    def read_block(self, position: int, size: int) -> bytes:
        self._stream.seek(position)
        data: bytes = self._stream.read(size)
        return data

    def close(self) -> None:
        self._stream.close()


class InputStream(io.RawIOBase):
    """One open file, or a byte range of it.

    Attributes:
        path: the name for records and messages, with secrets redacted.
        start: byte at which readers begin.
        size: byte at which the file or its range ends.
        work: cost of reading so far, in bytes, with `_READ_COSTS` per read.
    """

    def __init__(
        self,
        path: str,
        max_attempts: int,
        start: int = 0,
        stop: int | None = None,
        read_ahead: int | None = None,
    ) -> None:
        self.path = redact_url(path) if is_remote(path) else format_file_name(path)
        self._address = path
        self.max_attempts = max_attempts
        self._open_file: Callable[[str], _OpenFile] = (
            partial(_RemoteFile, read_ahead=read_ahead) if is_remote(path) else _LocalFile
        )
        self._position = self._bytes = self.work = 0
        self._opened: _OpenFile | None = None
        self._opened = self._call_with_retries(None, lambda: self._open_file(path))
        self._version = self._opened.version
        self.size = self._opened.size if stop is None else min(stop, self._opened.size)
        self.start = start

    @property
    def progress(self) -> int:
        """Bytes read so far, at most the size of the file."""
        return min(self._bytes, self.size)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes from the position; all that are left if `size` is negative."""
        wanted = self.size - self._position if size is None or size < 0 else size
        data = self.read_block(self._position, wanted)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position and return the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_block(self, position: int, size: int) -> bytes:
        """Read bytes without moving the position of `read`. A failed read is tried again.

        Args:
            position: First byte, counted from the beginning of the file.
            size: Number of bytes.

        Returns:
            `size` bytes; fewer where the file or its range ends before, none where `position` is
            negative.

        Raises:
            ReadError: The last attempt failed, or one failed in a way that another would, too.
        """
        wanted = max(0, min(size, self.size - position)) if position >= 0 else 0
        data = (
            self._call_with_retries(position, lambda: self._read_complete(position, wanted))
            if wanted
            else b""
        )
        self._bytes += wanted
        self.work += wanted + _READ_COSTS
        return data

    def close(self) -> None:
        """Close the file."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        super().close()

    def _read_complete(self, position: int, size: int) -> bytes:
        if self._opened is None:
            self._opened = self._open_file(self._address)
            if self._opened.version != self._version:
                raise FileChangedError(_CHANGED)
        data = self._opened.read_block(position, size)
        while len(data) < size:
            more = self._opened.read_block(position + len(data), size - len(data))
            if not more:
                raise OSError(f"the file ends at byte {position + len(data)} of {self.size}")
            data += more
        return data

    def _call_with_retries(self, position: int | None, attempt: Callable[[], Result]) -> Result:
        """Call `attempt` up to `max_attempts` times; `position` is None for opening."""
        for number in range(1, self.max_attempts + 1):
            try:
                return attempt()
            except Exception as error:  # every storage has its own errors
                number_of_system = getattr(error, "errno", None)
                final = isinstance(error, _FINAL) or number_of_system in _FINAL_NUMBERS
                if final and position is None:  # callers tell a missing file from a failed read
                    raise
                if final or number == self.max_attempts:
                    raise ReadError(position or 0, number, error) from error
                sleep(min(_FIRST_WAIT_SECONDS * 2 ** (number - 1), _LONGEST_WAIT_SECONDS))
                self._close_failed_file()
        raise AssertionError("max_attempts must be at least 1")

    def _close_failed_file(self) -> None:
        """Close the failed file, so that the next attempt opens it again."""
        opened = self._opened
        self._opened = None
        if opened is not None:
            with suppress(Exception):  # it has failed already
                opened.close()


def open_input_stream(
    path: str,
    max_attempts: int = 5,
    start: int = 0,
    stop: int | None = None,
    read_ahead: int | None = None,
) -> InputStream:
    """Open a path or URL, or a byte range of it that begins and ends between two records.

    Args:
        path: local path or URL.
        max_attempts: attempts in all at reading a remote file.
        start: first byte.
        stop: byte after the last; None reads to the end.
        read_ahead: bytes that are fetched with each read of a remote file; None for 8 MiB.

    Returns:
        The open stream of decoded bytes.

    Raises:
        OSError: if it cannot be opened.
    """
    return InputStream(path, max_attempts, start, stop, read_ahead)
