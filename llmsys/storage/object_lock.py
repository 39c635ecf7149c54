"""The lock of a remote folder: one writer at a time, without flock.

Reads/Writes: `.lock/` of the folder, whose objects are numbered. The newest names its holder, who
writes it again every RENEWAL_SECONDS. A holder is displaced by whoever creates the next number,
which one writer alone can do.

Invariants:
- The newest object decides, so a displaced holder finds out before it publishes (`require_held`).
- A lock is displaced if its object does not change for LEASE_SECONDS, or if its holder wrote from
  the same local folder, whose own lock is held here.
- Numbers grow for ever: an object that was released stays until the next holder removes it.
"""

import json
import os
import platform
import threading
import time
import uuid
from pathlib import Path
from typing import Self

from llmsys.errors import DataError
from llmsys.log import get_logger
from llmsys.storage.atomic_write import write_bytes_atomically
from llmsys.storage.object_store import ObjectFolder

LOCK_FOLDER = ".lock"
LEASE_SECONDS = 90.0
RENEWAL_SECONDS = 20.0
POLL_SECONDS = 2.0

log = get_logger(__name__)


class ObjectLock:
    """A context manager that holds the lock of a remote folder. The local folder's lock is held
    around it.
    """

    def __init__(self, objects: ObjectFolder, folder: Path) -> None:
        """Prepare the lock; it is taken when the block is entered.

        Args:
            objects: The remote folder.
            folder: The local folder that is written to it. Its own lock must be held.
        """
        self.objects = objects
        self._name = ""
        self._state = {
            "folder": _read_folder_id(folder),
            "process": os.getpid(),
            "host": platform.node(),
            "token": uuid.uuid4().hex,
            "released": False,
            "renewals": 0,
        }
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_renewals, name="lock", daemon=True)

    def __enter__(self) -> Self:
        """Wait for the lock and take it; DataError while another command holds it."""
        began = time.monotonic()
        seen = b""
        newest = ""
        while True:
            found = self._list_numbers()
            current = self.objects.find_bytes(found[-1]) if found else None
            if current is None or self._may_displace(current):
                break
            if (found[-1], current) != (newest, seen):
                if seen and newest == found[-1]:
                    raise self._build_busy_error(current)
                began = time.monotonic()
                seen = current
                newest = found[-1]
                log.info("%s is locked by %s; waiting", self.objects.url, _describe_holder(current))
            if time.monotonic() - began >= LEASE_SECONDS:
                log.warning(
                    "%s: the lock of %s expired", self.objects.url, _describe_holder(current)
                )
                break
            time.sleep(POLL_SECONDS)
        self._name = f"{LOCK_FOLDER}/{_get_number(found[-1]) + 1 if found else 1:08d}"
        if not self.objects.create(self._name, self._encode()):
            raise self._build_busy_error(self.objects.find_bytes(self._name) or b"")
        for name in found:
            self.objects.delete(name)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock, unless it was lost."""
        self._closed.set()
        # A renewal that waits for its storage must not keep the process.
        self._thread.join(RENEWAL_SECONDS)
        try:
            self.require_held()
            self._state["released"] = True
            self.objects.write_bytes(self._name, self._encode())
        except DataError as error:  # the command has ended, and the lock will expire
            log.warning("%s", error)

    def require_held(self) -> None:
        """Raise DataError unless the lock is still held. Before anything is published."""
        found = self._list_numbers()
        current = self.objects.find_bytes(self._name) if found and found[-1] == self._name else b""
        if _parse_state(current or b"").get("token") != self._state["token"]:
            raise DataError(
                f"{self.objects.url} was taken over by another command, because this one did not "
                f"answer for {LEASE_SECONDS:.0f} s. Nothing more was written. End one of them, "
                "then run the same command again."
            )

    def _write_renewals(self) -> None:
        while not self._closed.wait(RENEWAL_SECONDS):
            try:
                self.require_held()
                self._state["renewals"] = int(str(self._state["renewals"])) + 1
                self.objects.write_bytes(self._name, self._encode())
            except DataError as error:
                log.warning("%s", error)

    def _may_displace(self, current: bytes) -> bool:
        state = _parse_state(current)
        return bool(state.get("released")) or state.get("folder") == self._state["folder"]

    def _build_busy_error(self, current: bytes) -> DataError:
        return DataError(
            f"{self.objects.url} is being written by {_describe_holder(current)}, and two "
            "commands cannot write one folder. Wait until it finishes, or end it, then run the "
            "same command again."
        )

    def _list_numbers(self) -> list[str]:
        return [
            name
            for name in self.objects.list_objects(LOCK_FOLDER)
            if name.rpartition("/")[2].isdigit()
        ]

    def _encode(self) -> bytes:
        return json.dumps(self._state).encode()


def _get_number(name: str) -> int:
    return int(name.rpartition("/")[2])


def _read_folder_id(folder: Path) -> str:
    """Return what no other folder of any machine has."""
    path = folder / ".folder-id"
    if not path.exists():
        write_bytes_atomically(path, uuid.uuid4().hex.encode())
    return path.read_text()


def _parse_state(data: bytes) -> dict[str, object]:
    try:
        state = json.loads(data)
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def _describe_holder(data: bytes) -> str:
    state = _parse_state(data)
    return f"process {state.get('process', 'unknown')} on host {state.get('host', 'unknown')}"
