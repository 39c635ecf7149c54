"""Split long crawl files into blocks, the unit of work of all stages up to collecting.

Reads each local file once, to find split points and to hash every block, so that a partly changed file is processed
again in part. A remote file is one block, identified by its tag.

Invariants:
    - The split changes no byte of a dataset.
"""

from dataclasses import dataclass
from typing import Any

from data_pipeline.executors.base import Report
from data_pipeline.readers.split_file import split_file


@dataclass(frozen=True, slots=True)
class InputBlock:
    """A byte range of a file, or all of it (`stop` None).

    Attributes:
        source: Path or URL.
        name: Unique name in the dataset.
        start: First byte.
        stop: End of the range; None: the end of the file.
        digest: Hash of the contents; with the range it decides the task key.
        size: Bytes, 0 if unknown.
    """

    source: str
    name: str
    start: int
    stop: int | None
    digest: str
    size: int


def split_input_file(report: Report, *, source: str, block_bytes: int) -> dict[str, Any]:
    """Find the split points of a file. Progress is in bytes.

    Args:
        report: Progress callback.
        source: Local path.
        block_bytes: Wanted size of a block.

    Returns:
        `blocks`: [start, stop, digest] each, empty if the file is unreadable.
    """
    try:
        ranges = split_file(source, block_bytes)
    except OSError as error:  # extraction will name the reason; a later success does not change size or time
        return {"blocks": [], "again": not isinstance(error, IsADirectoryError)}
    report(ranges[-1].stop, 0)
    return {"blocks": [[one.start, one.stop, one.digest] for one in ranges]}


def list_input_blocks(source: str, name: str, result: dict[str, Any]) -> list[InputBlock]:
    """List the blocks of a file.

    Args:
        source: Path or URL.
        name: Name of the file in the dataset.
        result: Result of `split_input_file`.

    Returns:
        One block for a short or unreadable file, else one per range.
    """
    found = result["blocks"]
    # A single block is read to the end of the file, whatever its size is now.
    if len(found) < 2:
        _, stop, digest = found[0] if found else (0, 0, "")
        return [InputBlock(source, name, 0, None, digest, stop)]
    return [
        InputBlock(source, f"{name}.{number:05d}", start, stop, digest, stop - start)
        for number, (start, stop, digest) in enumerate(found)
    ]
