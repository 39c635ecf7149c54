"""Crawl files in, the blocks that tasks work on out: whole files, or ranges of long ones.

Reads each local file once, to find where it can be cut and to hash every block, so that a file that changed in part is
read again in part; a remote file is one block, known by its tag. How files are cut changes no byte of a dataset.
"""

from dataclasses import dataclass
from typing import Any

from data_pipeline.executors.base import Report
from data_pipeline.readers.split_file import split_file


@dataclass(frozen=True, slots=True)
class InputBlock:
    """A range of a file, or all of it (`stop` None). `name` is unique in the dataset, `digest` decides with the range.

    `size` is in bytes; 0 when nobody knows.
    """

    source: str
    name: str
    start: int
    stop: int | None
    digest: str
    size: int


def split_input_file(report: Report, *, source: str, block_bytes: int) -> dict[str, Any]:
    """Say where a file can be cut, as [start, stop, digest] per block; progress is in bytes."""
    try:
        ranges = split_file(source, block_bytes)
    except OSError as error:  # reading will name it; that it may be read now shows in no stamp
        return {"blocks": [], "again": not isinstance(error, IsADirectoryError)}
    report(ranges[-1].stop, 0)
    return {"blocks": [[one.start, one.stop, one.digest] for one in ranges]}


def list_input_blocks(source: str, name: str, result: dict[str, Any]) -> list[InputBlock]:
    """Return the blocks of a file that was surveyed; a file that could not be is one block, and so is a short one."""
    found = result["blocks"]
    if len(found) < 2:
        _, stop, digest = found[0] if found else (0, 0, "")
        return [InputBlock(source, name, 0, None, digest, stop)]
    return [
        InputBlock(source, f"{name}.{number:05d}", start, stop, digest, stop - start)
        for number, (start, stop, digest) in enumerate(found)
    ]
