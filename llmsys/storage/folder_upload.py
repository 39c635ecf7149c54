"""Upload the files of a local folder that its remote folder lacks.

Reads/Writes: `.uploads.jsonl` of the local folder: size and time of each file that was uploaded,
and the entity tag of its object. Several processes append to it.

Invariants:
- A file is uploaded again if it, or its object, changed since.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmsys.storage.object_store import ObjectFolder, RemoteObject

RECORD_NAME = ".uploads.jsonl"
# Files that are uploaded or downloaded at the same time.
MAX_TRANSFERS = 8
TRANSFERS_IN_QUEUE = 1_000


class UploadRecord:
    """The files of a local folder and their objects, as they were when they were equal."""

    def __init__(self, folder: Path) -> None:
        """Read the record of a folder.

        Args:
            folder: The local folder. Without a record in it no file counts as uploaded. A line that
                a killed process wrote half is ignored.
        """
        self._folder = folder
        self._path = folder / RECORD_NAME
        self._known: dict[str, list[int | str]] = {}
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            try:
                name, *stamp = json.loads(line)
            except ValueError:  # a killed process may have written half of the last line
                continue
            self._known[name] = stamp

    def is_current(self, name: str, found: RemoteObject | None) -> bool:
        """Return whether the object of a file has its bytes."""
        return found is not None and self._known.get(name) == [
            *read_stamp(self._folder / name),
            found.tag,
        ]

    def has_tag(self, name: str, found: RemoteObject) -> bool:
        """Return whether an object is the one that was uploaded or downloaded last, whatever the
        file is
        by now.

        Args:
            name: path of the file below the folder.
            found: the object as the storage has it now.
        """
        return self._known.get(name, [""])[-1] == found.tag

    def add(self, name: str, found: RemoteObject, stamp: list[int] | None = None) -> None:
        """Record that a file and its object have the same bytes.

        Args:
            name: path of the file below the folder.
            found: the object, whose tag names its bytes.
            stamp: size and modification time when the bytes were read; None: those of now.
        """
        known: list[int | str] = [*(stamp or read_stamp(self._folder / name)), found.tag]
        self._known[name] = known
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, json.dumps([name, *known]).encode() + b"\n")
        finally:
            os.close(handle)


def read_stamp(path: Path) -> list[int]:
    """Return what changes when a file does.

    Args:
        path: The file.

    Returns:
        Its size in bytes and its modification time in ns.
    """
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def list_changed(
    record: UploadRecord, names: Iterable[str], objects: Mapping[str, RemoteObject]
) -> list[str]:
    """List the files whose objects are missing or have other bytes.

    Args:
        record: The record of the local folder.
        names: Files, relative to the folder.
        objects: The objects of the remote folder.

    Returns:
        Names in their order.
    """
    return [name for name in names if not record.is_current(name, objects.get(name))]


def upload_files(
    folder: Path, remote: ObjectFolder, names: Iterable[str], record: UploadRecord
) -> None:
    """Upload files, several at a time.

    Args:
        folder: The local folder.
        remote: The remote folder.
        names: Files, relative to both.
        record: The record of the local folder.

    Raises:
        DataError: The storage refused one for good.
    """

    def upload(name: str) -> None:
        # Before it is read: an event file may grow meanwhile.
        stamp = read_stamp(folder / name)
        record.add(name, remote.upload(folder / name, name), stamp)

    _run_transfers(upload, names)


def download_files(folder: Path, remote: ObjectFolder, names: Mapping[str, str]) -> None:
    """Download objects, several at a time.

    Args:
        folder: The local folder.
        remote: The remote folder.
        names: The file of each object, relative to the folder.

    Raises:
        DataError: The storage refused one for good.
        FileNotFoundError: There is no such object.
    """
    _run_transfers(lambda name: remote.download(name, folder / names[name]), names)


def _run_transfers(transfer: Callable[[str], None], names: Iterable[str]) -> None:
    """Transfer files at the same time. After a failure those under way are waited for: none may
    be written later.
    """
    left = list(names)
    with ThreadPoolExecutor(MAX_TRANSFERS) as threads:
        for begin in range(0, len(left), TRANSFERS_IN_QUEUE):
            queued = [
                threads.submit(transfer, name) for name in left[begin : begin + TRANSFERS_IN_QUEUE]
            ]
            try:
                for future in queued:
                    future.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
