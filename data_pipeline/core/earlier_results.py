"""Results of earlier configs, so that a return to one of them finds its tasks done.

Reads and writes the tables `earlier` and `setting` of the journal, and earlier/ of a dataset
folder: hard links to the files that a later config replaced, named by their digest.

Invariants:
    - What is kept decides nothing: a task counts as done only if its key is the same and its
      outputs have the recorded size, and time or digest.
    - A file is linked before it is replaced, and recorded after it is linked. A killed run leaves
      at most a link that a later one removes.
    - Where a file system has no hard links, files are not kept; parts of packs are.
"""

import json
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from llmsys.data_pipeline.core.journal import Journal, split_task_name
from llmsys.data_pipeline.core.pack_state import is_unchanged_file
from llmsys.data_pipeline.core.staging import begin_change, find_output, get_write_path
from llmsys.data_pipeline.core.task_record import StoredOutputs, TaskOutput, TaskRecord
from llmsys.storage.pack_files import has_part, parse_packed_name

EARLIER = "earlier"
_SETTINGS = 30  # of a stage: they hold the rules of every language


class EarlierResults:
    """Results of earlier configs of one dataset folder."""

    def __init__(self, journal: Journal, max_bytes: int) -> None:
        """Use the tables of a journal.

        Args:
            journal: The journal of the folder.
            max_bytes: What may be kept, see `remove_oldest`; 0 keeps nothing.
        """
        self._journal = journal
        self._folder = journal.folder
        self._max_bytes = max_bytes
        self.is_changed = False
        self._stages = dict[str, bool]()  # those with results, of this config or of an earlier one
        self._turn: int | None = None

    def keep_result(self, name: str) -> None:
        """Keep the result of a task that will run again, if its outputs are unchanged.

        Args:
            name: STAGE/ITEM.
        """
        if not self._max_bytes or not self.has_results(name):
            return
        record = self.find_present(name)
        if record is None or not record.key:
            return
        for output in record.outputs:
            if parse_packed_name(output.name) is None and not self._link_output(output):
                return
        self.is_changed = True
        row = (*split_task_name(name), record.key)
        with self._journal.open_file() as journal:
            journal.execute(
                "insert or replace into earlier values (?, ?, ?, ?, ?, ?)",
                (
                    *row,
                    self._format_outputs(record.outputs),
                    record.packed,
                    self._get_turn(journal),
                ),
            )

    def find_present(self, name: str) -> TaskRecord | None:
        """Return the result that the journal has of a task, with whatever key.

        Args:
            name: STAGE/ITEM.

        Returns:
            Its record; None if there is none, or its outputs changed.
        """
        record = self._journal.find_latest(name)
        is_whole = record is not None and all(map(self._is_present, record.outputs))
        return record if is_whole else None

    def keep_stage(self, stage: str, count: int = 0) -> None:
        """Keep the results of a stage that are none of its present tasks, before they are removed.

        Args:
            stage: Name of the stage.
            count: Number of its present tasks; 0 if the stage is not run.
        """
        with self._journal.open_file() as journal:
            rows = journal.execute(
                "select item from record where stage = ? and (position is null or position >= ?)",
                (stage, count),
            ).fetchall()
        with self._journal.hold_changes():
            for (item,) in rows:
                self.keep_result(f"{stage}/{os.fsdecode(item)}")

    def keep_other_stages(self, stages: Collection[str]) -> None:
        """Keep the results of stages that this config does not have.

        Args:
            stages: Those that it has.
        """
        with self._journal.open_file() as journal:
            known = [row[0] for row in journal.execute("select distinct stage from record")]
        for stage in known:
            if stage not in stages:
                self.keep_stage(stage)

    def restore_result(self, name: str, key: str, position: int) -> bool:
        """Make the result of an earlier config the present one again, and keep the present one.

        Args:
            name: STAGE/ITEM.
            key: Key of the task.
            position: Its place in its stage.

        Returns:
            False if no unchanged result with this key is kept.
        """
        if not self.has_results(name):
            return False
        found = next((one for one in self.iter_results(name) if one.key == key), None)
        if found is None:
            return False
        self.keep_result(name)
        begin_change(self._folder)
        outputs = [self._restore_output(output) for output in found.outputs]
        record = TaskRecord(key, outputs, found.packed)
        with self._journal.hold_changes(), self._journal.open_file() as journal:
            journal.execute(
                "update earlier set turn = ? where stage = ? and item = ? and key = ?",
                (self._get_turn(journal), *split_task_name(name), key),
            )
            self._journal.insert_record(name, record, is_provisional=False, position=position)
        self.is_changed = True
        return True

    def iter_results(self, name: str) -> Iterator[TaskRecord]:
        """Yield the results of a task under earlier configs whose outputs are unchanged.

        Args:
            name: STAGE/ITEM.

        Yields:
            Records, the latest first.
        """
        if not self.has_results(name):
            return
        with self._journal.open_file() as journal:
            rows = journal.execute(
                "select key, outputs, result from earlier where stage = ? and item = ? "
                "order by turn desc",
                split_task_name(name),
            ).fetchall()
        for key, outputs, result in rows:
            record = TaskRecord(key, StoredOutputs(outputs), result)
            if all(map(self._is_kept, record.outputs)):
                yield record

    def save_setting(self, stage: str, text: str) -> list[str]:
        """Remember the settings of a stage, by which results of earlier configs are recognized.

        Args:
            stage: Name of the stage.
            text: Its settings, as they are a part of keys.

        Returns:
            Those of earlier configs, the latest first.
        """
        with self._journal.open_file() as journal:
            query = "select text from setting where stage = ? order by number desc"
            known = [str(row[0]) for row in journal.execute(query, (stage,))]
            if known[:1] != [text]:
                journal.execute("delete from setting where stage = ? and text = ?", (stage, text))
                journal.execute("insert into setting (stage, text) values (?, ?)", (stage, text))
                journal.executemany(
                    "delete from setting where stage = ? and text = ?",
                    [(stage, one) for one in known[_SETTINGS:]],
                )
        return [one for one in known if one != text]

    def remove_oldest(self) -> None:
        """Remove the results that were not used for longest, until the others fit.

        Only what no present task has counts: a file with another link, or a part of a pack that is
        in the journal, takes no space of its own. Space in a pack comes back with its last part.
        """
        if not self.is_changed and self._max_bytes:
            return
        with self._journal.hold_changes(), self._journal.open_file() as journal:
            left = self._max_bytes
            kept = set[str]()
            gone = list[tuple[int]]()
            # One at a time: a crawl has millions of them.
            for number, text, is_present in journal.execute(
                "select earlier.rowid, earlier.outputs, record.key is not null from earlier "
                "left join record on record.stage = earlier.stage and "
                "record.item = earlier.item and record.key = earlier.key "
                "order by earlier.turn desc, earlier.rowid"
            ):
                outputs = list(StoredOutputs(text))
                left -= sum(self._count_bytes(output, bool(is_present)) for output in outputs)
                if left < 0 or not self._max_bytes:
                    gone.append((number,))
                else:
                    files = (one for one in outputs if parse_packed_name(one.name) is None)
                    kept.update(output.digest for output in files)
            journal.executemany("delete from earlier where rowid = ?", gone)
        folder = self._folder / EARLIER
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in kept:
                path.unlink(missing_ok=True)
        if not kept:
            with suppress(OSError):
                folder.rmdir()

    def iter_packs(self) -> Iterator[str]:
        """Yield the names of the packs that hold an output that is kept, perhaps several times."""
        with self._journal.open_file() as journal:
            for (text,) in journal.execute("select outputs from earlier"):
                for name, *_ in json.loads(text):
                    if (part := parse_packed_name(name)) is not None:
                        yield part[0]

    def has_results(self, name: str) -> bool:
        """Return whether the stage of a task has results of an earlier run: a new dataset is asked
        for each of its stages once.

        Args:
            name: STAGE/ITEM.

        Returns:
            False if there is nothing to keep or to restore.
        """
        stage, _ = name.split("/", 1)
        if stage not in self._stages:
            with self._journal.open_file() as journal:
                query = "select 1 from earlier where stage = ? limit 1"
                found = journal.execute(query, (stage,)).fetchone() is not None
            self._stages[stage] = found or self._journal.has_any_record(stage)
        return self._stages[stage]

    def _get_turn(self, journal: sqlite3.Connection) -> int:
        if self._turn is None:
            query = "select coalesce(max(turn), 0) + 1 from earlier"
            self._turn = int(journal.execute(query).fetchone()[0])
        return self._turn

    def _format_outputs(self, outputs: Iterable[TaskOutput]) -> str:
        return json.dumps([(one.name, one.size, one.modified_ns, one.digest) for one in outputs])

    def _get_link(self, output: TaskOutput) -> Path:
        return self._folder / EARLIER / output.digest

    def _link_output(self, output: TaskOutput) -> bool:
        link = self._get_link(output)
        # An equal file of another time is as good: the record gets its time.
        if link.exists():
            return True
        path = self._find_file(output)
        try:
            link.parent.mkdir(exist_ok=True)
            if path is not None:
                os.link(path, link)
        except OSError:
            return False
        return path is not None

    def _find_file(self, output: TaskOutput) -> Path | None:
        """Return the file of an output. Of one name there may be two, the published one and that of
        the next version; neither is touched.
        """
        files = (find_output(self._folder, output.name), self._folder / output.name)
        return next((path for path in files if is_unchanged_file(path, output)), None)

    def _is_present(self, output: TaskOutput) -> bool:
        if parse_packed_name(output.name) is not None:
            return self._is_in_place(output) and self._journal.is_unchanged(output)
        return self._find_file(output) is not None

    def _is_kept(self, output: TaskOutput) -> bool:
        if parse_packed_name(output.name) is not None:
            return self._is_in_place(output) and self._journal.is_unchanged(output)
        link = self._get_link(output)
        if is_unchanged_file(link, output):
            return True
        link.unlink(missing_ok=True)  # a damaged one would stay for ever
        return False

    def _is_in_place(self, output: TaskOutput) -> bool:
        """Return whether a part of a pack is the one of its record: where somebody deleted the
        pack, another one may have begun at its path. True for a file of its own.
        """
        part = parse_packed_name(output.name)
        if part is None:
            return True
        name, start, length = part
        return has_part(self._folder / name, start, length, output.digest)

    def _restore_output(self, output: TaskOutput) -> TaskOutput:
        """Give a file its place again, and return its description."""
        if parse_packed_name(output.name) is not None:
            return output
        link = self._get_link(output)
        path = get_write_path(self._folder, output.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        aside.unlink(missing_ok=True)
        os.link(link, aside)
        os.replace(aside, path)
        aside.unlink(missing_ok=True)  # a rename onto the same file leaves both names
        status = path.stat()
        return TaskOutput(output.name, output.size, status.st_mtime_ns, output.digest)

    def _count_bytes(self, output: TaskOutput, is_present: bool) -> int:
        """Return the bytes that an output takes which the journal may have too."""
        if parse_packed_name(output.name) is not None:
            return 0 if is_present else output.size
        with suppress(OSError):
            return output.size if self._get_link(output).stat().st_nlink == 1 else 0
        return 0
