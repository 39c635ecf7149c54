"""Laws of the journal: a record counts only while its key and its files are what they were."""

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from llmsys.data_pipeline.core.journal import Journal, compute_json_digest, require_journal_version
from llmsys.data_pipeline.core.task_record import TaskRecord, describe_output
from llmsys.data_pipeline.graph.tasks import RecordList
from llmsys.errors import DataError, FormatError
from llmsys.storage.stored_formats import JOURNAL


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    (tmp_path / "rooms").mkdir()
    (tmp_path / "rooms" / "a.arrow").write_bytes(b"whole")
    return Journal(tmp_path)


def save(journal: Journal, name: str, result: dict[str, Any]) -> TaskRecord:
    """Save a record with one output."""
    return journal.save_record(
        name, "key", [describe_output(journal.folder, "rooms/a.arrow")], result
    )


def test_a_saved_record_is_found_by_its_key_alone(journal: Journal) -> None:
    saved = save(journal, "stage/a", {"rows": 3})
    journal.close()  # one process has it open
    journal = Journal(journal.folder)
    assert journal.find_record("stage/a", "key") == saved
    assert saved.result == {"rows": 3}
    assert journal.find_record("stage/a", "other key") is None
    assert journal.find_record("stage/b", "key") is None


def test_a_touched_file_counts_when_its_bytes_are_the_same(journal: Journal) -> None:
    path = journal.folder / "rooms" / "a.arrow"
    save(journal, "stage/a", {})
    os.utime(path, ns=(1, 1))
    assert journal.find_record("stage/a", "key") is not None
    path.write_bytes(b"w-ole")
    assert journal.find_record("stage/a", "key") is None
    path.write_bytes(b"who")
    assert journal.find_record("stage/a", "key") is None
    path.unlink()
    assert journal.find_record("stage/a", "key") is None


@pytest.mark.parametrize("earlier", ["json", "sqlite"])
def test_a_journal_of_another_version_is_refused_and_left_as_it_is(
    journal: Journal, earlier: str
) -> None:
    """The first journals were JSON files, the next ones had no version."""
    file = journal.folder / "journal" / "stage" / "a.json"
    if earlier == "json":
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    else:
        save(journal, "stage/a", {})
        journal.close()
        file = journal.folder / "journal" / "records.sqlite"
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.execute("pragma user_version = 0")
    before = file.read_bytes()
    said = (
        r"records\.sqlite has journal format 1, written by llmsys 0\.1; .* reads format "
        rf"{JOURNAL.version}\. Read it"
    )
    for use in (
        lambda: require_journal_version(journal.folder),
        lambda: journal.find_record("stage/a", "key"),
    ):
        with pytest.raises(FormatError, match=said):
            use()
    assert file.read_bytes() == before


def test_a_damaged_journal_is_named_with_what_to_do(journal: Journal) -> None:
    save(journal, "stage/a", {})
    journal.close()
    (journal.folder / "journal" / "records.sqlite").write_bytes(b"no database" * 1_000)
    with pytest.raises(
        DataError, match=r"records\.sqlite could not be read or written: .* is damaged: delete it"
    ):
        Journal(journal.folder).find_record("stage/a", "key")


def test_the_records_of_a_stage_are_in_the_order_of_its_tasks_and_others_are_removed(
    journal: Journal,
) -> None:
    for position, name in enumerate("dcba"):
        journal.save_record(f"stage/{name}", "key", [], {"name": name}, position)
    save(journal, "stage/early", {})  # its stage has not begun
    for position, name in enumerate("abd"):  # c is no task any more
        assert journal.has_record(f"stage/{name}", "key", position)
    journal.save_record("stage/early", "key", [], {"name": "early"}, 3)
    journal.remove_stale_records("stage", 4)
    assert [record.result["name"] for record in RecordList(journal, "stage", 4)] == [
        "a",
        "b",
        "d",
        "early",
    ]
    assert [record.result["name"] for record in RecordList(journal, "stage", 4)[::-1]] == [
        "early",
        "d",
        "b",
        "a",
    ]
    assert journal.find_record("stage/c", "key") is None


def test_a_name_that_is_not_utf8_is_kept(journal: Journal) -> None:
    name = os.fsdecode(b"stage/\xff")
    journal.save_record(name, "", [], {}, 0)
    assert journal.list_unfinished("stage") == [name]


def test_an_input_is_hashed_again_only_when_it_changed(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = journal.folder / "rooms" / "a.arrow"
    first = journal.get_input_digest(path)
    with monkeypatch.context() as patch:
        patch.setattr(
            "llmsys.data_pipeline.core.journal.compute_file_digest",
            lambda path: pytest.fail("hashed again"),
        )
        journal.close()
        journal = Journal(journal.folder)
        assert journal.get_input_digest(path) == first
    path.write_bytes(b"other")
    assert journal.get_input_digest(path) != first
    path.unlink()
    assert journal.get_input_digest(path) == ""


def test_records_of_tasks_that_are_gone_are_forgotten(journal: Journal) -> None:
    for position, name in enumerate(("stage/b", "stage/a", "other/c")):
        journal.save_record(name, "key", [], {}, position)
    journal.remove_stale_records("stage", 1)
    found = [name for name in ("stage/a", "stage/b", "other/c") if journal.find_record(name, "key")]
    assert found == ["stage/b", "other/c"]


def test_digests_depend_on_values_not_on_the_order_of_keys() -> None:
    assert compute_json_digest({"a": 1, "b": [2]}) == compute_json_digest({"b": [2], "a": 1})
    assert (
        len(
            {
                compute_json_digest(1),
                compute_json_digest("1"),
                compute_json_digest([1]),
                compute_json_digest(1, 1),
                compute_json_digest(None),
                compute_json_digest(),
            }
        )
        == 6
    )


def test_a_place_belongs_to_the_record_that_was_saved_last(tmp_path: Path) -> None:
    """As when a killed run had given it to a task that is none any more."""
    journal = Journal(tmp_path)
    for name in ("gone", "new"):
        journal.save_record(f"stage/{name}", "key", [], {"name": name}, 0)
    assert [record.result["name"] for record in journal.read_records("stage", 0, 9)] == ["new"]
    journal.remove_stale_records("stage", 1)
    assert not journal.has_any_record("stage", "gone")


def test_a_list_of_records_is_read_by_several_readers_at_a_time(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    numbers = list(range(1_203))
    with journal.hold_changes():
        for number in numbers:
            journal.save_record(f"stage/{number}", "key", [], {"number": number}, number)
    # A list that ends before the records do.
    records = RecordList(journal, "stage", 1_201)
    pairs = [
        (a.result["number"], b.result["number"]) for a, b in zip(records, records, strict=True)
    ]
    assert pairs == [(number, number) for number in numbers[:1_201]]
