"""Laws of the WARC reader: whole pages are delivered in order, everything else is named, nothing
stops the rest.
"""

import gzip
import zlib
from pathlib import Path
from typing import Any

import pytest

from llmsys.data_pipeline.readers.page_batch import PAGE_SCHEMA, PageBatch, SkippedRecord
from llmsys.data_pipeline.readers.page_reader import read_pages
from tests.helpers.warc_records import PAGE, compress_members, format_page, format_response, record

LIMIT = 100_000


def read(path: Path, **options: Any) -> tuple[list[str], list[SkippedRecord], list[PageBatch]]:
    batches = list(read_pages(str(path), **{"max_page_bytes": LIMIT, **options}))
    urls = [url for batch in batches for url in batch.pages["url"].to_pylist()]
    return urls, [skip for batch in batches for skip in batch.skipped], batches


def numbers(urls: list[str]) -> list[int]:
    return [int(url.rsplit("/", 1)[1]) for url in urls]


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("packed", [True, False], ids=["gzip", "plain"])
def test_pages_come_in_file_order_with_their_offsets(tmp_path: Path, packed: bool) -> None:
    records = [
        record("warcinfo", b"software: x\r\n"),
        format_page(0),
        record("request", b"GET /\r\n"),
        format_page(1),
        format_page(2),
    ]
    parts = compress_members(*records) if packed else records
    path = written(tmp_path / "a.warc", b"".join(parts))
    urls, skipped, batches = read(path)
    assert numbers(urls) == [0, 1, 2]
    assert skipped == []
    assert batches[0].pages.schema == PAGE_SCHEMA
    assert sum(batch.records for batch in batches) == 5
    starts = [sum(map(len, parts[:number])) for number in (1, 3, 4)]
    assert batches[0].pages["offset"].to_pylist() == starts
    assert batches[-1].position == path.stat().st_size
    assert batches[0].pages["payload"][0].as_py() == PAGE % b"Page number 0."


@pytest.mark.parametrize("batch_pages", [1, 2, 3, 100])
def test_batch_size_changes_nothing_but_the_batches(tmp_path: Path, batch_pages: int) -> None:
    path = written(tmp_path / "a.warc.gz", b"".join(compress_members(*map(format_page, range(7)))))
    urls, _, batches = read(path, batch_pages=batch_pages)
    assert numbers(urls) == list(range(7))
    assert max(batch.pages.num_rows for batch in batches) == min(batch_pages, 7)


def test_a_gzip_file_cut_anywhere_gives_all_whole_records_and_says_truncated(
    tmp_path: Path,
) -> None:
    parts = compress_members(*map(format_page, range(3)))
    whole = b"".join(parts)
    ends = [sum(map(len, parts[: number + 1])) for number in range(3)]
    for cut in sorted({*range(1, len(whole), 3), *ends}):
        urls, skipped, _ = read(written(tmp_path / "cut.warc.gz", whole[:cut]))
        delivered = sum(end <= cut for end in ends)
        assert numbers(urls)[:delivered] == list(range(delivered)), cut
        if cut in ends:
            assert skipped == [], cut
        else:
            start = ends[delivered - 1] if delivered else 0
            assert [(skip.offset, skip.reason) for skip in skipped] == [(start, "truncated")], cut


def test_a_plain_file_cut_in_a_page_says_truncated(tmp_path: Path) -> None:
    path = written(tmp_path / "cut.warc", format_page(0) + format_page(1)[:-20])
    urls, skipped, _ = read(path)
    assert numbers(urls) == [0]
    assert skipped == [SkippedRecord(str(path), len(format_page(0)), "truncated")]


@pytest.mark.parametrize(
    "garbage", [b"garbage\r\n" * 40, b"\0" * 500, b"\x1f\x8b\x08\x00not gzip after all", b"x"]
)
def test_garbage_between_members_costs_no_page(tmp_path: Path, garbage: bytes) -> None:
    parts = compress_members(*map(format_page, range(4)))
    path = written(tmp_path / "a.warc.gz", b"".join([*parts[:2], garbage, *parts[2:]]))
    urls, skipped, _ = read(path)
    assert numbers(urls) == [0, 1, 2, 3]
    assert [skip.offset for skip in skipped] == [len(parts[0] + parts[1])]
    assert skipped[0].reason.startswith("damaged")


def test_a_flipped_byte_costs_its_own_page_only(tmp_path: Path) -> None:
    parts = compress_members(*map(format_page, range(4)))
    for where in (30, len(parts[1]) // 2, len(parts[1]) - 6):
        damaged = bytearray(parts[1])
        damaged[where] ^= 0x55
        path = written(tmp_path / "a.warc.gz", parts[0] + bytes(damaged) + parts[2] + parts[3])
        urls, skipped, _ = read(path)
        assert set(numbers(urls)) >= {0, 2, 3}, where
        assert [skip.offset for skip in skipped] == [len(parts[0])], where


def test_a_record_that_lies_about_its_length_costs_no_other_page(tmp_path: Path) -> None:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE % b"short"
    headers = (
        "WARC-Target-URI: https://example.org/9\r\nContent-Type: application/http; "
        "msgtype=response\r\n"
    )
    path = written(
        tmp_path / "a.warc",
        format_page(0) + record("response", http, headers, len(http) - 30) + format_page(1),
    )
    urls, skipped, _ = read(path)
    assert {0, 1} <= set(numbers(urls))
    assert len(skipped) == 1
    assert skipped[0].reason == "its header says another length than it has"


def test_one_gzip_member_around_all_records_is_read_and_its_cut_noticed(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(map(format_page, range(50))), mtime=0)
    urls, skipped, _ = read(written(tmp_path / "a.warc.gz", whole))
    assert (numbers(urls), skipped) == (list(range(50)), [])
    urls, skipped, _ = read(written(tmp_path / "a.warc.gz", whole[: len(whole) * 3 // 4]))
    assert numbers(urls) == list(range(len(urls)))
    assert [skip.reason for skip in skipped] == ["truncated"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            format_response("http://x.org/", b"GIF89a", content_type="image/gif"),
            "not HTML: image/gif",
        ),
        (
            format_response("http://x.org/", b"%PDF-1.4 \0\1\2"),
            "not HTML: application/pdf in spite of its header",
        ),
        (format_response("http://x.org/", b" \r\n "), "empty page"),
        (format_response("http://x.org/", b"<p>moved", status="301 Moved"), "HTTP status 301"),
        (format_response("http://x.org/", b"<p>" + b"a" * LIMIT), f"longer than {LIMIT} bytes"),
        (
            format_response(
                "http://x.org/",
                zlib.compress(b"<p>" + b"a" * LIMIT),
                headers="Content-Encoding: deflate\r\n",
            ),
            f"longer than {LIMIT} bytes",
        ),
        (
            record("response", b"HTTP/1.1 200 OK\r\n\r\n<p>", "Content-Type: application/http\r\n"),
            "no WARC-Target-URI",
        ),
        (
            record("response", b"<p>", "WARC-Target-URI: dns:x.org\r\nContent-Type: text/dns\r\n"),
            "no HTTP response",
        ),
    ],
    ids=["image", "pdf", "empty", "redirect", "long", "bomb", "no-url", "no-http"],
)
def test_what_is_no_page_is_named_and_stops_nothing(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    parts = compress_members(format_page(0), content, format_page(1))
    path = written(tmp_path / "a.warc.gz", b"".join(parts))
    urls, skipped, _ = read(path)
    assert numbers(urls) == [0, 1]
    assert skipped == [SkippedRecord(str(path), len(parts[0]), reason)]


def test_codings_are_undone_and_headers_that_lie_are_forgiven(tmp_path: Path) -> None:
    body = PAGE % b"coded"
    chunked = (
        b"5\r\n"
        + body[:5]
        + b"\r\n"
        + f"{len(body) - 5:x}".encode()
        + b"\r\n"
        + body[5:]
        + b"\r\n0\r\n\r\n"
    )
    contents = [
        format_response(
            "http://x.org/0", gzip.compress(body), headers="Content-Encoding: gzip\r\n"
        ),
        format_response(
            "http://x.org/1", zlib.compress(body), headers="Content-Encoding: deflate\r\n"
        ),
        format_response("http://x.org/2", chunked, headers="Transfer-Encoding: chunked\r\n"),
        format_response(
            "http://x.org/3",
            body,
            headers="Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        ),
    ]
    _, skipped, batches = read(
        written(tmp_path / "a.warc.gz", b"".join(compress_members(*contents)))
    )
    assert skipped == []
    assert batches[0].pages["payload"].to_pylist() == [body] * 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"<html>no warc</html>", "damaged record"),
        (b"\x1f\x8b\x08\x00", "truncated"),
    ],
    ids=["empty", "html", "four-bytes"],
)
def test_a_file_without_records_is_one_skip(tmp_path: Path, content: bytes, reason: str) -> None:
    urls, skipped, batches = read(written(tmp_path / "a.warc.gz", content))
    assert urls == []
    assert len(batches) == 1
    assert [skip.offset for skip in skipped] == [0]
    assert skipped[0].reason.startswith(reason)


def test_a_folder_or_a_missing_file_is_one_skip(tmp_path: Path) -> None:
    assert read(tmp_path)[1] == [SkippedRecord(str(tmp_path), 0, "unreadable file: Is a directory")]
    missing = tmp_path / "none.warc.gz"
    assert read(missing)[1] == [
        SkippedRecord(str(missing), 0, "unreadable file: No such file or directory")
    ]


CHINESE = (
    "<title>数据</title><p>这是一个中文网页，用来测试编码的检测。数据管道需要处理各种各样的文字。</p>"
    * 3
)
JAPANESE = (
    "<title>日本語</title><p>これは日本語のページです。文字コードの検出を試験します。漢字とかなが混ざっています。</p>"
    * 3
)
RUSSIAN = (
    "<p>Это страница на русском языке, которая нужна для проверки определения кодировки текста.</p>"
    * 3
)
FRENCH = "<p>Voilà une page écrite en français, où l’on a mis des accents : é, è, à, ç.</p>" * 3


@pytest.mark.parametrize(
    ("text", "codec", "header", "meta"),
    [
        (CHINESE, "gbk", "gb2312", ""),
        (CHINESE, "gbk", "", "gbk"),
        (CHINESE, "gbk", "iso-8859-1", ""),
        (CHINESE, "gbk", "utf-8", "gbk"),
        (CHINESE, "big5", "big5", ""),
        (CHINESE, "utf-8", "gbk", "gbk"),
        (CHINESE, "utf-16", "", ""),
        (CHINESE, "utf-16-le", "", ""),
        (JAPANESE, "shift_jis", "", "shift_jis"),
        (JAPANESE, "euc_jp", "iso-8859-1", "euc-jp"),
        (JAPANESE, "iso2022_jp", "iso-2022-jp", ""),
        (JAPANESE, "utf-8-sig", "shift_jis", ""),
        (RUSSIAN, "cp1251", "windows-1251", ""),
        (RUSSIAN, "koi8-r", "", "koi8-r"),
        (FRENCH, "cp1252", "iso-8859-1", ""),
        (FRENCH, "cp1252", "utf-8", ""),
        (FRENCH, "utf-8", "no-such-charset", ""),
    ],
)
def test_the_charset_that_is_found_decodes_the_page(
    tmp_path: Path, text: str, codec: str, header: str, meta: str
) -> None:
    if "big5" in codec:
        text = (
            text.replace("这", "這")
            .replace("个", "個")
            .replace("来", "來")
            .replace("测试编码", "測試編碼")
        )
        text = (
            text.replace("网页", "網頁")
            .replace("检测", "檢測")
            .replace("数据", "數據")
            .replace("处", "處")
        )
        text = text.replace("样", "樣").replace("种", "種").replace("管道需要", "管道需要")
    declared = (
        f'<meta http-equiv="Content-Type" content="text/html; charset={meta}">' if meta else ""
    )
    html = f"<html><head>{declared}</head><body>{text}</body></html>"
    kind = f"text/html; charset={header}" if header else "text/html"
    content = format_response("http://x.org/0", html.encode(codec, "ignore"), content_type=kind)
    _, skipped, batches = read(written(tmp_path / "a.warc.gz", b"".join(compress_members(content))))
    assert skipped == []
    row = batches[0].pages.to_pylist()[0]
    assert row["payload"].decode(row["charset"], "replace").lstrip("\ufeff") == html.encode(
        codec, "ignore"
    ).decode(codec).lstrip("\ufeff")


def test_a_few_damaged_bytes_do_not_change_the_charset(tmp_path: Path) -> None:
    html = f"<html><body>{CHINESE}</body></html>".encode()
    content = format_response("http://x.org/0", html[:-20] + b"\xff" + html[-20:])
    _, _, batches = read(written(tmp_path / "a.warc.gz", b"".join(compress_members(content))))
    assert batches[0].pages["charset"].to_pylist() == ["utf-8"]
