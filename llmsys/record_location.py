"""Where in a file a record lies, in the unit in which files of its kind are counted."""

from pathlib import PurePosixPath

_COUNTED_IN_ROWS = frozenset({".parquet", ".pq", ".arrow", ".feather", ".ipc"})


def is_counted_in_rows(file: str) -> bool:
    """Whether the offsets of a file are numbers of rows, and not of bytes; its name decides."""
    return PurePosixPath(file).suffix.lower() in _COUNTED_IN_ROWS


def format_record_place(file: str, offset: int) -> str:
    """Return `FILE at byte 1,234`, or `FILE at row 12`."""
    return f"{file} at {'row' if is_counted_in_rows(file) else 'byte'} {offset:,}"
