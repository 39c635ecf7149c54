"""Journal of finished tasks, which makes a preparation resumable.

Reads and writes journal/records.sqlite of a dataset folder. A record holds the key of its task,
which is a digest of configuration, inputs and code version, and the size, time and digest of each
output.

Invariants:
    - A task runs again when its key changed or an output is missing or different.
    - A killed process loses no record that was saved; a record is saved after its outputs are
      published.
    - Memory does not grow with the number of records.
    - Records hold file times. Only their bytes and those of events.jsonl differ between equal runs.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from llmsys.data_pipeline.core.journal_file import connect_journal
from llmsys.data_pipeline.core.pack_state import PackStates, is_unchanged_file
from llmsys.data_pipeline.core.staging import JOURNAL, discard_stale, find_output
from llmsys.data_pipeline.core.task_record import StoredOutputs, TaskOutput, TaskRecord
from llmsys.dataset.token_shards import compute_file_digest
from llmsys.errors import DataError
from llmsys.storage.pack_files import parse_packed_name

RECORDS = "records.sqlite"
_PLACE = "<encoded>"  # of an encoded value in JSON


class Journal:
    """Task records of one dataset folder. One process has it open."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Joined once: each record is looked up.
        self._path = folder / JOURNAL / RECORDS
        self._connection: sqlite3.Connection | None = None
        self._stays_open = True
        self._packs = PackStates(folder)
        self._is_batch = False
        self._open = _OpenJournal(self, self._path)

    def has_record(self, name: str, key: str, position: int) -> bool:
        """Return whether a task is done: its key matches and its outputs are unchanged. Note its
        position if it is.
        """
        row = self._find_row(name, "key, outputs, is_provisional, position")
        if row is None or not self._is_current(name, key, *row[:3]):
            return False
        if row[3] != position:
            with self.open_file() as journal:
                self._take_position(journal, name, position)
        return True

    def find_record(self, name: str, key: str) -> TaskRecord | None:
        """Return the record of a task if its key matches and its outputs are unchanged, else
        None.
        """
        row = self._find_row(name, "key, outputs, is_provisional, result")
        return (
            _build_record(row[0], row[1], row[3])
            if row is not None and self._is_current(name, key, *row[:3])
            else None
        )

    def save_input_digest(self, path: str, stamp: Sequence[Any]) -> None:
        """Remember size, time, inode and digest of an input file."""
        size, modified_ns, inode, digest = stamp
        # An inode may have more bits than a number of SQLite.
        row = (os.fsencode(path), size, modified_ns, str(inode), digest)
        with self.open_file() as journal:
            journal.execute("insert or replace into input values (?, ?, ?, ?, ?)", row)

    def save_record(
        self,
        name: str,
        key: str,
        outputs: Sequence[TaskOutput],
        result: dict[str, Any],
        position: int | None = None,
    ) -> TaskRecord:
        """Record a finished task.

        Args:
            name: STAGE/ITEM.
            key: Digest of all that the outputs depend on; "" for a task that was quarantined.
            outputs: The published files.
            result: Values that JSON can hold. With `is_provisional`, no later run finds the record.
            position: Index in the stage; None if the stage has not begun.

        Returns:
            The record.
        """
        record = TaskRecord.from_result(key, outputs, result)
        self.insert_record(name, record, bool(result.get("is_provisional")), position)
        return record

    def insert_record(
        self, name: str, record: TaskRecord, is_provisional: bool, position: int | None
    ) -> None:
        """Record a finished task. A provisional record is found by no later run."""
        # In one transaction: a record without a position would be removed as stale.
        with self.hold_changes(), self.open_file() as journal:
            if position is not None:
                _clear_position(journal, name, position)
            _insert_record(journal, name, record, is_provisional, position)
            self._packs.add_outputs(record.outputs)

    @contextmanager
    def hold_changes(self) -> Iterator[None]:
        """Make the changes of the `with` block in one transaction, which an error does not undo:
        what was recorded is true.
        """
        # A closed journal is opened for each change alone.
        if self._is_batch or not self._stays_open:
            yield
            return
        with self.open_file() as journal:
            journal.execute("begin")
        self._is_batch = True
        try:
            yield
        finally:
            self._is_batch = False
            with self.open_file() as journal:
                if journal.in_transaction:  # not after an error of the disk
                    journal.execute("commit")

    def find_input_identity(self, path: str, stamp: Sequence[int]) -> str | None:
        """Return the identity that an input with this size, time and inode was given; None if it
        changed or is new.
        """
        with self.open_file() as journal:
            query = "select size, modified_ns, inode, digest from input where path = ?"
            known = journal.execute(query, (os.fsencode(path),)).fetchone()
        is_same = known is not None and known[:3] == (*stamp[:2], str(stamp[2]))
        return str(known[3]) if is_same else None

    def find_latest(self, name: str) -> TaskRecord | None:
        """Return the record of a task with whatever key; its outputs are not looked at."""
        row = self._find_row(name, "key, outputs, result, is_provisional")
        return None if row is None or row[3] else _build_record(*row[:3])

    def find_result(self, name: str) -> dict[str, Any] | None:
        """Return the result of a task as an earlier run left it, with whatever key."""
        row = self._find_row(name, "key, outputs, result")
        return _build_record(*row).result if row is not None else None

    def get_input_digest(self, path: Path) -> str:
        """Return the digest of an input file. Unchanged files are not hashed again.

        Args:
            path: A local file. It is recognized by this spelling of its path, with size, time and
                inode.

        Returns:
            The digest of its content; "" if it is unreadable.
        """
        with self.open_file() as journal:
            query = "select size, modified_ns, inode, digest from input where path = ?"
            known = journal.execute(query, (os.fsencode(path),)).fetchone()
        try:
            status = path.stat()
            # The inode reveals a file that was replaced within the resolution of its time.
            stamp = (status.st_size, status.st_mtime_ns, str(status.st_ino))
            if known and known[:3] == stamp:
                return str(known[3])
            digest = compute_file_digest(path)
        except OSError:
            return ""
        self.save_input_digest(str(path), [*stamp, digest])
        return digest

    def remove_stale_records(self, stage: str, count: int) -> None:
        """Remove the records of a stage that are none of its `count` tasks."""
        with self.open_file() as journal:
            journal.execute(
                "delete from record where stage = ? and (position is null or position >= ?)",
                (stage, count),
            )
            self._packs.save_stamps(journal)

    def read_records(self, stage: str, first: int, count: int) -> list[TaskRecord]:
        """Read records of consecutive tasks of a stage, in order of position."""
        with self.open_file() as journal:
            rows = journal.execute(
                "select key, outputs, result from record where stage = ? and position >= ? and "
                "position < ? order by position",
                (stage, first, first + count),
            ).fetchall()
        return [_build_record(*row) for row in rows]

    def list_unfinished(self, stage: str) -> list[str]:
        """List the names of the tasks of a stage whose record has no key, because they were
        quarantined.
        """
        with self.open_file() as journal:
            rows = journal.execute(
                "select item from record where stage = ? and key = ''", (stage,)
            ).fetchall()
        return [f"{stage}/{os.fsdecode(item)}" for (item,) in rows]

    def has_any_record(self, stage: str, item: str | None = None) -> bool:
        """Return whether there is a record of a stage, or of one of its items, with any key."""
        condition = "stage = ?" if item is None else "stage = ? and item = ?"
        values = (stage,) if item is None else (stage, os.fsencode(item))
        with self.open_file() as journal:
            query = f"select 1 from record where {condition} limit 1"
            return journal.execute(query, values).fetchone() is not None

    def iter_output_names(self, stage: str) -> Iterator[str]:
        """Yield the names of the outputs of all records of a stage."""
        with self.open_file() as journal:
            for (outputs,) in journal.execute(
                "select outputs from record where stage = ?", (stage,)
            ):
                for name, *_ in json.loads(outputs):
                    yield name

    def close(self) -> None:
        """Close the file. A later call opens it for its own time, so that another run may use
        it.
        """
        if self._connection is not None:
            with self.open_file() as journal:
                self._packs.save_stamps(journal)
        self._stays_open = False
        self._close_connection()

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def open_file(self) -> "_OpenJournal":
        """Give the connection to a `with` block."""
        return self._open

    def connect(self) -> sqlite3.Connection:
        """Return the connection, which is opened if it is closed."""
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = connect_journal(self._path)
            self._packs.load_stamps(self._connection)
        return self._connection

    def leave(self) -> None:
        """Close the connection of a journal that is opened for each change alone."""
        if not self._stays_open:
            self._close_connection()

    def _take_position(self, journal: sqlite3.Connection, name: str, position: int) -> None:
        """Give a position of a stage to one of its records, and to no other."""
        _clear_position(journal, name, position)
        stage, item = split_task_name(name)
        journal.execute(
            "update record set position = ? where stage = ? and item = ?", (position, stage, item)
        )

    def _find_row(self, name: str, columns: str) -> Any:
        with self.open_file() as journal:
            return journal.execute(
                f"select {columns} from record where stage = ? and item = ?", split_task_name(name)
            ).fetchone()

    def _is_current(
        self, name: str, key: str, found: str, outputs: str, is_provisional: int
    ) -> bool:
        if found != key or is_provisional:
            return False
        if all(map(self.is_unchanged, _parse_outputs(outputs))):
            return True
        # Other bytes may come to the place in a pack that the record names.
        with self.open_file() as journal:
            journal.execute(
                "delete from record where stage = ? and item = ?", split_task_name(name)
            )
        return False

    def is_unchanged(self, output: TaskOutput) -> bool:
        """Return whether an output is as its record says."""
        if (part := parse_packed_name(output.name)) is not None:
            return self._packs.is_intact(*part)
        staged = find_output(self.folder, output.name)
        path = self.folder / output.name
        # After an interrupted rerun the staged or the published file may match the record.
        if staged != path:
            if is_unchanged_file(staged, output):
                return True
            discard_stale(self.folder, output.name)  # its task was killed before it wrote a record
        return is_unchanged_file(path, output)


class _OpenJournal:
    """The connection of a journal for a `with` block; names the file in every error.

    A class, because a generator would take as long as many of the statements, of which a task has
    ten.
    """

    def __init__(self, journal: Journal, path: Path) -> None:
        self._journal = journal
        self._path = path

    def __enter__(self) -> sqlite3.Connection:
        """Return the connection."""
        try:
            return self._journal.connect()
        except BaseException as error:
            self._end(error)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connection if the journal does not stay open."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._journal.leave()
        if not isinstance(error, sqlite3.DatabaseError):
            return
        # Operational errors are those of the disk or the system; others mean a damaged file.
        full = isinstance(error, sqlite3.OperationalError)
        remedy = (
            "Free space or repair the folder, then run the same command again to continue"
            if full
            else (
                "It is damaged: delete it and run the same command again, which makes every "
                "task again"
            )
        )
        raise DataError(f"{self._path} could not be read or written: {error}. {remedy}.") from error


def require_journal_version(folder: Path) -> None:
    """Check the format version of a dataset's journal, if it has one. Nothing is written.

    Args:
        folder: The dataset folder.

    Raises:
        FormatError: It has another version.
    """
    if (folder / JOURNAL).is_dir():
        journal = Journal(folder)
        journal.close()
        journal.list_unfinished("")


def split_task_name(name: str) -> tuple[str, bytes]:
    """Return the stage and the item of a task. Names of input files may hold bytes that are not
    UTF-8.

    Args:
        name: STAGE/ITEM.

    Returns:
        The stage, and the item as the journal has it.
    """
    stage, item = name.split("/", 1)
    return stage, os.fsencode(item)


def _clear_position(journal: sqlite3.Connection, name: str, position: int) -> None:
    """Take a position of the stage of a task from the record that has it, if one does."""
    stage, _ = name.split("/", 1)
    journal.execute(
        "update record set position = null where stage = ? and position = ?", (stage, position)
    )


def _insert_record(
    journal: sqlite3.Connection,
    name: str,
    record: TaskRecord,
    is_provisional: bool,
    position: int | None,
) -> None:
    # The storage of a provisional one failed midway: the next run reads the input again.
    journal.execute(
        "insert or replace into record "
        "(stage, item, position, key, outputs, result, is_provisional) values "
        "(?, ?, ?, ?, ?, ?, ?)",
        (
            *split_task_name(name),
            position,
            record.key,
            json.dumps(
                [
                    (output.name, output.size, output.modified_ns, output.digest)
                    for output in record.outputs
                ]
            ),
            record.packed,
            is_provisional,
        ),
    )


def _parse_outputs(text: str) -> list[TaskOutput]:
    return [TaskOutput(*fields) for fields in json.loads(text)]


def _build_record(key: str, outputs: str, result: bytes) -> TaskRecord:
    return TaskRecord(key, StoredOutputs(outputs), result)


@dataclass(frozen=True, slots=True)
class EncodedJson:
    """A value of many keys, such as the settings of a stage, encoded once."""

    text: str

    @classmethod
    def from_value(cls, value: Any) -> "EncodedJson":
        """Encode a value that JSON can hold."""
        return cls(_encode_json(value))


def _encode_json(value: Any) -> str:
    encoded = list[str]()

    def replace_value(item: Any) -> str:
        if not isinstance(item, EncodedJson):
            raise TypeError(f"{item!r} cannot be a part of a task's key: JSON has no such value")
        encoded.append(item.text)
        return _PLACE

    text = json.dumps(
        value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=replace_value
    )
    if not encoded:
        return text
    parts = text.split(f'"{_PLACE}"')
    if len(parts) != len(encoded) + 1:
        raise ValueError(f"a task's key holds the reserved text {_PLACE}: rename its input")
    return parts[0] + "".join(map("".join, zip(encoded, parts[1:], strict=True)))


def compute_json_digest(*values: Any) -> str:
    """Hash values that JSON can hold.

    Args:
        *values: Plain values. The order of mapping keys does not matter.

    Returns:
        32 hex digits (blake2b, 128 bits).
    """
    text = _encode_json(values)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def compute_sequence_digest(values: Iterable[Any]) -> str:
    """Hash any number of values that JSON can hold, one at a time, for the key of a task that reads
    many files.

    Args:
        values: Plain values; their order counts.

    Returns:
        32 hex digits (blake2b, 128 bits).
    """
    digest = SequenceDigest()
    for value in values:
        digest.add(value)
    return digest.compute()


class SequenceDigest:
    """The digest of `compute_sequence_digest`, for values that come one by one."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=16)
        # Made once: json.dumps would make an encoder for each of millions of values.
        self._encode = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode

    def add(self, value: Any) -> None:
        """Add a value that JSON can hold."""
        self._state.update(self._encode(value).encode() + b"\n")

    def compute(self) -> str:
        """Return the digest of the values so far."""
        return self._state.hexdigest()
