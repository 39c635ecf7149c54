"""Laws of every reader under any damage: it ends in counted steps, reads what was not hit, and
names what was.
"""

import bz2
import gzip
import io
import json
import lzma
import random
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers import compressed_members as member_module
from llmsys.data_pipeline.readers import page_reader as read_module
from llmsys.data_pipeline.readers.compressed_members import XZ
from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.readers.page_batch import SkippedRecord
from tests.helpers.compressed_records import compress_records
from tests.helpers.warc_records import PAGE, compress_members, format_page, record

DIGESTS = ReadConfig(on_digest_mismatch="ignore")
TEXTS = [
    f"Text number {number} of a few, which is long enough to be hit." * 3 for number in range(12)
]


def arc(number: int) -> bytes:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE % TEXTS[number].encode()
    return b"http://example.org/%d 1.2.3.4 20140216050221 text/html %d\n%s\n" % (
        number,
        len(http),
        http,
    )


def wet(number: int) -> bytes:
    headers = f"WARC-Target-URI: https://example.org/{number}\r\nContent-Type: text/plain\r\n"
    return record("conversion", TEXTS[number].encode(), headers)


def line(number: int) -> bytes:
    return json.dumps({"text": TEXTS[number]}).encode() + b"\n"


MAKERS = {"warc": format_page, "wet": wet, "arc": arc, "jsonl": line}
COMPRESSIONS = ("plain", "gzip", "zstd", "lz4", "bzip2", "xz")
KINDS = [(format, kind) for format in MAKERS for kind in COMPRESSIONS] + [("warc", "dictionary")]


class Read:
    """What became of a file."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[InputStream] = []

        def remember(*arguments: object) -> InputStream:
            opened.append(InputStream(*arguments))  # type: ignore[arg-type]
            return opened[-1]

        with monkeypatch.context() as patch:
            patch.setattr(read_module, "open_input_stream", remember)
            batches = list(read_module.read_pages(str(path), max_page_bytes=50_000, config=DIGESTS))
        rows = [row for batch in batches for row in batch.pages.to_pylist()]
        self.contents = [row["payload"] if row["text"] is None else row["text"] for row in rows]
        self.skips: list[SkippedRecord] = [skip for batch in batches for skip in batch.skipped]
        self.work = sum(source.work for source in opened)


def damaged(whole: bytes, choose: random.Random) -> tuple[bytes, int, int]:
    """Return the bytes with a flip, a cut, a hole or something put in, and the first and last
    byte that it hit.
    """
    place, size = choose.randrange(len(whole)), choose.randrange(1, 200)
    match choose.randrange(4):
        case 0:
            return (
                whole[:place]
                + bytes([whole[place] ^ 1 << choose.randrange(8)])
                + whole[place + 1 :],
                place,
                place,
            )
        case 1:
            return whole[:place], place, len(whole)
        case 2:
            return whole[:place] + whole[place + size :], place, place + size
    return whole[:place] + choose.randbytes(size) + whole[place:], place, place


@pytest.mark.parametrize(("format", "kind"), KINDS, ids=str)
def test_what_was_not_hit_is_read_and_what_was_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, kind: str
) -> None:
    parts = compress_records(kind, [MAKERS[format](number) for number in range(12)])
    path, whole = tmp_path / f"a.{format}", b"".join(parts)
    path.write_bytes(whole)
    good = Read(path, monkeypatch)
    assert (len(good.contents), good.skips) == (12, [])
    ends = [sum(map(len, parts[: number + 1])) for number in range(12)]
    choose = random.Random(f"{format} {kind}")
    for _ in range(25):
        content, first, last = damaged(whole, choose)
        path.write_bytes(content)
        found = Read(path, monkeypatch)
        begins = [0, *ends[:-1]]
        # What ends or begins beside the damage may have been taken for a part of it; the dictionary
        # belongs to all.
        hit = [begins[n] <= last + 1 and first <= ends[n] for n in range(12)]
        if kind == "dictionary" and first < len(parts[0]):
            continue
        # A compression is known by the first bytes of a file.
        if kind != "plain" and first < len(XZ):
            continue
        missing = [
            good.contents[n]
            for n in range(12)
            if not hit[n] and good.contents[n] not in found.contents
        ]
        assert missing == [], (first, last)
        is_whole = set(good.contents) <= set(found.contents) or len(content) in ends
        if not (is_whole or found.skips):  # bytes that no checksum covers can change unseen
            assert kind in ("plain", "lz4")
        assert all(skip.reason and skip.offset >= 0 for skip in found.skips)
        assert found.work < 60 * len(content) + 200_000


def test_damaged_columns_cost_their_row_group_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"text": [f"{text} {n}" for n in range(20) for text in TEXTS]})
    parquet, stream = io.BytesIO(), io.BytesIO()
    pq.write_table(table, parquet, row_group_size=40, write_page_checksum=True)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=40)
    for whole in (parquet.getvalue(), stream.getvalue()):
        choose, path = random.Random(len(whole)), tmp_path / "a.columns"
        for _ in range(30):
            path.write_bytes(damaged(whole, choose)[0])
            found = Read(path, monkeypatch)
            assert len(found.contents) <= len(table)
            assert found.skips or len(found.contents) == len(table) or whole == stream.getvalue()
            assert found.work < 60 * len(whole) + 1_000_000


# --- what no accident makes: places that lead nowhere, each as long as the rest of the file ---


def gzip_in_gzip(count: int, tail: int) -> bytes:
    """Members that begin inside one another, and are all the same behind the last of them."""
    text = b"WARC/1.0\r\nA: b\r\n"

    def stored(data: bytes, size: int) -> bytes:
        return b"\0" + struct.pack("<HH", size, size ^ 0xFFFF) + data

    def one(rest: int) -> bytes:
        return b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + stored(text, len(text)) + stored(b"", rest)

    size = len(one(0))
    return (
        b"".join(one(size * n) for n in reversed(range(count)))
        + stored(b"x" * 1_000, 1_000) * tail
        + b"\xff"
    )


def zstd_in_zstd(count: int, tail: int) -> bytes:
    """Frames that each lead over all that follow into a long chain of empty blocks that never
    ends.
    """
    return b"".join(
        b"\x28\xb5\x2f\xfd\0\x58" + (9 * n << 3).to_bytes(3, "little")
        for n in reversed(range(count))
    ) + (b"\0\0\0" * 20 * tail)


def lz4_in_lz4(count: int, tail: int) -> bytes:
    head = pa.compress(b"x" * 100, codec="lz4", asbytes=True)[:7]
    over = [struct.pack("<I", 0x8000_0000 | 11 * n) for n in reversed(range(count))]
    return (
        b"".join(head + one for one in over) + (struct.pack("<I", 0x8000_0001) + b"x") * 10 * tail
    )


def bzip2_in_bzip2(count: int, tail: int) -> bytes:
    """Heads of streams, each followed by others instead of a block that can be decoded."""
    return bz2.compress(b"x")[:10] * count + b"\xff" * tail


def xz_in_xz(count: int, tail: int) -> bytes:
    return lzma.compress(b"x")[:12] * count + b"\xff" * tail


@pytest.mark.parametrize("make", [gzip_in_gzip, zstd_in_zstd, lz4_in_lz4, bzip2_in_bzip2, xz_in_xz])
def test_members_inside_one_another_cost_a_counted_number_of_bytes_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: object
) -> None:
    kind = make.__name__.split("_")[0]  # type: ignore[attr-defined]
    monkeypatch.setattr(member_module, "_EXTRA_WASTE", 1 << 16)
    good = b"".join(compress_records(kind, [format_page(0), format_page(1)]))
    path = tmp_path / f"a.warc.{kind}"
    path.write_bytes(good + make(150, 60) + good)
    found = Read(path, monkeypatch)
    assert found.contents[:2] == [PAGE % f"Page number {n}.".encode() for n in (0, 1)]
    assert found.skips[0].offset == len(good)
    assert (
        len(found.contents) == 4
        or found.skips[-1].reason == "more damage than is searched: the rest is not read"
    )
    assert found.work < 40 * path.stat().st_size + 500_000


@pytest.mark.parametrize("kind", ["plain", "gzip", "whole"])
@pytest.mark.parametrize("length", [4_000_000, 10**12])
def test_many_records_that_lie_cost_as_much_as_they_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, length: int
) -> None:
    work = []
    for count in (200, 400):
        path = tmp_path / f"{count}.warc"
        path.write_bytes(
            b"".join(
                compress_records(
                    kind,
                    [
                        format_page(0),
                        format_page(1),
                        format_page(2),
                        record("response", b"x", "", length),
                    ]
                    * count,
                )
            )
        )
        found = Read(path, monkeypatch)
        assert len(found.skips) == count
        assert len(found.contents) == 3 * count
        work.append(found.work)
    assert work[1] < 2.6 * work[0]


def test_a_header_of_continued_lines_or_one_endless_number_costs_no_other_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = record("response", b"x", "A: b\r\n" + " \n" * 20_000)
    digits = record("response", b"x").replace(
        b"Content-Length: 1", b"Content-Length: " + b"1" * 5_000
    )
    path = tmp_path / "a.warc.gz"
    path.write_bytes(
        b"".join(compress_members(format_page(0), folded, digits, format_page(1)))
        + gzip.compress(digits)
    )
    found = Read(path, monkeypatch)
    assert found.contents == [PAGE % f"Page number {n}.".encode() for n in (0, 1)]
    no_number = "damaged record: Content-Length is no number"
    assert [skip.reason for skip in found.skips] == ["no WARC-Target-URI", no_number, no_number]
    assert found.work < 20 * path.stat().st_size


def test_skips_wait_for_no_page_so_that_damage_without_end_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(b"WARC/1.0\r\nA: b\r\n" * 4_500)
    batches = [
        len(batch.skipped) for batch in read_module.read_pages(str(path), max_page_bytes=1_000)
    ]
    assert sum(batches) == 4_500
    assert max(batches) < 4_500


def test_a_stream_of_xz_that_asks_for_gigabytes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 512 << 20}]
    path.write_bytes(lzma.compress(line(0), filters=filters) + lzma.compress(line(1)))
    (batch,) = read_module.read_pages(str(path), max_page_bytes=50_000)
    assert batch.pages.column("text").to_pylist() == [TEXTS[1]]
    assert [skip.reason for skip in batch.skipped] == [
        "damaged xz stream: Memory usage limit exceeded"
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.warc.zip", b"PK\x03\x04" + b"\0" * 30, "damaged zip archive: its directory"),
        ("a.jsonl", b"%PDF-1.7\n%", "a PDF: data.read.pdf.kind=pdfium reads"),
        ("a.json", b' [\n  {"text": "one"},\n  {"text": "two"}\n]\n', "a JSON array: write one"),
        ("a.json", b"[]", "not a JSON object"),
    ],
)
def test_a_format_that_is_not_read_is_named_once(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (batch,) = read_module.read_pages(str(path), max_page_bytes=50_000)
    (skip,) = batch.skipped
    assert (batch.pages.num_rows, skip.reason.startswith(reason)) == (0, True)


def test_rows_after_a_damaged_one_are_read_although_it_begins_like_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for first in (b"[\n", b'[{"text": "cut\n', b"[1]\n", b"[]\n"):
        path.write_bytes(first + line(0) + line(1))
        (batch,) = read_module.read_pages(str(path), max_page_bytes=50_000)
        assert batch.pages.column("text").to_pylist() == TEXTS[:2]
        assert len(batch.skipped) == 1


def test_streams_of_xz_may_be_padded(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(b"".join(lzma.compress(line(n)) + b"\0" * 8 for n in range(3)))
    (batch,) = read_module.read_pages(str(path), max_page_bytes=50_000)
    assert (batch.pages.column("text").to_pylist(), batch.skipped) == (TEXTS[:3], [])
