"""A run folder in object storage: its files are written on this machine and uploaded, checkpoints
record last.

Reads/Writes: the objects of a run folder, and the local folder of their copies, which all ranks
see.

Invariants:
- A checkpoint in the storage counts when its `state.json` is there; that is written last and
  deleted first.
- The storage decides: what another machine wrote there since replaces the copies here.
- One command at a time writes a run folder, and one that lost its lock publishes nothing.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from llmsys.errors import DataError, LockedFolderError
from llmsys.log import get_logger
from llmsys.storage.folder_lock import lock_folder
from llmsys.storage.folder_upload import (
    UploadRecord,
    download_files,
    list_changed,
    read_stamp,
    upload_files,
)
from llmsys.storage.object_lock import LOCK_FOLDER, ObjectLock
from llmsys.storage.object_store import RemoteObject, open_object_folder
from llmsys.storage.paths import find_folder_url
from llmsys.storage.stored_formats import LOSSES_FOLDER
from llmsys.train.checkpoint_record import CHECKPOINT_NAME, RECORD, list_checkpoints

CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
# Seconds that a reader waits for other readers.
READ_SECONDS = 10.0
# Of the processes of one attempt alone.
_OWN_FOLDERS = frozenset({"launch", "heartbeats", LOCK_FOLDER})

log = get_logger(__name__)


class RemoteRun:
    """One run folder in object storage, and the folder of its copies."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.objects = open_object_folder(url)
        self.lock: ObjectLock | None = None

    def fetch(self, *, has_checkpoints: bool = True) -> None:
        """Bring the copies up to date before a run continues. For rank 0, which holds the lock.

        Args:
            has_checkpoints: False leaves the checkpoints where they are.
        """
        objects = self.objects.list_objects()
        record = UploadRecord(self.folder)
        own = {
            name: found
            for name, found in objects.items()
            if not name.startswith((f"{CHECKPOINTS}/", LOCK_FOLDER))
        }
        changed = {name: name for name, found in own.items() if not record.has_tag(name, found)}
        download_files(self.folder, self.objects, changed)
        for name in changed:
            record.add(name, own[name])
        if has_checkpoints:
            self._fetch_checkpoints(objects, record)

    def _fetch_checkpoints(self, objects: dict[str, RemoteObject], record: UploadRecord) -> None:
        remote = _group_checkpoints(objects)
        newest = max(remote, default=-1)
        for step, path in list_checkpoints(self.folder / CHECKPOINTS).items():
            # Newer ones were saved here by a run that was killed before it uploaded their records.
            if step not in remote and step < newest:
                _move_away(path)
        for step, files in remote.items():
            if not all(
                record.has_tag(name, found) and (self.folder / name).exists()
                for name, found in files.items()
            ):
                self._fetch_checkpoint(step, files, record)

    def _fetch_checkpoint(
        self, step: int, files: dict[str, RemoteObject], record: UploadRecord
    ) -> None:
        # Named as a save that is not finished, which the saver removes.
        target = self.folder / next(iter(files)).rpartition("/")[0]
        partial = target.with_name(f".{target.name}.partial")
        log.info("copying step %d of %s to this machine", step, self.objects.url)
        hidden = {name: f"{CHECKPOINTS}/{partial.name}/{name.rpartition('/')[2]}" for name in files}
        download_files(self.folder, self.objects, hidden)
        if target.exists():
            _move_away(target)
        partial.rename(target)
        for name, found in files.items():
            record.add(name, found)

    def withdraw_checkpoint(self, target: Path) -> str:
        """Make a checkpoint in the storage count no longer, because its files will be replaced.
        For rank 0.
        """
        self.objects.delete(f"{CHECKPOINTS}/{target.name}/{RECORD}")
        return ""

    def upload_rank_files(self, files: list[Path], target: Path) -> None:
        """Upload the tensors that this rank wrote, before they are published under the name of
        `target`.
        """
        record = UploadRecord(self.folder)
        for path in files:
            name = f"{CHECKPOINTS}/{target.name}/{path.name}"
            record.add(name, self.objects.upload(path, name), read_stamp(path))

    def upload(self) -> str:
        """Upload what changed, and delete the checkpoints and losses by document that are here no
        longer. For rank 0.
        """
        if self.lock is not None:
            self.lock.require_held()
        objects = self.objects.list_objects()
        record = UploadRecord(self.folder)
        names = sorted(_iter_files(self.folder))
        present = set(names)
        gone = [name for name in objects if _is_deleted_here(name) and name not in present]
        for name in sorted(gone, key=lambda name: not name.endswith(RECORD)):
            self.objects.delete(name)
        changed = list_changed(record, names, objects)
        for is_record in (False, True):
            part = [name for name in changed if name.endswith(f"/{RECORD}") == is_record]
            upload_files(self.folder, self.objects, part, record)
        return ""


@cache
def find_remote_run(folder: Path) -> RemoteRun | None:
    """Return the remote run of a run folder.

    Args:
        folder: The run folder.

    Returns:
        The same object in all of this process; None for a local folder.
    """
    url = find_folder_url(folder)
    return None if url is None else RemoteRun(folder, url)


def has_run(folder: Path) -> bool:
    """Return whether the storage of a remote folder has the config of a run.

    Args:
        folder: The local path of its copies.

    Returns:
        False for a local folder, too.

    Raises:
        DataError: The storage cannot be read.
    """
    run = find_remote_run(folder)
    return run is not None and run.objects.find_object(CONFIG) is not None


def fetch_run(folder: Path, *, has_checkpoints: bool = True) -> None:
    """Copy a remote run to this machine, to read it. While it is written here, its copies are newer
    than its objects.

    Args:
        folder: The run folder. A local one is left as it is.
        has_checkpoints: False leaves the checkpoints in the storage.

    Raises:
        DataError: The storage refuses something for good.
    """
    if (run := find_remote_run(folder)) is None:
        return
    with suppress(LockedFolderError), lock_folder(folder, READ_SECONDS):
        run.fetch(has_checkpoints=has_checkpoints)


@contextmanager
def lock_run(folder: Path, wait_seconds: float) -> Iterator[int]:
    """Hold the lock of a run folder; of a remote one also that of its storage, with its files
    copied to this machine.

    Args:
        folder: The run folder.
        wait_seconds: Seconds to wait for another process of this machine.

    Yields:
        The file descriptor of the local lock.

    Raises:
        DataError: Another command writes the folder, or the storage refuses something for good.
    """
    with lock_folder(folder, wait_seconds) as handle:
        if (run := find_remote_run(folder)) is None:
            yield handle
            return
        with ObjectLock(run.objects, folder) as run.lock:
            run.fetch()
            try:
                yield handle
            finally:
                try:
                    run.upload()
                except DataError as error:  # the run ended for its own reason
                    log.warning("not all files of the run were uploaded: %s", error)


def _find_step(name: str) -> int | None:
    """Return the step of the checkpoint that a file is in, None for any other file of a run."""
    parts = name.split("/")
    match = (
        CHECKPOINT_NAME.fullmatch(parts[1]) if len(parts) == 3 and parts[0] == CHECKPOINTS else None
    )
    return None if match is None else int(match[1])


def _is_deleted_here(name: str) -> bool:
    """Return whether a run deletes such a file: a checkpoint, or losses of steps that are trained
    again.
    """
    return _find_step(name) is not None or name.startswith(f"{LOSSES_FOLDER}/")


def _group_checkpoints(objects: dict[str, RemoteObject]) -> dict[int, dict[str, RemoteObject]]:
    """Return the objects of each checkpoint that has a record, by step."""
    found: dict[int, dict[str, RemoteObject]] = {}
    for name, about in objects.items():
        if (step := _find_step(name)) is not None:
            found.setdefault(step, {})[name] = about
    return {
        step: files
        for step, files in found.items()
        if any(name.endswith(f"/{RECORD}") for name in files)
    }


def _move_away(checkpoint: Path) -> None:
    # The saver removes what has this name.
    checkpoint.rename(checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.removed"))


def _iter_files(folder: Path) -> Iterator[str]:
    """Yield the files of a run, relative to its folder, without those of an attempt and hidden
    ones.
    """
    for place, folders, names in os.walk(folder):
        folders[:] = [
            name for name in folders if not name.startswith(".") and name not in _OWN_FOLDERS
        ]
        yield from (
            str((Path(place) / name).relative_to(folder))
            for name in names
            if not name.startswith(".")
        )
