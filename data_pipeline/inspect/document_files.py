"""A file of documents, kept or dropped, hashed and recounted against its entry in the manifest."""

from collections.abc import Iterator
from pathlib import Path

from data_pipeline.inspect.finding import DatasetFinding
from llmsys.errors import DataError
from llmsys.manifest import DocumentFile
from llmsys.shard_file import describe_document_file, compute_file_digest


def verify_document_file(path: Path, room: str, entry: DocumentFile) -> Iterator[DatasetFinding]:
    """Yield what is wrong with one file of `room` ("documents" or "dropped")."""
    name = f"{room}/{entry.name}"
    if (size := path.stat().st_size) != entry.size:
        yield DatasetFinding(name, "", f"it has {size:,} bytes, the manifest says {entry.size:,}")
    elif (digest := compute_file_digest(path)) != entry.digest:
        yield DatasetFinding(name, "", f"its digest is {digest}, the manifest says {entry.digest}")
    elif path.suffix == ".arrow":
        yield from _verify_row_count(path, name, entry)


def _verify_row_count(path: Path, name: str, entry: DocumentFile) -> Iterator[DatasetFinding]:
    try:
        rows = describe_document_file(path).rows
    except DataError as error:
        yield DatasetFinding(name, "", f"it cannot be read: {error}")
        return
    if rows != entry.rows:
        yield DatasetFinding(name, "", f"it has {rows:,} documents, the manifest says {entry.rows:,}")
