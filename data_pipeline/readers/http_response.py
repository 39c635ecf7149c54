"""Parse the HTTP response in a record, and undo its transfer and content codings.

Named fields have one syntax in WARC records and HTTP responses (ISO 28500, 4; RFC 9112, 5).

Invariants:
- The decoded body is bounded by a limit.
- Wrong headers are tolerated: many crawlers store the decoded body under the header of the coded
  one, so a body that cannot be decoded as declared is returned unchanged.
- A coded body that ends early is returned up to its end, with a note.
"""

import io
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastwarc.stream_io import BrotliReader, GzipReader, ZstdReader
from zstandard import ZstdDecompressor, ZstdError

_FOLD = re.compile(r"\n[ \t]+")  # a value continued in the next line


def parse_header_fields(header: str) -> dict[str, str]:
    """Return the first value of each field by its lower-case name; the first line of `header` is
    skipped.
    """
    fields: dict[str, str] = {}
    for line in _FOLD.sub(" ", header.replace("\r", "")).split("\n")[1:]:
        name, colon, value = line.partition(":")
        name = name.strip().lower() if colon else ""
        if name and name not in fields:
            fields[name] = value.strip()
    return fields


_HEADER_BYTES = 1 << 16
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)?[ \t]+(\d{3})(?!\d)")
_END = re.compile(rb"\r?\n\r?\n")
_CHARSET = re.compile(r"""charset\s*=\s*["']?\s*([^\s;"',]+)""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """One HTTP response. Header names are lower case; of repeated headers the first counts."""

    status: int
    headers: dict[str, str]
    body: memoryview

    @property
    def content_type(self) -> str:
        """The media type in lower case, without parameters."""
        return self.headers.get("content-type", "").split(";", 1)[0].strip().lower()

    @property
    def charset(self) -> str:
        """The charset that the header declares, "" if it declares none."""
        found = _CHARSET.search(self.headers.get("content-type", ""))
        return found.group(1) if found else ""


def parse_response(block: bytes) -> HttpResponse | None:
    """Parse the block of a response.

    Args:
        block: Status line, headers and body.

    Returns:
        The parts; None without a status line.
    """
    status = _STATUS.match(block)
    if status is None:
        return None
    end = _END.search(block, 0, _HEADER_BYTES)
    stop, begin = end.span() if end else (min(len(block), _HEADER_BYTES),) * 2
    headers = parse_header_fields(block[:stop].decode("latin-1"))
    return HttpResponse(int(status.group(1)), headers, memoryview(block)[begin:])


_CHUNK_HEADER = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]{0,1024})?\r\n")
_READERS: dict[str, Callable[[io.BytesIO], Any]] = {
    "gzip": GzipReader,
    "x-gzip": GzipReader,
    "deflate": lambda stream: GzipReader(stream, zlib=True),
    "br": BrotliReader,
    "zstd": ZstdReader,
}
_ZLIB_CODINGS = ("gzip", "x-gzip", "deflate")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# wbits of zlib.decompressobj
_GZIP_OR_ZLIB = 47
_RAW_DEFLATE = -15
_STEP = 1 << 16
_HEAD_BYTES = 1_024
_BINARY = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")  # bytes that no charset uses for text


class BodyTooLargeError(Exception):
    """The decoded body is larger than the limit."""


@dataclass(frozen=True, slots=True)
class DecodedBody:
    """A body without its codings.

    Attributes:
        payload: the decoded bytes, or as many as there are.
        cut: evidence that bytes are missing at the end; "" if there is none.
        is_text: False if the body is coded and nothing of it can be decoded.
    """

    payload: bytes
    cut: str = ""
    is_text: bool = True


def decode_body(response: HttpResponse, limit: int) -> DecodedBody:
    """Decode the content and transfer codings of a body.

    Args:
        response: The response.
        limit: Most decoded bytes.

    Returns:
        The body, with a note where a coding was damaged or ended early.

    Raises:
        BodyTooLargeError: The decoded body is larger.
    """
    body = decode_chunked(response)
    cut = _find_cut_chunk(response)
    coding = response.headers.get("content-encoding", "").strip().lower()
    reader = _READERS.get(coding)
    if reader is None or not body:
        return DecodedBody(body, cut)
    decoded, is_whole = _read_limited_body(reader(io.BytesIO(body)), limit)
    if coding in _ZLIB_CODINGS and not (is_whole and _has_end(body, decoded)):
        decoded, is_whole = decode_zlib_members(body, limit)
    elif not decoded and body.startswith(_ZSTD_MAGIC):
        decoded, is_whole = _read_limited_body(ZstdDecompressor().stream_reader(body), limit)
    if not decoded:
        return DecodedBody(body, cut, is_text=_BINARY.search(body, 0, _HEAD_BYTES) is None)
    return DecodedBody(decoded, cut if is_whole else f"its {coding} coding is cut")


def decode_chunked(response: HttpResponse) -> bytes:
    """Decode the chunked transfer coding.

    Args:
        response: The response.

    Returns:
        The body without it.
    """
    body = bytes(response.body)
    if "chunked" not in response.headers.get("transfer-encoding", "").lower():
        return body
    joined = _join_chunks(body)
    return body if joined is None else joined


def _find_cut_chunk(response: HttpResponse) -> str:
    """Return a note if a chunked body ends inside a chunk, "" otherwise."""
    if "chunked" not in response.headers.get("transfer-encoding", "").lower():
        return ""
    body = response.body
    position = 0
    while match := _CHUNK_HEADER.match(body, position):
        end = match.end() + int(match.group(1), 16)
        if end > len(body):
            return "its last chunk is cut"
        position = end + 2
        if end == match.end():
            break
    return ""


def _has_end(body: bytes, decoded: bytes) -> bool:
    """Return whether the body ends with the trailer that gzip (RFC 1952) or zlib (RFC 1950)
    writes for this content.
    """
    end = len(decoded) & 0xFFFFFFFF
    return body[-4:] == (
        end.to_bytes(4, "little")
        if body[:2] == b"\x1f\x8b"
        else zlib.adler32(decoded).to_bytes(4, "big")
    )


def decode_zlib_members(body: bytes, limit: int) -> tuple[bytes, bool]:
    """Decode gzip, zlib or raw deflate up to its end or damage.

    Args:
        body: The coded bytes.
        limit: Most decoded bytes.

    Returns:
        The decoded bytes, and whether the end was reached.

    Raises:
        BodyTooLargeError: They are more than `limit`.
    """
    # Servers send "deflate" with and without the zlib header (RFC 9110, 8.4.1.2 notes it).
    # The lower half of a zlib header's first byte is 8.
    wbits = _RAW_DEFLATE if body[0] & 0x0F != 8 and body[:2] != b"\x1f\x8b" else _GZIP_OR_ZLIB
    parts: list[bytes] = []
    size = 0
    rest = body
    is_whole = False
    while rest:
        inflate = zlib.decompressobj(wbits)
        try:
            for begin in range(0, len(rest), _STEP):
                # One byte more than allowed shows that a body is too large.
                parts.append(inflate.decompress(rest[begin : begin + _STEP], limit - size + 1))
                size += len(parts[-1])
                if size > limit:
                    raise BodyTooLargeError
                if inflate.eof:
                    break
        except zlib.error:  # damage, or bytes that some servers append
            break
        is_whole = inflate.eof
        rest = inflate.unused_data + rest[begin + _STEP :] if inflate.eof else b""
    return b"".join(parts), is_whole


def _read_limited_body(stream: Any, limit: int) -> tuple[bytes, bool]:
    """Return the bytes of a stream up to its end or failure, and whether it did not fail."""
    parts: list[bytes] = []
    size = 0
    try:
        while part := stream.read(65_536):
            parts.append(part)
            size += len(part)
            if size > limit:
                raise BodyTooLargeError
    except (OSError, EOFError, ValueError, ZstdError):
        return b"".join(parts), False
    return b"".join(parts), True


def _join_chunks(body: bytes) -> bytes | None:
    """Return the chunks of a chunked body joined (RFC 9112, 7.1), with a cut last one; None if
    it is not chunked.
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
