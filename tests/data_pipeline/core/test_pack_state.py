"""Laws of records whose files are parts of packs: they count while their bytes are what they were,
and packs that nobody touched are not read to know it.
"""

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from llmsys.data_pipeline.core import pack_state
from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.core.task_record import describe_output
from llmsys.storage.arrow_file import ArrowFileWriter
from llmsys.storage.pack_files import build_pack_path, list_intact_parts, release_packs

SCHEMA = pa.schema([("number", pa.int64())])
NAMES = ("a", "b", "c")


def save(folder: Path, journal: Journal, name: str) -> str:
    """Write a part and record it; return the name of its place."""
    with ArrowFileWriter(folder / "work" / "stage.packs" / name, SCHEMA) as writer:
        writer.write(pa.record_batch([pa.array(range(ord(name)))], schema=SCHEMA))
    output = describe_output(folder, f"work/stage.packs/{name}")
    journal.save_record(f"stage/{name}", "key", [output], {})
    return output.name


def list_found(folder: Path) -> list[str]:
    """The records that a new run finds."""
    journal = Journal(folder)
    found = [name for name in (*NAMES, "d") if journal.find_record(f"stage/{name}", "key")]
    journal.close()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    journal = Journal(folder)
    for name in NAMES:
        save(folder, journal, name)
    journal.close()
    release_packs(folder)
    return folder


@pytest.fixture
def pack(folder: Path) -> Path:
    return build_pack_path(folder / "work" / "stage.packs", 0)


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read = list[Path]()
    whole = list_intact_parts

    def count(path: Path) -> tuple[set[tuple[int, int]], bool]:
        read.append(path)
        return whole(path)

    monkeypatch.setattr(pack_state, "list_intact_parts", count)
    return read


def test_a_pack_as_it_was_recorded_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_reads(monkeypatch)
    assert list_found(folder) == [*NAMES]
    assert not read


def test_a_copied_folder_is_read_once_and_all_counts(
    folder: Path, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    os.utime(copy / pack.relative_to(folder), ns=(1, 1))
    read = count_reads(monkeypatch)
    assert list_found(copy) == [*NAMES]
    assert list_found(copy) == [*NAMES]
    assert read == [copy / pack.relative_to(folder)]


def test_a_flipped_bit_is_one_record_until_its_task_has_run_again(folder: Path, pack: Path) -> None:
    content = bytearray(pack.read_bytes())
    content[content.index(b"ARROW1", content.index(b"llmpack1", 64)) + 100] ^= 1
    pack.write_bytes(content)
    journal = Journal(folder)
    # It asks for none of those that are damaged.
    assert journal.find_record("stage/a", "key") is not None
    journal.close()
    found = list_found(folder)
    assert found == ["a", "c"]
    assert list_found(folder) == found  # the damaged pack is not taken for a sound one
    (lost,) = {*NAMES} - {*found}
    journal = Journal(folder)
    save(folder, journal, lost)
    journal.close()
    release_packs(folder)
    assert list_found(folder) == [*NAMES]


def test_a_part_that_was_cut_off_is_not_found(folder: Path, pack: Path) -> None:
    with open(pack, "r+b") as file:
        file.truncate(pack.stat().st_size - 1)
    assert list_found(folder) == ["a", "b"]
    # What is written into its place is not taken for it, even with its length.
    journal = Journal(folder)
    with ArrowFileWriter(folder / "work" / "stage.packs" / "d", SCHEMA) as writer:
        writer.write(pa.record_batch([pa.array(range(ord("c"), 0, -1))], schema=SCHEMA))
    output = describe_output(folder, "work/stage.packs/d")
    journal.save_record("stage/d", "key", [output], {})
    journal.close()
    release_packs(folder)
    assert list_found(folder) == ["a", "b", "d"]
    pack.unlink()
    assert list_found(folder) == []


def test_a_run_that_was_killed_before_it_noted_its_packs_loses_no_record(folder: Path) -> None:
    journal = Journal(folder)
    save(folder, journal, "d")
    journal._close_connection()  # as of a killed process: nothing is noted at the end
    release_packs(folder)
    assert list_found(folder) == [*NAMES, "d"]


def test_parts_of_a_pack_that_this_run_extends_are_checked_as_well(
    folder: Path, pack: Path
) -> None:
    """A pack changed since its last record: a new part in it says nothing about the old ones."""
    content = bytearray(pack.read_bytes())
    content[200] ^= 1
    pack.write_bytes(content)
    journal = Journal(folder)
    save(folder, journal, "d")
    assert journal.find_record("stage/a", "key") is None
    assert journal.find_record("stage/d", "key") is not None
    journal.close()
    release_packs(folder)
    assert list_found(folder) == ["b", "c", "d"]
