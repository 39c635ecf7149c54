"""Parts of packs that are still what the journal says.

Reads the packs of a dataset folder, and the table `pack` of its journal: size and time of each pack
when its last part was recorded.

Invariants:
    - A pack with the recorded size and time is not read.
    - Another one, which a killed or copied run left, is read once: a part counts if its bytes have
      their checksum. What follows the last complete part is cut off.
"""

import os
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmsys.storage.pack_files import (
    PackedFile,
    cut_torn_tail,
    find_packed_file,
    list_intact_parts,
)

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

    stop: int
    intact: set[tuple[int, int]] | None = None


class PackStates:
    """The packs of one dataset folder during a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, _State] = {}

    def add_outputs(self, journal: sqlite3.Connection, outputs: Iterable[Output]) -> None:
        """Record size and time of the packs in which a task has written its outputs."""
        for output in outputs:
            part = find_packed_file(Path(output.name))
            if part is None:
                continue
            name = os.fspath(part.pack)
            journal.execute(
                "insert or replace into pack values (?, ?, ?)",
                (name, part.stop, output.modified_ns),
            )
            state = self._states.setdefault(name, _State(0))
            state.stop = max(state.stop, part.stop)
            if state.intact is not None:
                state.intact.add((part.start, part.length))

    def is_intact(self, journal: sqlite3.Connection, part: PackedFile) -> bool:
        """Return whether the bytes of a part are what they were when it was recorded."""
        name = os.fspath(part.pack)
        if name not in self._states:
            self._states[name] = self._check_pack(journal, name)
        state = self._states[name]
        if state.intact is not None:
            return (part.start, part.length) in state.intact
        return part.stop <= state.stop

    def _check_pack(self, journal: sqlite3.Connection, name: str) -> _State:
        path = self._folder / name
        known = journal.execute(
            "select size, modified_ns from pack where name = ?", (name,)
        ).fetchone()
        try:
            status = path.stat()
            if known == (status.st_size, status.st_mtime_ns):
                return _State(status.st_size)
            intact, is_sound = list_intact_parts(path)
            is_sound &= cut_torn_tail(path)
            status = path.stat()
        except OSError:
            return _State(0)
        if is_sound:  # a damaged one is read again by the next run
            journal.execute(
                "insert or replace into pack values (?, ?, ?)",
                (name, status.st_size, status.st_mtime_ns),
            )
        return _State(status.st_size, intact)
