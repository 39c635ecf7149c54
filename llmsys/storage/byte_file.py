"""Files that are read by ranges: local ones, and copies of remote ones.

Reads: tokens/ of a dataset folder.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from llmsys.errors import DataError
from llmsys.storage.arrow_file import NEXT_STEP, REMAKE
from llmsys.storage.paths import find_folder_url


class ByteFile(Protocol):
    """A file of which ranges are read.

    Attributes:
        read: Return a number of bytes from an offset, fewer at the end of the file.
        size: Bytes of the file; None where only its storage knows.
        is_open: The file is the same at each read, whoever replaces it.
    """

    read: Callable[[int, int], bytes]
    size: int | None
    is_open: bool

    def require_complete(self, size: int) -> None:
        """Check that the file is the one that was opened.

        Args:
            size: bytes that it must have.

        Raises:
            DataError: it is gone, was replaced, or has another size.
        """

    def discard_range(self, size: int, offset: int) -> bool:
        """Discard the local copies of damaged bytes.

        Args:
            size: number of the bytes.
            offset: place of the first one in the file.

        Returns:
            True where reading again may give better ones.
        """

    def describe(self) -> str:
        """Return more about the file as it is now, for an error about damage."""


class LocalFile:
    """An open local file; one descriptor."""

    is_open = True

    def __init__(self, path: Path) -> None:
        """Open a file; DataError when it is missing or unreadable."""
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise DataError(f"{path} is missing, but the manifest lists it. {REMAKE}") from None
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}). {NEXT_STEP}") from error
        self._path = path
        self.size: int | None = os.fstat(self._handle).st_size
        # Called for every window: a method would cost as much as the call of the system.
        self.read: Callable[[int, int], bytes] = partial(os.pread, self._handle)

    def require_complete(self, size: int) -> None:
        """Implement `ByteFile.require_complete`."""
        status = os.fstat(self._handle)
        if not status.st_nlink:
            raise DataError(
                f"{self._path} disappeared during the run. Restore it, or run llmsys prepare "
                "CONFIG, which makes only missing files. Then start again."
            )
        if status.st_size != size:
            raise DataError(
                f"{self._path} changed during the run: {status.st_size:,} bytes, expected from "
                f"the manifest: {size:,}. {NEXT_STEP}"
            )

    def discard_range(self, size: int, offset: int) -> bool:
        """Implement `ByteFile.discard_range`: there is no copy."""
        return False

    def describe(self) -> str:
        """Implement `ByteFile.describe`: the path is enough."""
        return ""

    def __del__(self) -> None:
        """Close the file: a thread may still read one that others no longer need."""
        if hasattr(self, "_handle"):
            os.close(self._handle)


def open_byte_file(path: Path, digest: str) -> ByteFile:
    """Open a file of a dataset.

    Args:
        path: Its path; that of a remote file's copy opens the remote file.
        digest: A digest of its bytes, by which copies are named.

    Returns:
        The file.

    Raises:
        DataError: It is missing or cannot be read.
    """
    if (url := find_folder_url(path)) is None:
        return LocalFile(path)
    from llmsys.storage.range_cache import RemoteFile  # most datasets are local

    return RemoteFile(url, digest)
