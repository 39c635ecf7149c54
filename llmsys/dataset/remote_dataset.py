"""Copy the small files of a remote dataset to this machine: its manifest, its tokenizer and the
indexes of its splits.

Reads a dataset in object storage. Writes the folder of its copies in the cache. Tokens are read by
ranges, see `range_cache.py`.

Invariants:
- One process of a host copies them, and only when the manifest changed.
- An index is that of the manifest, or reading it fails: the manifest has its digest.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llmsys.dataset.manifest_section import MANIFEST_NAME
from llmsys.errors import DataError
from llmsys.storage.arrow_file import REMAKE
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.folder_lock import lock_folder
from llmsys.storage.folder_upload import UploadRecord, download_files
from llmsys.storage.object_store import open_object_folder
from llmsys.storage.paths import find_folder_url, is_plain_file_name

# Names the manifest whose files were copied.
FETCHED = ".fetched"
LOCK_SECONDS = 600


def fetch_dataset(folder: Path, url: str) -> None:
    """Bring the copies of a remote dataset's small files up to date.

    Args:
        folder: The local path of the dataset folder.
        url: Its URL.

    Raises:
        DataError: The storage cannot be read, or the dataset changed meanwhile.
    """
    remote = open_object_folder(url)
    if (found := remote.find_object(MANIFEST_NAME)) is None:
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        return
    with lock_folder(folder, LOCK_SECONDS):
        if (folder / MANIFEST_NAME).exists() and _read_fetched(folder) == found.tag:
            return
        (folder / FETCHED).unlink(missing_ok=True)
        names = [*remote.list_objects("tokenizer"), MANIFEST_NAME]
        try:
            download_files(folder, remote, {name: name for name in names})
            indexes = _list_indexes(json.loads((folder / MANIFEST_NAME).read_bytes()))
            download_files(folder, remote, {name: name for name in indexes})
        except FileNotFoundError as error:
            raise DataError(
                f"{url} changed while it was read: {error}. Wait until llmsys prepare has "
                "finished, then start again."
            ) from error
        write_bytes_atomically(folder / FETCHED, found.tag.encode())


def fetch_token_files(folder: Path, names: Sequence[str]) -> None:
    """Copy token files without page tables, which are mapped as a whole: of pairs, images and
    earlier versions.

    Args:
        folder: The dataset folder. A local one is left as it is.
        names: Names in its folder `tokens`.

    Raises:
        DataError: The storage cannot be read, or lacks a file.
    """
    if (url := find_folder_url(folder)) is None:
        return
    remote = open_object_folder(url)
    with lock_folder(folder, LOCK_SECONDS):
        objects = remote.list_objects("tokens")
        record = UploadRecord(folder)
        wanted = {f"tokens/{name}" for name in names}
        if missing := sorted(wanted - objects.keys()):
            raise DataError(f"{url}/{missing[0]} is missing, but the manifest lists it. {REMAKE}")
        changed = [
            name
            for name in sorted(wanted)
            if not (record.has_tag(name, objects[name]) and (folder / name).exists())
        ]
        download_files(folder, remote, {name: name for name in changed})
        for name in changed:
            record.add(name, objects[name])


def is_prepared(folder: Path) -> bool:
    """Return whether a dataset folder has a manifest, after bringing the copies of a remote one up
    to date.

    Args:
        folder: The dataset folder.

    Returns:
        False also where its storage has none.

    Raises:
        DataError: The storage cannot be read.
    """
    if (url := find_folder_url(folder)) is not None:
        fetch_dataset(folder, url)
    return (folder / MANIFEST_NAME).exists()


def _read_fetched(folder: Path) -> str:
    path = folder / FETCHED
    return path.read_text() if path.exists() else ""


def _list_indexes(manifest: Any) -> list[str]:
    """List the index files of a manifest, which is not verified yet. A name that is none is left
    for the reader.
    """
    splits = manifest.get("splits", {}) if isinstance(manifest, dict) else {}
    entries = [split.get("index") or {} for split in splits.values() if isinstance(split, dict)]
    return [f"tokens/{entry['name']}" for entry in entries if is_plain_file_name(entry.get("name"))]
