"""Undoes HTTP transfer and content codings, bounded by the size of the result and forgiving about headers that lie.

Many crawlers store the decoded body and keep the header of the coded one; a body that cannot be decoded as its header
says is given back as it is.
"""

import io
import re
from collections.abc import Callable
from typing import Any

from fastwarc.stream_io import BrotliReader, GzipReader, ZstdReader

from data_pipeline.readers.http import Response

_CHUNK_HEADER = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]{0,1024})?\r\n")
_READERS: dict[str, Callable[[io.BytesIO], Any]] = {
    "gzip": GzipReader,
    "x-gzip": GzipReader,
    "deflate": lambda stream: GzipReader(stream, zlib=True),
    "br": BrotliReader,
    "zstd": ZstdReader,
}


class TooLongError(Exception):
    """The decoded body is longer than the limit."""


def decode_body(response: Response, limit: int) -> bytes:
    """The body without its codings, at most `limit` bytes.

    Raises:
        TooLongError: if decoding gives more.
    """
    body = without_chunks(response)
    reader = _READERS.get(response.headers.get("content-encoding", "").strip().lower())
    if reader is None or not body:
        return body
    try:
        decoded = _read(reader(io.BytesIO(body)), limit)
    except (OSError, EOFError, ValueError):
        return body
    return decoded or body


def without_chunks(response: Response) -> bytes:
    """The body without its transfer coding, as it is when it has none."""
    body = bytes(response.body)
    if "chunked" not in response.headers.get("transfer-encoding", "").lower():
        return body
    joined = _joined(body)
    return body if joined is None else joined


def _read(stream: Any, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := stream.read(65_536):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise TooLongError
    return b"".join(parts)


def _joined(body: bytes) -> bytes | None:
    """The chunks of a chunked body put together (RFC 9112, 7.1), None if it is not chunked. A cut last chunk is
    kept.
    """
    parts: list[bytes] = []
    position = 0
    while match := _CHUNK_HEADER.match(body, position):
        size = int(match.group(1), 16)
        start = match.end()
        parts.append(body[start : start + size])
        position = start + size + 2
        if size == 0:
            break
    return b"".join(parts) if parts else None
