"""Parts of packs, and files, that are still what the journal says.

Reads the packs of a dataset folder, and the table `pack` of its journal: size and time of each pack
when its last part was recorded.

Invariants:
    - A pack with the recorded size and time is not read.
    - Another one, which a killed or copied run left, is read once: a part counts if its bytes have
      their checksum. What follows the last complete part is cut off.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llmsys.dataset.token_shards import compute_file_digest
from llmsys.storage.pack_files import (
    FIRST_START,
    cut_torn_tail,
    list_intact_parts,
    parse_packed_name,
)

if TYPE_CHECKING:
    from llmsys.data_pipeline.core.task_record import TaskOutput

PACK_TABLE = """
    create table if not exists pack (
        name text primary key,
        size integer not null,
        modified_ns integer not null
    ) without rowid;
"""


class Output(Protocol):
    """An output of a record."""

    @property
    def name(self) -> str:
        """Its name, relative to the dataset folder."""

    @property
    def modified_ns(self) -> int:
        """The time of its file."""


@dataclass
class _State:
    """The parts of a pack that count: all up to `stop`, or only those in `intact`."""

    stop: int = 0
    intact: set[tuple[int, int]] | None = None
    is_sound: bool = True


class PackStates:
    """The packs of one dataset folder during a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, _State] = {}
        self._latest: dict[str, tuple[int, int]] = {}

    def load_stamps(self, journal: sqlite3.Connection) -> None:
        """Find the packs that are as they were recorded, before this run appends to them."""
        for name, *stamp in journal.execute("select name, size, modified_ns from pack"):
            with suppress(OSError):
                status = (self._folder / name).stat()
                if stamp == [status.st_size, status.st_mtime_ns]:
                    self._states[name] = _State(status.st_size)

    def add_outputs(self, outputs: Iterable[Output]) -> None:
        """Take over the outputs that a task has written."""
        for output in outputs:
            part = parse_packed_name(output.name)
            if part is None:
                continue
            name, start, length = part
            if name not in self._states:
                # An older pack that this run has not yet looked at may hold anything.
                is_new = start == FIRST_START
                self._states[name] = _State() if is_new else self._check_pack(name)
            state = self._states[name]
            state.stop = max(state.stop, start + length)
            if state.intact is not None:
                state.intact.add((start, length))
            if state.is_sound:
                self._latest[name] = (start + length, output.modified_ns)

    def save_stamps(self, journal: sqlite3.Connection) -> None:
        """Write size and time of the packs that this run has changed or read. A run that is killed
        before leaves packs that the next one reads.
        """
        journal.executemany(
            "insert or replace into pack values (?, ?, ?)",
            [(name, *stamp) for name, stamp in self._latest.items()],
        )
        self._latest.clear()

    def is_intact(self, name: str, start: int, length: int) -> bool:
        """Return whether the bytes of a part of a pack are what they were when it was recorded."""
        if name not in self._states:
            self._states[name] = self._check_pack(name)
        state = self._states[name]
        if state.intact is not None:
            return (start, length) in state.intact
        return start + length <= state.stop

    def _check_pack(self, name: str) -> _State:
        """Read a pack. A damaged one has no stamp, so that the next run reads it again."""
        path = self._folder / name
        try:
            intact, is_sound = list_intact_parts(path)
            is_sound &= cut_torn_tail(path)
            status = path.stat()
        except OSError:
            return _State()
        if is_sound:
            self._latest[name] = (status.st_size, status.st_mtime_ns)
        return _State(status.st_size, intact, is_sound)


def is_unchanged_file(path: Path, output: TaskOutput) -> bool:
    """Return whether a file has the size and the time or digest of its record.

    Args:
        path: The file.
        output: Its record.

    Returns:
        False if it is another file, or cannot be read.
    """
    try:
        status = path.stat()
        if status.st_size != output.size:
            return False
        # Copied folders have other times: compare contents before running the task again.
        return (
            status.st_mtime_ns == output.modified_ns or compute_file_digest(path) == output.digest
        )
    except OSError:
        return False
