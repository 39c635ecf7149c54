"""Small WARC files made of bytes, so that tests can damage them where they want."""

import gzip

PAGE = b"<!DOCTYPE html><html><body><p>%s</p></body></html>"


def format_response(
    url: str,
    body: bytes,
    *,
    content_type: str = "text/html",
    status: str = "200 OK",
    headers: str = "",
) -> bytes:
    """One response record, not compressed."""
    http = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{headers}\r\n".encode() + body
    address = f"WARC-Target-URI: {url}\r\n"
    return record(
        "response", http, f"{address}Content-Type: application/http; msgtype=response\r\n"
    )


def record(kind: str, block: bytes, headers: str = "", length: int | None = None) -> bytes:
    """One record of any type, not compressed; `length` is what the header says when it lies."""
    said = len(block) if length is None else length
    return (
        (
            f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Date: 2024-05-01T12:00:00Z\r\n"
            f"WARC-Record-ID: <urn:uuid:00000000-0000-0000-0000-000000000000>\r\n"
            f"{headers}Content-Length: {said}\r\n\r\n"
        ).encode()
        + block
        + b"\r\n\r\n"
    )


def format_page(number: int) -> bytes:
    """A response with its own page."""
    return format_response(
        f"https://example.org/{number}", PAGE % f"Page number {number}.".encode()
    )


def compress_members(*records: bytes) -> list[bytes]:
    """Each record as a separate gzip member, as crawlers write them."""
    return [gzip.compress(content, mtime=0) for content in records]
