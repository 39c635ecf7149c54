"""Publish a dataset in object storage, where nothing can be renamed.

Reads the folder on this machine in which the dataset is prepared. Writes its public files as
objects.

Invariants:
    - The manifest is deleted before an object changes and written after all others: without it
      nothing counts.
    - One command at a time writes a remote folder, and a command that lost its lock writes no
      manifest.
    - Objects have the bytes and names that a local folder would have. A second run uploads only
      what changed.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from llmsys.data_pipeline.core.staging import PUBLIC_FOLDERS
from llmsys.data_pipeline.dedup.dedup_index import INDEX
from llmsys.data_pipeline.graph.quarantine import QUARANTINE
from llmsys.dataset.manifest import MANIFEST_NAME
from llmsys.log import get_logger
from llmsys.storage.folder_lock import lock_folder
from llmsys.storage.folder_upload import UploadRecord, list_changed, upload_files
from llmsys.storage.object_lock import ObjectLock
from llmsys.storage.object_store import open_object_folder
from llmsys.storage.paths import get_cache_folder

# What readers of a dataset use, and other preparations.
_PUBLISHED = PUBLIC_FOLDERS | {INDEX}
_log = get_logger(__name__)


def get_work_folder(url: str) -> Path:
    """Return the local folder in which a remote dataset is prepared.

    Args:
        url: The URL of the dataset folder.

    Returns:
        A path in the cache folder. Another preparation of the same dataset finds its finished tasks
        there.
    """
    return get_cache_folder() / "prepare" / url.partition("://")[2]


@contextmanager
def open_work_folder(url: str) -> Iterator[Path]:
    """Lock a remote dataset folder, and publish there what the `with` block has prepared.

    Args:
        url: The URL of the dataset folder.

    Yields:
        The local folder to prepare the dataset in.

    Raises:
        DataError: Another command writes the folder, or the storage refuses something for good.
    """
    work = get_work_folder(url)
    remote = open_object_folder(url)
    # Of this machine's commands one waits for the lock of the storage.
    with lock_folder(work / ".remote"), ObjectLock(remote, work / ".remote") as lock:
        yield work
        _publish_files(work, lock)


def _publish_files(work: Path, lock: ObjectLock) -> None:
    remote = lock.objects
    objects = remote.list_objects()
    record = UploadRecord(work)
    names = _list_files(work, _PUBLISHED)
    changed = list_changed(record, names, objects)
    listed = {*names, MANIFEST_NAME}
    stale = [
        name for name in objects if name.partition("/")[0] in _PUBLISHED and name not in listed
    ]
    manifest = (work / MANIFEST_NAME).read_bytes()
    if changed or stale or remote.find_bytes(MANIFEST_NAME) != manifest:
        lock.require_held()
        remote.delete(MANIFEST_NAME)
        upload_files(work, remote, changed, record)
        for name in stale:
            remote.delete(name)
        lock.require_held()
        remote.write_bytes(MANIFEST_NAME, manifest)
    # Reports about the preparation; no reader of the dataset needs them.
    reports = [*_list_files(work, {QUARANTINE}), "events.jsonl"]
    upload_files(work, remote, list_changed(record, reports, objects), record)
    _log.info("%s: %d of %d files uploaded", remote.url, len(changed), len(names))


def _list_files(work: Path, folders: Collection[str]) -> list[str]:
    found = (path for folder in folders for path in (work / folder).rglob("*") if path.is_file())
    return sorted(str(path.relative_to(work)) for path in found if not path.name.startswith("."))
