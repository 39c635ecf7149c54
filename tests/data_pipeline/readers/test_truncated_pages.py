"""Laws of pages whose end is missing: what is there is read, and that something is missing is
said, as configured.
"""

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers.page_reader import read_pages
from tests.helpers.warc_records import compress_members, format_response, record

BODY = (
    b"<html><body>"
    + b"".join(b"<p>Paragraph %d of a long page.</p>" % n for n in range(30_000))
    + b"</body></html>"
)


def _deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


PACK: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "members": ("gzip", lambda body: gzip.compress(body[:50_000]) + gzip.compress(body[50_000:])),
    "zlib": ("deflate", zlib.compress),
    "raw deflate": ("deflate", _deflate),
    "zstd": ("zstd", zstandard.ZstdCompressor().compress),
    "br": ("br", lambda body: pytest.importorskip("brotli").compress(body, quality=1)),
}


def read(
    folder: Path, content: bytes, policy: str = "count"
) -> tuple[list[bytes], list[str], list[str]]:
    path = folder / "a.warc.gz"
    path.write_bytes(b"".join(compress_members(content)))
    batches = list(
        read_pages(
            str(path),
            max_page_bytes=1 << 22,
            config=ReadConfig.model_validate({"on_truncation": policy}),
        )
    )
    payloads = [payload for batch in batches for payload in batch.pages["payload"].to_pylist()]
    return payloads, *(
        [skip.reason for one in batches for skip in getattr(one, name)]
        for name in ("skipped", "noted")
    )  # type: ignore[return-value]


def coded(body: bytes, coding: str) -> bytes:
    return format_response("https://example.org/1", body, headers=f"Content-Encoding: {coding}\r\n")


@pytest.mark.parametrize("kind", PACK)
def test_a_coded_body_is_read_and_a_cut_one_up_to_its_cut(tmp_path: Path, kind: str) -> None:
    coding, pack = PACK[kind]
    packed = pack(BODY)
    assert read(tmp_path, coded(packed, coding)) == ([BODY], [], [])
    reason = f"its {coding} coding is cut"
    for end in (len(packed) * 2 // 3, len(packed) - 1):
        payloads, skipped, noted = read(tmp_path, coded(packed[:end], coding))
        assert (skipped, noted) == ([], [reason]), end
        assert BODY.startswith(payloads[0])
        assert len(payloads[0]) > len(BODY) // 5
    assert read(tmp_path, coded(packed[: len(packed) // 2], coding), "drop") == ([], [reason], [])
    payloads, skipped, noted = read(tmp_path, coded(packed[: len(packed) // 2], coding), "ignore")
    assert (len(payloads), skipped, noted) == (1, [], [])


def test_what_follows_a_whole_gzip_body_is_no_cut(tmp_path: Path) -> None:
    payloads, skipped, noted = read(tmp_path, coded(gzip.compress(BODY) + b"garbage", "gzip"))
    assert (payloads, skipped, noted) == ([BODY], [], [])


def test_a_body_that_is_not_coded_as_its_header_says_is_whole(tmp_path: Path) -> None:
    for coding in ("gzip", "deflate", "br", "zstd"):
        assert read(tmp_path, coded(BODY, coding)) == ([BODY], [], [])


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip"])
def test_a_coded_body_of_which_nothing_can_be_decoded_is_no_page(
    tmp_path: Path, coding: str
) -> None:
    payload = b"\x1f\x8b\x08\x00" + bytes(range(256)) * 8
    assert read(tmp_path, coded(payload, coding)) == ([], [f"damaged {coding} coding"], [])


@pytest.mark.parametrize("policy", ["count", "drop", "ignore"])
@pytest.mark.parametrize("kind", ["response", "resource", "conversion"])
def test_warc_truncated_is_noticed_in_every_record_that_can_be_a_page(
    tmp_path: Path, kind: str, policy: str
) -> None:
    headers = "WARC-Target-URI: https://example.org/1\r\nWARC-Truncated: length\r\nContent-Type: "
    page = b"<html><body><p>Half a</p>"
    made = {
        "response": (
            "application/http; msgtype=response",
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + page,
        ),
        "resource": ("text/html", page),
        "conversion": ("text/plain", b"Half a"),
    }
    media_type, block = made[kind]
    payloads, skipped, noted = read(
        tmp_path, record(kind, block, f"{headers}{media_type}\r\n"), policy
    )
    reason = ["WARC-Truncated: length"]
    expected = {"count": (1, [], reason), "drop": (0, reason, []), "ignore": (1, [], [])}
    assert (len(payloads), skipped, noted) == expected[policy]


def test_a_cut_chunk_is_noticed_and_a_missing_last_one_is_not(tmp_path: Path) -> None:
    headers = "Transfer-Encoding: chunked\r\n"
    page = b"<html><p>one</p></html>"
    chunks = b"%x\r\n%s\r\n" % (len(page), page)
    for end in (b"", b"0\r\n\r\n"):
        assert read(
            tmp_path, format_response("https://example.org/1", chunks + end, headers=headers)
        ) == (
            [page],
            [],
            [],
        )
    payloads, skipped, noted = read(
        tmp_path, format_response("https://example.org/1", chunks[:-9], headers=headers)
    )
    assert (payloads, skipped, noted) == ([page[:-7]], [], ["its last chunk is cut"])


def test_a_page_that_is_cut_twice_has_both_notes(tmp_path: Path) -> None:
    block = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Encoding: gzip\r\n\r\n"
        + gzip.compress(BODY)[:-900]
    )
    headers = (
        "WARC-Target-URI: https://example.org/1\r\nWARC-Truncated: time\r\nContent-Type: "
        "application/http\r\n"
    )
    _, _, noted = read(tmp_path, record("response", block, headers))
    assert noted == ["WARC-Truncated: time", "its gzip coding is cut"]
