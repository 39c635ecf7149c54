"""Contents of small files that rank 0 has read for all ranks: thousands of ranks would ask one
file system at once.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# By path. A reader of such a file takes it from here first.
RECEIVED: dict[Path, bytes] = {}


@contextmanager
def hold_received_files(files: Mapping[Path, bytes]) -> Iterator[None]:
    """Have readers take contents that rank 0 has sent.

    Args:
        files: Contents by path.

    Yields:
        None.
    """
    RECEIVED.update(files)
    try:
        yield
    finally:
        for path in files:
            del RECEIVED[path]
