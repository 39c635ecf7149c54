"""Contents of small files that rank 0 has read for all ranks: thousands of ranks would ask one file system at once."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_RECEIVED: dict[Path, bytes] = {}


def read_received_file(path: Path) -> bytes:
    """Read a small file that every rank needs.

    Args:
        path: The file.

    Returns:
        Its bytes, or those that `hold_received_files` holds.
    """
    return path.read_bytes() if (received := _RECEIVED.get(path)) is None else received


@contextmanager
def hold_received_files(files: Mapping[Path, bytes]) -> Iterator[None]:
    """Have `read_received_file` return contents that rank 0 has sent.

    Args:
        files: Contents by path.

    Yields:
        None.
    """
    _RECEIVED.update(files)
    try:
        yield
    finally:
        for path in files:
            del _RECEIVED[path]
