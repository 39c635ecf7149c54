"""The bytes of one file, here or elsewhere, at any position; a read that fails is tried again with back-off.

Reads a path or URL, gives a `InputStream` that FastWARC, Arrow and our own readers take for a binary file. Promises:
what is read is complete and of one version of the file (known by size, time and inode here, and by its tag elsewhere),
or an `ReadError`; a stream that ends before the size of the file is an error too, and is tried again like any
other; waiting decides when, never what.
"""

import errno
import io
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from data_pipeline.readers.file_name import format_file_name
from data_pipeline.readers.remote_file import get_entity_tag, is_remote, open_file_system
from llmsys.redact import redact_secrets, redact_url

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 60.0
_READ_AHEAD = 8 << 20
_READ_COSTS = 128  # what a read takes beside its bytes, in bytes

Result = TypeVar("Result")
sleep = time.sleep  # tests wait less


class ReadError(OSError):
    """A read failed for good; `position` is where, in bytes."""

    def __init__(self, position: int, tries: int, cause: Exception) -> None:
        self.position = position
        said = redact_secrets(str(cause))
        super().__init__(f"unreadable after {tries} {'tries' if tries > 1 else 'try'}: {said}")


class FileChangedError(OSError):
    """The file is another one than when it was opened first: what was read does not belong to the rest."""


class NotRegularError(OSError):
    """A pipe, a socket or a device in place of a file."""


_CHANGED = "the file changed while it was read"
# Trying again does not help.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotRegularError, FileChangedError)


class _OpenFile(Protocol):
    """What a place must offer."""

    size: int
    version: str  # changes when the file does

    def read_at(self, position: int, size: int) -> bytes: ...
    def close(self) -> None: ...


class _LocalFile:
    """A file on this machine; reading it holds no position, so that nothing can lose it.

    Each read asks afterwards whether the file is still what was opened: what was rewritten in place is of two versions.
    """

    def __init__(self, path: str) -> None:
        about = os.stat(path)
        if stat.S_ISDIR(about.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(about.st_mode):
            raise NotRegularError("Not a regular file")  # a pipe would wait for ever
        self._handle = os.open(path, os.O_RDONLY)
        self.size, self.version = about.st_size, str(compute_stat_stamp(about))

    def read_at(self, position: int, size: int) -> bytes:
        data = os.pread(self._handle, size, position)
        if str(compute_stat_stamp(os.fstat(self._handle))) != self.version:
            raise FileChangedError(_CHANGED)
        return data

    def close(self) -> None:
        os.close(self._handle)


def compute_stat_stamp(about: os.stat_result) -> list[int]:
    """Return size, time and number of a file here: what it must change to count as another one."""
    return [about.st_size, about.st_mtime_ns, about.st_ino]


class _RemoteFile:
    """A file that fsspec opens."""

    def __init__(self, url: str) -> None:
        files, path = open_file_system(url)
        files.invalidate_cache(path)  # a listing of an hour ago does not say what is there now
        about = files.info(path)
        self.size, self.version = int(about["size"]), f"{about['size']} {get_entity_tag(about)}"
        self._stream: Any = files.open(path, "rb", block_size=_READ_AHEAD, cache_type="readahead")

    def read_at(self, position: int, size: int) -> bytes:
        self._stream.seek(position)
        data: bytes = self._stream.read(size)
        return data

    def close(self) -> None:
        self._stream.close()


class InputStream(io.RawIOBase):
    """One open file, or what a range of it shows: `start` is where to begin, `size` in bytes is where it ends.

    `work` counts what reading has cost so far, in bytes.
    """

    def __init__(self, path: str, tries: int, start: int = 0, stop: int | None = None) -> None:
        # What records and messages call it; `_address` is what opens it.
        self.path = redact_url(path) if is_remote(path) else format_file_name(path)
        self._address, self.tries = path, tries
        self._place: Callable[[str], _OpenFile] = _RemoteFile if is_remote(path) else _LocalFile
        self._position = self._bytes = self.work = 0
        self._opened: _OpenFile | None = None
        self._opened = self._call_with_retries(None, lambda: self._place(path))
        self._version = self._opened.version
        self.size = self._opened.size if stop is None else min(stop, self._opened.size)
        self.start = start

    @property
    def progress(self) -> int:
        """Bytes that were read so far, at most the size of the file."""
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
        """Move, and return the new position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes from the position, all that are left when it is negative."""
        wanted = self.size - self._position if size is None or size < 0 else size
        data = self.read_at(self._position, wanted)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer from the position and return how many bytes it got."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_at(self, position: int, size: int) -> bytes:
        """Return `size` bytes from a position, fewer at the end of the file, none before its beginning.

        The position of `read` stays.
        """
        wanted = max(0, min(size, self.size - position)) if position >= 0 else 0
        data = self._call_with_retries(position, lambda: self._read_complete(position, wanted)) if wanted else b""
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
            self._opened = self._place(self._address)
            if self._opened.version != self._version:
                raise FileChangedError(_CHANGED)
        data = self._opened.read_at(position, size)
        while len(data) < size:
            more = self._opened.read_at(position + len(data), size - len(data))
            if not more:
                raise OSError(f"the file ends at byte {position + len(data)} of {self.size}")
            data += more
        return data

    def _call_with_retries(self, position: int | None, attempt: Callable[[], Result]) -> Result:
        """`position` is None for opening: what can never be opened has an error of its own."""
        for number in range(1, self.tries + 1):
            try:
                return attempt()
            except Exception as error:  # every storage has errors of its own
                final = isinstance(error, _FINAL)
                if final and position is None:
                    raise
                if final or number == self.tries:
                    raise ReadError(position or 0, number, error) from error
                sleep(min(_FIRST_WAIT_SECONDS * 2 ** (number - 1), _LONGEST_WAIT_SECONDS))
                self._close_failed_file()
        raise AssertionError("tries is at least 1")

    def _close_failed_file(self) -> None:
        """Close what failed, so that the next try opens it anew."""
        opened, self._opened = self._opened, None
        if opened is not None:
            with suppress(Exception):  # it is broken already
                opened.close()


def open_input_stream(path: str, tries: int = 5, start: int = 0, stop: int | None = None) -> InputStream:
    """Open a path or URL, or a range of it that begins and ends with a whole record; OSError when it cannot be."""
    return InputStream(path, tries, start, stop)
