"""The same few records in every compression that the reader knows, so that tests can damage
them.
"""

import bz2
import gzip
import lzma

import pyarrow as pa
import zstandard

from tests.helpers.warc_records import PAGE, format_page, format_response, record

DICTIONARY = zstandard.train_dictionary(
    400, [format_page(number) for number in range(300)]
).as_bytes()


def build_records() -> list[bytes]:
    """Eight pages, one of them long, among records that are none."""
    long = format_response("https://example.org/6", PAGE % (b"long text " * 3_000))
    first = [record("warcinfo", b"software: x\r\n"), *map(format_page, range(6))]
    return [*first, record("request", b"GET /\r\n\r\n"), long, format_page(7)]


def compress_records(kind: str, contents: list[bytes]) -> list[bytes]:
    """The records as members: "gzip", "whole" (one gzip member), "zstd", "dictionary", "lz4",
    "bzip2", "xz" or "plain".
    """
    if kind == "gzip":
        return [gzip.compress(content, mtime=0) for content in contents]
    if kind == "whole":
        return [gzip.compress(b"".join(contents), mtime=0)]
    if kind == "zstd":
        return [
            zstandard.ZstdCompressor(write_checksum=True).compress(content) for content in contents
        ]
    if kind == "dictionary":
        packer = zstandard.ZstdCompressor(
            dict_data=zstandard.ZstdCompressionDict(DICTIONARY), write_checksum=True
        )
        first = b"\x5d\x2a\x4d\x18" + len(DICTIONARY).to_bytes(4, "little") + DICTIONARY
        return [first + packer.compress(contents[0]), *map(packer.compress, contents[1:])]
    if kind == "lz4":
        return [pa.compress(content, codec="lz4", asbytes=True) for content in contents]
    if kind == "bzip2":
        return [bz2.compress(content) for content in contents]
    if kind == "xz":
        return [lzma.compress(content) for content in contents]
    return contents
