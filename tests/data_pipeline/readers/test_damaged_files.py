"""Laws of damage: whatever bytes are lost or changed, what is whole is delivered, the rest is
named, nothing raises.
"""

import base64
import gzip
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers import input_stream
from llmsys.data_pipeline.readers import warc_records as record_module
from llmsys.data_pipeline.readers.page_batch import SkippedRecord
from llmsys.data_pipeline.readers.page_reader import read_pages
from tests.helpers.compressed_records import build_records, compress_records
from tests.helpers.warc_records import PAGE, compress_members, format_page, format_response, record

LIMIT = 100_000
Found = tuple[list[tuple[int, Any]], list[tuple[int, str]], int]


def read(path: Path, config: ReadConfig | None = None) -> Found:
    """Pages as (offset, content), skips as (offset, reason), and the number of records."""
    batches = list(read_pages(str(path), max_page_bytes=LIMIT, config=config))
    rows = [row for batch in batches for row in batch.pages.to_pylist()]
    pages = [
        (row["offset"], row["text"] if row["text"] is not None else row["payload"]) for row in rows
    ]
    skips = [(skip.offset, skip.reason) for batch in batches for skip in batch.skipped]
    return pages, skips, sum(batch.records for batch in batches)


def damaged(content: bytes, choose: random.Random) -> bytes:
    """Flip a bit, cut, take out or put in."""
    data, place = bytearray(content), choose.randrange(len(content))
    kind = choose.randrange(4)
    if kind == 0:
        data[place] ^= 1 << choose.randrange(8)
    elif kind == 1:
        del data[place:]
    elif kind == 2:
        del data[place : place + choose.randrange(1, 200)]
    else:
        data[place:place] = choose.randbytes(choose.randrange(1, 300))
    return bytes(data)


@pytest.mark.parametrize(
    "kind", ["gzip", "whole", "zstd", "dictionary", "lz4", "bzip2", "xz", "plain"]
)
def test_every_compression_gives_the_same_pages(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(b"".join(compress_records(kind, build_records())))
    pages, skips, count = read(path)
    assert [content for _, content in pages] == [content for _, content in plain_pages(tmp_path)]
    assert (skips, count) == ([], 10)


def plain_pages(folder: Path) -> list[tuple[int, str]]:
    path = folder / "plain.warc"
    path.write_bytes(b"".join(build_records()))
    return read(path)[0]


@pytest.mark.parametrize("kind", ["gzip", "whole", "zstd", "bzip2", "xz", "plain"])
def test_damage_anywhere_costs_only_what_it_hit(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The careful reader is the slow twin of the fast one: both give the same for any damage."""
    parts = compress_records(kind, build_records())
    whole, path = b"".join(parts), tmp_path / "a.warc"
    ends = {sum(map(len, parts[:number])) for number in range(len(parts) + 1)}
    good = {content for _, content in plain_pages(tmp_path)}
    choose = random.Random(kind)
    for _ in range(40):
        content = damaged(whole, choose)
        path.write_bytes(content)
        fast = read(path)
        with monkeypatch.context() as patch:
            patch.setattr(record_module, "_has_record_offsets", lambda source, magic: False)
            assert read(path) == fast
        delivered = [content for _, content in fast[0]]
        assert len(set(delivered)) == len(delivered)
        if kind != "plain":  # bytes that no checksum covers can change unseen
            assert set(delivered) <= good
            assert fast[1] or set(delivered) == good or len(content) in ends


@pytest.mark.parametrize("kind", ["gzip", "zstd", "lz4", "bzip2", "xz"])
def test_what_lies_between_two_damaged_members_is_read(tmp_path: Path, kind: str) -> None:
    parts = [
        bytearray(part)
        for part in compress_records(kind, [format_page(number) for number in range(6)])
    ]
    for part in (parts[1], parts[4]):
        part[len(part) // 2 : len(part) // 2 + 20] = b"\xff" * 20
    path = tmp_path / "a.warc"
    path.write_bytes(b"".join(parts))
    pages, skips, _ = read(path)
    assert [content for _, content in pages] == [
        PAGE % f"Page number {n}.".encode() for n in (0, 2, 3, 5)
    ]
    assert [offset for offset, _ in skips] == [sum(map(len, parts[:n])) for n in (1, 4)]


@pytest.mark.parametrize("kind", ["gzip", "plain"])
def test_a_header_that_lost_its_length_is_named_although_its_record_is_no_page(
    tmp_path: Path, kind: str
) -> None:
    cut = record("metadata", b"").replace(b"Content-Length: 0\r\n", b"")
    path = tmp_path / "a.warc"
    path.write_bytes(b"".join(compress_records(kind, [format_page(0), cut, format_page(1)])))
    pages, skips, count = read(path)
    assert (len(pages), count) == (2, 2)
    assert [reason for _, reason in skips] == ["damaged record: no Content-Length"]


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_lines_survive_damage_to_other_members(tmp_path: Path, kind: str) -> None:
    lines = [
        [json.dumps({"text": f"Document {n} of part {part}."}) + "\n" for n in range(40)]
        for part in range(4)
    ]
    parts = compress_records(kind, ["".join(part).encode() for part in lines])
    content = bytearray(b"".join(parts))
    content[len(parts[0]) + len(parts[1]) // 2] ^= 0x20
    path = tmp_path / "a.jsonl.packed"
    path.write_bytes(content)
    pages, skips, _ = read(path)
    texts = {text for _, text in pages}
    assert {f"Document {n} of part {part}." for part in (0, 2, 3) for n in range(40)} <= texts
    assert [offset for offset, _ in skips][:1] == [len(parts[0])]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "not JSON: Unterminated string starting at"),
        (b'["text"]', "not a JSON object"),
        (
            b'{"words": "x", "meta": {"body": "y", "n": 1}, "n": 7}',
            "no text in field 'text': text is in 'meta.body', 'words' (data.read.text_field names "
            "the field)",
        ),
        (b'{"text": 7}', "no text in field 'text': no field has text"),
        (
            b'{"' + b'": "", "'.join(b"%02d" % n + b"n" * 50 for n in range(10)) + b'": ""}',
            f"no text in field 'text': text is in "
            f"{', '.join(repr(f'{n:02d}' + 'n' * 38) for n in range(8))} and 2 more "
            f"(data.read.text_field names the field)",
        ),
        (b'{"text": "' + b"a" * (LIMIT + 1) + b'"}', f"longer than {LIMIT} bytes"),
        (b'{"text": "' + b"a" * 50_000_000 + b'"}', f"longer than {LIMIT} bytes"),
        (b"[" * 100_000, "not JSON: nested too deep"),
        (b"\xff\xfe\xfd not text", "not UTF-8"),
    ],
    ids=["cut", "list", "no-text", "number", "many-fields", "long", "50-MB", "deep", "bytes"],
)
def test_a_line_that_is_no_document_is_named_and_the_next_is_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n' + line + b'\n{"text": "a\\u0000b\\ud800c\\u2028d"}')
    pages, skips, _ = read(path)
    assert [text for _, text in pages] == ["first", "ab?c\u2028d"]
    assert skips == [(18, reason)]


def test_damaged_parquet_and_arrow_never_raise_and_name_what_is_lost(tmp_path: Path) -> None:
    table = pa.table(
        {
            "text": [f"Document {n}. " * 5 for n in range(300)],
            "url": [f"https://x.org/{n}" for n in range(300)],
        }
    )
    parquet, arrow = tmp_path / "a.parquet", tmp_path / "a.arrow"
    pq.write_table(table, parquet, row_group_size=100, write_page_checksum=True)
    with pa.OSFile(str(arrow), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    for path in (parquet, arrow):
        assert [text for _, text in read(path)[0]] == table["text"].to_pylist()
        whole, choose = path.read_bytes(), random.Random(0)
        for _ in range(60):
            path.write_bytes(damaged(whole, choose))
            pages, skips, _ = read(path)
            assert len(pages) <= 300
            assert skips or len(pages) == 300 or path is arrow
    parquet.write_bytes(b"")
    assert read(parquet)[1] == [(0, "empty file")]


@pytest.mark.parametrize("cut", [b"", b"\n", b"\r\n\r\n"])
def test_a_last_header_without_a_block_needs_nothing_behind_it_but_its_lines(
    tmp_path: Path, cut: bytes
) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(
        format_page(0) + b"WARC/1.0\nWARC-Type: metadata\nFold: a\n b\nContent-Length: 0\n" + cut
    )
    pages, skips, count = read(path)
    assert (len(pages), skips, count) == (1, [], 2)
    path.write_bytes(format_page(0) + b"WARC/1.0\nWARC-Type: metadata\nContent-Length: 0")
    assert [reason for _, reason in read(path)[1]] == ["truncated"]


def lying(length: int) -> bytes:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE % b"short"
    headers = (
        "WARC-Target-URI: https://example.org/9\r\nContent-Type: application/http; "
        "msgtype=response\r\n"
    )
    return record("response", http, headers, len(http) + length)


@pytest.mark.parametrize("length", [-30, -1, 40, 500, 3_000, 10**12])
@pytest.mark.parametrize("kind", ["gzip", "whole", "zstd", "bzip2", "xz", "plain"])
def test_a_record_that_lies_about_its_length_costs_itself_alone(
    tmp_path: Path, kind: str, length: int
) -> None:
    parts = compress_records(
        kind, [format_page(0), format_page(1), lying(length), format_page(2), format_page(3)]
    )
    path = tmp_path / "a.warc"
    path.write_bytes(b"".join(parts))
    pages, skips, _ = read(path)
    assert [content for _, content in pages] == [
        PAGE % f"Page number {n}.".encode() for n in range(4)
    ]
    assert len(skips) == 1
    assert skips[0][1].startswith("its header says")


def with_digests(body: bytes, said: bytes, form: str) -> bytes:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + body
    block = (
        hashlib.sha1(http).digest() if form == "WARC-Block-Digest" else hashlib.sha1(body).digest()
    )
    digest = base64.b32encode(block if not said else hashlib.sha1(said).digest()).decode()
    headers = (
        "WARC-Target-URI: https://example.org/9\r\nContent-Type: application/http; "
        "msgtype=response\r\n"
    )
    return record("response", http, f"{headers}{form}: sha1:{digest}\r\n")


@pytest.mark.parametrize("form", ["WARC-Block-Digest", "WARC-Payload-Digest"])
@pytest.mark.parametrize("policy", ["drop", "count", "ignore"])
def test_a_page_with_another_digest_is_dropped_or_counted(
    tmp_path: Path, form: str, policy: str
) -> None:
    path = tmp_path / "a.warc.gz"
    bodies = [PAGE % b"true", PAGE % b"false"]
    path.write_bytes(
        b"".join(
            compress_members(
                with_digests(bodies[0], b"", form), with_digests(bodies[1], b"x", form)
            )
        )
    )
    batches = list(
        read_pages(
            str(path),
            max_page_bytes=LIMIT,
            config=ReadConfig.model_validate({"on_digest_mismatch": policy}),
        )
    )
    kept = [payload for batch in batches for payload in batch.pages["payload"].to_pylist()]
    skipped, noted = (
        [skip.reason for batch in batches for skip in getattr(batch, name)]
        for name in ("skipped", "noted")
    )
    expected = {
        "drop": (1, [f"{form} differs"], []),
        "count": (2, [], [f"{form} differs"]),
        "ignore": (2, [], []),
    }
    assert (len(kept), skipped, noted) == expected[policy]
    assert kept == bodies[: len(kept)]


def test_wet_and_arc_are_read(tmp_path: Path) -> None:
    text = "Ein Text.\n\nMit Leerzeile\x00."
    headers = "WARC-Target-URI: https://example.org/0\r\nContent-Type: text/plain\r\n"
    wet = tmp_path / "a.warc.wet.gz"
    wet.write_bytes(
        b"".join(
            compress_members(record("warcinfo", b""), record("conversion", text.encode(), headers))
        )
    )
    assert [content for _, content in read(wet)[0]] == [text.replace("\0", "")]
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE % b"old"
    first = b"filedesc://a.arc 0.0.0.0 20140101000000 text/plain 7\n1 0 x\n\n\n"
    line = b"http://example.org/%d 1.2.3.4 20140216050221 text/html %s\n"
    good = line % (1, str(len(http)).encode()) + http + b"\n"
    lies = line % (2, b"-1") + http + b"\n" + line % (3, b"abc") + http + b"\n"
    for contents in ([first, good, lies, good], [b"".join([first, good, lies, good])]):
        arc = tmp_path / "a.arc.gz"
        arc.write_bytes(b"".join(map(gzip.compress, contents)))
        pages, skips, _ = read(arc)
        assert [content for _, content in pages] == [PAGE % b"old"] * 2
        assert [reason for _, reason in skips] == ["damaged record: its length is no number"] * 2


def test_a_bomb_and_a_page_of_100_mb_are_named_and_cost_no_memory(tmp_path: Path) -> None:
    long = format_response("https://example.org/long", b"<p>" + b"a" * 100_000_000)
    path = tmp_path / "a.warc.gz"
    path.write_bytes(
        b"".join(
            [
                *compress_members(format_page(0)),
                gzip.compress(long, 1),
                *compress_members(format_page(1)),
            ]
        )
    )
    del long
    pages, skips, _ = read(path)
    assert len(pages) == 2
    assert [reason for _, reason in skips] == [f"longer than {LIMIT} bytes"]


def test_what_cannot_be_opened_is_one_skip(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.warc")
    for name, reason in (("pipe.warc", "Not a regular file"), (".", "Is a directory")):
        path = tmp_path / name
        batches = list(read_pages(str(path), max_page_bytes=LIMIT))
        assert batches[0].skipped == [SkippedRecord(str(path), 0, f"unreadable file: {reason}")]


@pytest.mark.parametrize(
    "content", [b"PAR1", b"PAR1ab", b"ARROW1\0\0", b"ARROW1\0\0" + b"\xff" * 12 + b"ARROW1"]
)
def test_a_footer_that_lies_before_the_file_is_damage_and_no_failing_storage(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "short").write_bytes(content)
    [skip] = [
        one
        for batch in read_pages(str(tmp_path / "short"), max_page_bytes=LIMIT)
        for one in batch.skipped
    ]
    assert (skip.offset, skip.is_retryable) == (0, False), skip.reason


def test_a_loop_of_links_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(input_stream, "sleep", waits.append)
    (tmp_path / "a.warc").symlink_to(tmp_path / "a.warc")
    assert read(tmp_path / "a.warc")[1] == [
        (0, "unreadable file: Too many levels of symbolic links")
    ]
    assert waits == []


def test_a_part_that_begins_after_the_end_of_its_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.warc"
    path.write_bytes(format_page(0))
    size = path.stat().st_size
    (batch,) = read_pages(str(path), max_page_bytes=LIMIT, start=size + 10, stop=size + 90)
    assert [(skip.offset, skip.reason) for skip in batch.skipped] == [
        (size + 10, f"the file ends at byte {size}, before this part of it")
    ]
