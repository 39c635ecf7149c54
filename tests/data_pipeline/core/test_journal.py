"""Laws of the journal: a record counts only while its key and its files are what they were."""

import os
from pathlib import Path

import pytest

from data_pipeline.core.journal import Journal, compute_json_digest


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    (tmp_path / "rooms").mkdir()
    (tmp_path / "rooms" / "a.arrow").write_bytes(b"whole")
    return Journal(tmp_path)


def test_a_saved_record_is_found_by_its_key_alone(journal: Journal) -> None:
    saved = journal.save_record("stage/a", "key", ["rooms/a.arrow"], {"rows": 3})
    assert Journal(journal.folder).find_record("stage/a", "key") == saved
    assert saved.result == {"rows": 3}
    assert journal.find_record("stage/a", "other key") is None
    assert journal.find_record("stage/b", "key") is None


def test_a_touched_file_counts_when_its_bytes_are_the_same(journal: Journal) -> None:
    path = journal.folder / "rooms" / "a.arrow"
    journal.save_record("stage/a", "key", ["rooms/a.arrow"], {})
    os.utime(path, ns=(1, 1))
    assert journal.find_record("stage/a", "key") is not None
    path.write_bytes(b"w-ole")
    assert journal.find_record("stage/a", "key") is None
    path.write_bytes(b"who")
    assert journal.find_record("stage/a", "key") is None
    path.unlink()
    assert journal.find_record("stage/a", "key") is None


@pytest.mark.parametrize("content", [b"", b'{"key": "key"}', b"\x00\xff", b'{"key": "key", "outputs": ['])
def test_a_record_that_cannot_be_read_counts_as_none(journal: Journal, content: bytes) -> None:
    journal.save_record("stage/a", "key", ["rooms/a.arrow"], {})
    (journal.folder / "journal" / "stage" / "a.json").write_bytes(content)
    assert journal.find_record("stage/a", "key") is None


def test_an_input_is_hashed_again_only_when_it_changed(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    path = journal.folder / "rooms" / "a.arrow"
    first = journal.get_input_digest(path)
    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.core.journal.compute_file_digest", lambda path: pytest.fail("hashed again"))
        assert Journal(journal.folder).get_input_digest(path) == first
    path.write_bytes(b"other")
    assert journal.get_input_digest(path) != first
    path.unlink()
    assert journal.get_input_digest(path) == ""


def test_records_of_tasks_that_are_gone_are_forgotten(journal: Journal) -> None:
    for name in ("stage/a", "stage/b", "other/c"):
        journal.save_record(name, "key", [], {})
    journal.remove_stale_records("stage", ["stage/b"])
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
