"""The SQLite file of a journal: its tables, its version, and how it is opened.

Reads and writes journal/records.sqlite of a dataset folder.
"""

import sqlite3
from pathlib import Path

from llmsys.data_pipeline.core.pack_state import PACK_TABLE
from llmsys.data_pipeline.core.staging import LISTS
from llmsys.storage.stored_formats import JOURNAL as JOURNAL_FORMAT
from llmsys.storage.stored_formats import build_format_error

_TABLES = """
    create table if not exists record (
        number integer primary key,
        stage text not null,
        item blob not null,
        position integer,
        key text not null,
        outputs text not null,
        result blob not null,
        is_provisional integer not null,
        unique (stage, item)
    );
    create index if not exists place on record (stage, position);
    create table if not exists input (
        path blob primary key,
        size integer,
        modified_ns integer,
        inode text,
        digest text
    ) without rowid;
    create table if not exists earlier (
        stage text not null,
        item blob not null,
        key text not null,
        outputs text not null,
        result blob not null,
        turn integer not null,
        primary key (stage, item, key)
    );
    create table if not exists setting (
        number integer primary key,
        stage text not null,
        text text not null
    );
"""


def connect_journal(path: Path) -> sqlite3.Connection:
    """Open the SQLite file of a journal, which is created if it is missing.

    Args:
        path: The file.

    Returns:
        The connection, which commits each statement outside a transaction.

    Raises:
        FormatError: The file has another version.
    """
    connection = sqlite3.connect(path, isolation_level=None)
    # One process has the journal, and its own lock needs no shared memory: network file
    # systems have none.
    connection.execute("pragma locking_mode = exclusive")
    is_new = not _require_journal_version(connection, path)
    connection.execute("pragma journal_mode = wal")
    # A power failure may lose the last records, whose tasks then run again. A killed process loses
    # none.
    connection.execute("pragma synchronous = normal")
    connection.executescript(_TABLES + PACK_TABLE)
    if is_new:
        connection.execute(f"pragma user_version = {JOURNAL_FORMAT.version}")
    return connection


def _require_journal_version(connection: sqlite3.Connection, path: Path) -> bool:
    """Return False for a new journal, which has no tables. Raise FormatError for one of another
    version.
    """
    version = connection.execute("pragma user_version").fetchone()[0]
    if version == JOURNAL_FORMAT.version:
        return True
    has_tables = connection.execute("select count(*) from sqlite_master").fetchone()[0] > 0
    # The first journals were folders with a JSON file per task.
    has_json_records = any(
        folder.is_dir() and folder.name != LISTS for folder in path.parent.iterdir()
    )
    if has_tables or has_json_records:
        connection.close()
        raise build_format_error(JOURNAL_FORMAT, version or None, path)
    return False
