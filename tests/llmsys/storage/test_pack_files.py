"""Laws of packs: a part is its bytes, whoever wrote it where, or it is not there."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import xxhash

from llmsys.errors import DataError
from llmsys.storage import pack_files
from llmsys.storage.arrow_file import ArrowFileWriter, read_batches
from llmsys.storage.pack_files import (
    PackedFile,
    PackWriter,
    WrittenPart,
    build_pack_path,
    find_packed_file,
    find_torn_tail,
    list_intact_parts,
    release_packs,
    take_written_part,
)
from tests.helpers.paths import ROOT

SCHEMA = pa.schema([("number", pa.int64())])
# A process that writes the parts a and b, says so, begins a third, and waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from llmsys.storage.pack_files import PackWriter, take_written_part
folder = Path(sys.argv[1])
for name in "ab":
    writer = PackWriter(folder / name)
    writer.write(name.encode() * 1_000)
    writer.keep()
    print(take_written_part(folder / name).file.path, flush=True)
writer = PackWriter(folder / "c")
writer.write(b"c" * 3_000_000)
writer.flush()
print("torn", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "filtered.packs"


def write_part(folder: Path, name: str, data: bytes) -> WrittenPart:
    writer = PackWriter(folder / name)
    writer.write(data)
    writer.keep()
    part = take_written_part(folder / name)
    assert part is not None
    return part


def write_wrong_batch(path: Path) -> None:
    with ArrowFileWriter(path, SCHEMA) as writer:
        writer.write(pa.record_batch([pa.array(range(99))], schema=SCHEMA))
        writer.write(pa.record_batch([pa.array(["text"])], names=["other"]))


def read_part(part: PackedFile) -> bytes:
    packed = find_packed_file(part.path)
    assert packed == part
    return packed.map_bytes().to_pybytes()


def run_writer(folder: Path) -> tuple[list[PackedFile], subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline().strip() for _ in range(3)]
    assert lines[2] == "torn"
    found = [find_packed_file(Path(line)) for line in lines[:2]]
    return [part for part in found if part is not None], process


def test_many_files_are_parts_of_one_pack_with_the_bytes_that_files_of_their_own_have(
    folder: Path,
) -> None:
    batches = [pa.record_batch([pa.array(range(n))], schema=SCHEMA) for n in (1, 0, 1_000)]
    for number, batch in enumerate(batches):
        paths = [folder / f"{number}", folder.parent / f"{number}.arrow"]
        for path in paths:
            with ArrowFileWriter(path, SCHEMA) as writer:
                writer.write(batch)
        part = take_written_part(paths[0])
        assert part is not None
        content = paths[1].read_bytes()
        assert read_part(part.file) == content
        assert part.digest == xxhash.xxh3_128_hexdigest(content)
        assert list(read_batches(part.file.path)) == [batch]
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["000.pack"]


def test_a_writer_that_fails_leaves_its_pack_as_it_was(folder: Path) -> None:
    first = write_part(folder, "a", b"a" * 100)
    before = list_intact_parts(first.file.pack)
    with pytest.raises(pa.ArrowInvalid, match="schema"):
        write_wrong_batch(folder / "b")
    assert first.file.pack.stat().st_size < first.file.stop + 64
    assert take_written_part(folder / "b") is None
    assert list_intact_parts(first.file.pack) == before
    assert write_part(folder, "c", b"c").file.start == 64 + 128 + 64


def test_what_a_killed_writer_left_is_cut_off_and_its_complete_parts_stay(folder: Path) -> None:
    parts, process = run_writer(folder)
    process.kill()
    process.wait()
    pack = build_pack_path(folder, 0)
    assert pack.stat().st_size > 3_000_000
    expected = {(part.start, part.length) for part in parts}
    assert list_intact_parts(pack) == (expected, True)
    third = write_part(folder, "d", b"d" * 10)
    assert third.file.pack == pack
    assert third.file.start == parts[1].start + 1_024 + 64
    assert pack.stat().st_size == third.file.stop
    assert [read_part(part) for part in parts] == [b"a" * 1_000, b"b" * 1_000]


def test_two_processes_that_append_have_a_pack_each(folder: Path) -> None:
    theirs, process = run_writer(folder)
    own = [write_part(folder, name, name.encode() * 50) for name in "xyz"]
    process.kill()
    process.wait()
    assert {part.pack for part in theirs} == {build_pack_path(folder, 0)}
    assert {part.file.pack for part in own} == {build_pack_path(folder, 1)}
    assert [read_part(part.file) for part in own] == [b"x" * 50, b"y" * 50, b"z" * 50]
    assert [read_part(part) for part in theirs] == [b"a" * 1_000, b"b" * 1_000]
    # Both are free now: no third pack is begun.
    release_packs(folder)
    assert write_part(folder, "w", b"w").file.pack == build_pack_path(folder, 0)


def test_two_writers_of_one_process_do_not_share_a_pack(folder: Path) -> None:
    writers = [PackWriter(folder / name) for name in "ab"]
    for number in range(3):
        for writer, name in zip(writers, "ab", strict=True):
            writer.write(name.encode() * number)
    for writer in writers:
        writer.keep()
    parts = [take_written_part(folder / name) for name in "ab"]
    assert [read_part(part.file) for part in parts if part is not None] == [b"aaa", b"bbb"]


def test_a_flipped_bit_costs_its_own_part(folder: Path) -> None:
    parts = [write_part(folder, name, name.encode() * 100).file for name in "abc"]
    pack = parts[0].pack
    content = bytearray(pack.read_bytes())
    content[parts[1].start + 7] ^= 1
    pack.write_bytes(content)
    intact = {(part.start, part.length) for part in (parts[0], parts[2])}
    assert list_intact_parts(pack) == (intact, False)
    # A header with another bit names no end, so that nothing after it counts or is overwritten.
    content[parts[1].start - 60] ^= 1
    pack.write_bytes(content)
    assert list_intact_parts(pack) == ({(parts[0].start, parts[0].length)}, False)
    release_packs(folder)
    with open(pack, "rb") as file:
        assert find_torn_tail(file.fileno()) is None
    assert write_part(folder, "d", b"d").file.pack == build_pack_path(folder, 1)


def test_a_full_pack_is_followed_by_another_and_a_thousand_are_in_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_files, "FULL_BYTES", 300)
    packs = [write_part(folder, f"{number}", b"x" * 100).file.pack for number in range(5)]
    assert packs == [build_pack_path(folder, number) for number in (0, 0, 1, 1, 2)]
    first, last, next_one = (build_pack_path(folder, number) for number in (0, 999, 1_000))
    assert (last.parent, last.name) == (first.parent, "999.pack")
    assert next_one.parent == first.parent.with_name(first.parent.name.replace("-000", "-001"))
    assert next_one.name == "000.pack"


def test_hosts_append_to_packs_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of some shared file systems are of one host: two would write to one place."""
    own = write_part(folder, "own", b"own")
    monkeypatch.setattr(pack_files, "_get_host_key", lambda: "abcdef")
    theirs = build_pack_path(folder, 0)
    assert theirs != own.file.pack
    assert theirs.parent.parent == own.file.pack.parent.parent


def test_a_pack_that_was_removed_takes_no_part(folder: Path) -> None:
    first = write_part(folder, "a", b"a")
    first.file.pack.unlink()
    assert read_part(write_part(folder, "b", b"b").file) == b"b"


def test_a_part_that_is_gone_is_named(folder: Path) -> None:
    part = write_part(folder, "a", b"a" * 100).file
    with pytest.raises(DataError, match=r"007\.pack/64-100 is missing\. Run llmsys prepare"):
        list(read_batches(part.pack.with_name("007.pack") / part.path.name))
    with open(part.pack, "r+b") as file:
        file.truncate(90)
    with pytest.raises(DataError, match=r"64-100 cannot be read \(.*ends before byte 164"):
        list(read_batches(part.path))
