"""Laws of zip archives: a member is read as its file would be; damage and bombs are named."""

import gzip
import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmsys.config.cleaning import ReadConfig
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.core.document_schema import select_heldout
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers import zip_archive
from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.readers.page_batch import NonPageRecord, SkippedRecord
from llmsys.data_pipeline.readers.page_reader import read_pages
from tests.helpers.tiny_crawl import build_tiny_config, hash_files
from tests.helpers.warc_records import compress_members, format_page

LIMIT = 100_000
TEXTS = [f"text {number} " + "of some words " * 40 for number in range(300)]


def build_members() -> dict[str, bytes]:
    """A file of each format."""
    lines = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(TEXTS))
    table = pa.table({"text": TEXTS, "n": range(len(TEXTS))})
    parquet, arrow = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet, row_group_size=50)
    with pa.ipc.new_file(arrow, table.schema) as writer:
        writer.write_table(table)
    page = b"<html><body><p>a page</p></body></html>"
    crawl = [format_page(number) for number in range(3)]
    return {
        "a.jsonl": lines.encode(),
        "deep/b.jsonl.gz": gzip.compress(lines.encode(), mtime=0),
        "c.csv": b"text,n\n" + b"".join(f"{text},1\n".encode() for text in TEXTS),
        "d.tsv": b"text\tn\n" + b"".join(f"{text}\t1\n".encode() for text in TEXTS),
        "e.txt": "Größe\n".encode(),
        "f.html": page,
        "g.parquet": parquet.getvalue(),
        "h.arrow": arrow.getvalue(),
        "i.warc": b"".join(crawl),
        "j.warc.gz": b"".join(compress_members(*crawl)),
    }


def write_zip(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return path


def read(path: Path) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Pages, and losses as (member, reason)."""
    batches = list(read_pages(str(path), max_page_bytes=LIMIT, config=ReadConfig()))
    skips = [skip for batch in batches for skip in batch.skipped]
    return (
        [row for batch in batches for row in batch.pages.to_pylist()],
        [(skip.file.removeprefix(str(path)).removeprefix("/"), skip.reason) for skip in skips],
    )


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("window", [1_000, 1 << 20])
def test_members_are_read_as_their_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: int, window: int
) -> None:
    monkeypatch.setattr(zip_archive, "_WINDOW", window)
    monkeypatch.setattr(zip_archive, "_STEP", 1_000)
    members = build_members()
    expected = []
    for name, content in members.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        rows, losses = read(tmp_path / name)
        assert rows
        assert losses == []
        expected += [row | {"file": f"{tmp_path}/a.zip/{name}"} for row in rows]
    found, losses = read(write_zip(tmp_path / "a.zip", members, method))
    assert losses == []
    assert found == expected


def test_what_is_no_document_is_named_by_member(tmp_path: Path) -> None:
    line = b'{"text": "one"}\n'
    inner = write_zip(tmp_path / "inner.zip", {"a.jsonl": line}).read_bytes()
    members = {
        "folder/": b"",
        "empty.txt": b"",
        "inner.zip": inner,
        "inner.zip.gz": gzip.compress(inner, mtime=0),
        "picture.png": b"\x89PNG\r\n" + bytes(50),
        "bad.jsonl": b"{no\n" + line,
        "last.jsonl": line,
        "line\nbreak.jsonl": line,
    }
    found, losses = read(write_zip(tmp_path / "a.zip", members))
    nested = "a zip archive inside another or inside a compression: unpack it"
    assert dict(losses) == {
        "empty.txt": "empty file",
        "inner.zip": nested,
        "inner.zip.gz": nested,
        "picture.png": "no format that is read: .jsonl, .ndjson, .json, .parquet, .arrow, "
        ".feather, .arc, .csv, .tsv, .tab, .txt, .md, .pdf, .html, .htm, .warc",
        "bad.jsonl": "not JSON: Expecting property name enclosed in double quotes",
    }
    assert [row["file"].rpartition("/")[2] for row in found] == [
        "bad.jsonl", "last.jsonl", "line?break.jsonl"
    ]  # fmt: skip


def set_bits(path: Path, place: int, bits: int, width: int = 2) -> None:
    """Set a field of the first entry of the directory."""
    data = bytearray(path.read_bytes())
    begin = data.index(b"PK\x01\x02") + place
    data[begin : begin + width] = bits.to_bytes(width, "little")
    path.write_bytes(data)


def test_an_encrypted_member_and_an_unknown_method_lose_themselves(tmp_path: Path) -> None:
    members = {"a.txt": b"one", "b.txt": b"two"}
    path = write_zip(tmp_path / "a.zip", members)
    set_bits(path, 8, 1)
    found, losses = read(path)
    assert losses == [("a.txt", "encrypted: unpack the archive with its password")]
    assert [row["text"] for row in found] == ["two"]
    set_bits(write_zip(path, members), 10, 14)
    assert read(path)[1] == [("a.txt", "compressed by method 14 of zip: pack it with deflate")]


def test_bombs_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_archive, "FREE_BYTES", 50_000)
    bomb, line = b'{"text": "x"}\n' * 100_000, b'{"text": "one"}\n'
    path = write_zip(tmp_path / "a.zip", {"bomb.jsonl": bomb, "b.jsonl": line})
    found, losses = read(path)
    ((name, reason),) = losses
    assert name == "bomb.jsonl"
    assert reason.startswith("1400000 bytes from ")
    assert reason.endswith("as in a zip bomb: unpack the archive if you trust it")
    assert len(found) == 1
    # Members that share their bytes: each alone is within the limit.
    data = (TEXTS[0] * 60).encode()
    path = write_zip(path, {"a.txt": data})
    whole = path.read_bytes()
    begin, end = whole.index(b"PK\x01\x02"), whole.index(b"PK\x05\x06")
    entry, tail = whole[begin:end], bytearray(whole[end:])
    tail[8:12] = (50).to_bytes(2, "little") * 2
    tail[12:16] = (50 * len(entry)).to_bytes(4, "little")
    path.write_bytes(whole[:begin] + entry * 50 + bytes(tail))
    found, losses = read(path)
    assert 0 < len(found) < 50
    assert len(found) + len(losses) == 50
    monkeypatch.setattr(zip_archive, "MAX_MEMBERS", 2)
    path = write_zip(path, {f"{number}.txt": b"x" for number in range(3)})
    reason = "a zip archive of 3 files: split it, at most 2 in each"
    assert read(path) == ([], [("", reason)])
    monkeypatch.setattr(zip_archive, "_DIRECTORY_BYTES", 100)
    assert "and at most 100 are read: split it" in read(path)[1][0][1]


def test_a_damaged_member_is_named_and_those_after_it_are_read(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        path = write_zip(tmp_path / "a.zip", {"a.jsonl": lines, "b.txt": b"whole"}, method)
        data = bytearray(path.read_bytes())
        data[data.index(b"PK\x01\x02") // 2] ^= 0x55
        path.write_bytes(data)
        found, losses = read(path)
        assert losses[-1][0] == "a.jsonl"
        assert losses[-1][1].startswith("damaged in the zip archive: ")
        assert found[-1]["text"] == "whole"


def test_no_damage_raises(tmp_path: Path) -> None:
    choose = random.Random(0)
    whole = write_zip(tmp_path / "a.zip", build_members()).read_bytes()
    for number in range(24):
        data = bytearray(whole)
        for _ in range(choose.randint(1, 3)):
            # Half of them in the directory.
            first = whole.index(b"PK\x01\x02") if choose.random() < 0.5 else 0
            data[choose.randrange(first, len(data))] ^= 1 << choose.randrange(8)
        cut = len(data) if number % 4 else choose.randrange(len(data))
        (tmp_path / "a.zip").write_bytes(data[:cut])
        found, losses = read(tmp_path / "a.zip")
        assert found or losses


def test_workers_and_a_second_run_change_no_byte(tmp_path: Path) -> None:
    choose = random.Random(1)
    for name in ("a", "b", "c"):
        words = [" ".join(choose.choices(TEXTS[0].split() + list("xyz"), k=60)) for _ in range(40)]
        rows = "".join(json.dumps({"text": text}) + "\n" for text in words)
        members = {"one.jsonl": rows.encode(), "two.txt": words[0].encode() + b" end"}
        write_zip(tmp_path / f"{name}.zip", members)
    pattern = [f"{tmp_path}/*.zip"]
    hashes = []
    for workers in (1, 2, 2):
        folder = tmp_path / f"data{workers}"
        config = build_tiny_config(
            folder, pattern, rules=[], executor={"kind": "local", "workers": workers}
        )
        prepare_dataset(config, until="documents")
        hashes.append({**hash_files(folder), "manifest.json": ""})
    assert hashes[0] == hashes[1] == hashes[2]


def test_documents_of_a_held_out_archive_are_held_out() -> None:
    files = ["x/a.zip/b.jsonl", "x/a.zip/c/d.txt", "x/a.zipped", "x/b.warc"]
    batch = pa.record_batch({"id": ["1", "2", "3", "4"], "file": files})
    split = CrawlConfig(inputs=("x",), name="n", folder=Path("f")).split
    assert select_heldout(batch, split, ["x/a.zip"]).tolist() == [True, True, False, False]


def test_damage_behind_the_end_of_a_reader_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader may have all it needs before the end of a member, such as an index before it."""
    monkeypatch.setattr(zip_archive, "_STEP", 100)
    path = write_zip(tmp_path / "a.zip", {"a.txt": bytes(5_000)}, zipfile.ZIP_STORED)
    content = bytearray(path.read_bytes())
    content[4_000] ^= 1

    def read_head(stream: InputStream) -> Iterator[NonPageRecord]:
        assert stream.read_block(0, 10) == bytes(10)
        yield from ()

    for whole, losses in ((path.read_bytes(), 0), (bytes(content), 1)):
        path.write_bytes(whole)
        with InputStream(str(path), max_attempts=1) as source:
            found = list(zip_archive.read_zip(source, read_head))
        assert len(found) == losses
        assert all(isinstance(one, SkippedRecord) and "CRC" in one.reason for one in found)
