"""Describe the location of a record in its input file."""

from pathlib import PurePosixPath

_COUNTED_IN_ROWS = frozenset({".parquet", ".pq", ".arrow", ".feather", ".ipc"})


def is_counted_in_rows(file: str) -> bool:
    """Return True when the offsets of a file are row numbers instead of bytes.

    Args:
        file: The name or path of the file. Its suffix decides.

    Returns:
        True for Parquet and Arrow files.
    """
    return PurePosixPath(file).suffix.lower() in _COUNTED_IN_ROWS


def format_record_place(file: str, offset: int) -> str:
    """Format the location of a record.

    Args:
        file: The name or path of the file.
        offset: The row number or byte offset.

    Returns:
        `FILE at byte 1,234`, or `FILE at row 12`.
    """
    return f"{file} at {'row' if is_counted_in_rows(file) else 'byte'} {offset:,}"
