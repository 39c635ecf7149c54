"""Read the pages of one file of any supported format: the entry point of this package.

Formats: WARC, WET, ARC, JSON lines, CSV, TSV, parquet, Arrow, plain text, HTML, PDF; all but
parquet and Arrow may be compressed with gzip, zstd, lz4, bzip2 or xz; a path or a URL. A zip
archive is read member by member. The format is detected from the first bytes, and from the name
only where they do not decide.

Invariants:
- No input raises. A failure is a `SkippedRecord` with file, offset and reason, and reading
  continues after it.
"""

import os
from collections.abc import Iterator
from functools import partial

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers.compressed_members import (
    CompressedMembers,
    MemberChunk,
    detect_compression,
)
from llmsys.data_pipeline.readers.input_stream import (
    InputStream,
    ReadError,
    format_file_name,
    open_input_stream,
    remove_compression_suffix,
)
from llmsys.data_pipeline.readers.page_batch import (
    NonPageRecord,
    Page,
    PageBatch,
    PageCollector,
    SkippedRecord,
)
from llmsys.data_pipeline.readers.warc_pages import PageExtractor
from llmsys.data_pipeline.readers.warc_records import ArcDialect, iter_dialect_records, iter_records
from llmsys.log import redact_secrets, redact_url
from llmsys.storage.paths import is_remote

_BY_NAME = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".arc": "arc",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".txt": "text",
    ".md": "text",
    ".pdf": "pdf",
    ".html": "html",
    ".htm": "html",
}
_HEAD = 4_096
# Formats that are named and not read, and what to do with them.
_UNREAD = {
    "zip": "a zip archive inside another or inside a compression: unpack it",
    "array": "a JSON array: write one object a line, such as with jq -c '.[]'",
}


def read_pages(
    path: str,
    *,
    max_page_bytes: int,
    batch_pages: int = 128,
    config: ReadConfig | None = None,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[PageBatch]:
    """Yield the pages of one file in batches.

    Args:
        path: a path or URL.
        max_page_bytes: longer pages and texts are skipped, before and after their codings are
            undone.
        batch_pages: pages per batch; a batch also ends when its pages take 32 MiB.
        config: names of fields, policy on wrong digests and cut pages, number of read attempts.
        start: byte at which to begin; with `stop`, a range from `split_file`.
        stop: byte at which to end; None for the end of the file.

    Yields:
        At least one batch, in file order; a batch of damage only has no pages.
    """
    config = config or ReadConfig()
    name = redact_url(path) if is_remote(path) else format_file_name(path)
    pages = PageCollector(name, batch_pages)
    seen = False
    try:
        with open_input_stream(path, config.max_attempts, start, stop) as source:
            for found in _iter_file_records(source, max_page_bytes, config):
                seen = True
                if pages.add_record(found):
                    yield pages.take_batch(source.progress)
            if not seen:
                ends = f"the file ends at byte {source.size}, before this part of it"
                reason = ends if 0 < start >= source.size else "empty file"
                pages.add_record(SkippedRecord(name, start, reason))
    except ReadError as error:
        pages.add_record(SkippedRecord(name, error.position, str(error), is_retryable=True))
    except OSError as error:
        # Permissions and remote files can change without a change of the file's stamp.
        is_retryable = is_remote(path) or isinstance(error, PermissionError)
        reason = redact_secrets(f"unreadable file: {_format_os_error(error)}")
        pages.add_record(SkippedRecord(name, 0, reason, is_retryable=is_retryable))
    yield pages.take_batch(source.progress if seen else 0)


def _format_os_error(error: OSError) -> str:
    """Return the reason of a system error; some storages only name the path."""
    return error.strerror or (
        "No such file or directory" if isinstance(error, FileNotFoundError) else str(error)
    )


def _iter_file_records(
    source: InputStream, limit: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord | NonPageRecord]:
    if source.size == 0:
        return
    if config.reader is not None:
        from llmsys.data_pipeline.readers.python_reader import read_with_python

        yield from read_with_python(source, limit, config.reader)
        return
    magic = detect_compression(source)
    kind = _detect_format(source, magic)
    if kind == "zip" and not magic:
        from llmsys.data_pipeline.readers.zip_archive import read_zip

        yield from read_zip(source, partial(_iter_member_records, limit=limit, config=config))
        return
    yield from _iter_format_records(source, limit, config, kind, magic)


def _iter_member_records(
    source: InputStream, limit: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord | NonPageRecord]:
    """Yield the records of a member of a zip archive."""
    magic = detect_compression(source)
    kind = _detect_format(source, magic)
    # An archive has other files too, such as pictures: they are no damaged crawl files.
    if kind == "warc" and not _is_crawl_file(source, magic):
        yield SkippedRecord(source.path, 0, f"no format that is read: {', '.join(_BY_NAME)}, .warc")
        return
    yield from _iter_format_records(source, limit, config, kind, magic)


def _is_crawl_file(source: InputStream, magic: bytes) -> bool:
    named = remove_compression_suffix(source.path).endswith((".warc", ".wet"))
    return named or _read_decoded_head(source, magic).startswith(b"WARC/")


def _iter_format_records(
    source: InputStream, limit: int, config: ReadConfig, kind: str, magic: bytes
) -> Iterator[Page | SkippedRecord | NonPageRecord]:
    """Yield the records of a file of a known format and compression."""
    if kind in _UNREAD:
        yield SkippedRecord(source.path, 0, _UNREAD[kind])
        return
    extractor = PageExtractor(source.path, limit, config)
    if kind == "lines":
        from llmsys.data_pipeline.readers.json_lines import read_json_lines

        yield from read_json_lines(source, magic, limit, config)
    elif kind in ("parquet", "arrow") and magic:
        yield SkippedRecord(
            source.path, 0, f"a {kind} file inside another compression: decompress it first"
        )
    elif kind == "parquet":
        from llmsys.data_pipeline.readers.parquet import read_parquet

        yield from read_parquet(source, limit, config)
    elif kind == "arrow":
        from llmsys.data_pipeline.readers.arrow import read_arrow

        yield from read_arrow(source, limit, config)
    elif kind == "csv":
        from llmsys.data_pipeline.readers.csv_rows import read_csv

        yield from read_csv(source, magic, limit, config)
    elif kind == "text":
        from llmsys.data_pipeline.readers.text_file import read_text_file

        yield from read_text_file(source, magic, limit)
    elif kind == "html":
        from llmsys.data_pipeline.readers.text_file import read_html_file

        yield from read_html_file(source, magic, limit)
    elif kind == "pdf":
        from llmsys.data_pipeline.readers.pdf_text import read_pdf_file

        yield from read_pdf_file(source, magic, limit, config.pdf)
    elif kind == "arc":
        yield from iter_dialect_records(
            source, ArcDialect(), extractor.extract_page, extractor.keep_bytes
        )
    else:
        yield from iter_records(source, extractor.extract_page, extractor.keep_bytes)


def _detect_format(source: InputStream, magic: bytes) -> str:
    """Return the format of a file by its first bytes, or by its name if they do not decide."""
    head = _read_decoded_head(source, magic)
    if head.startswith(b"WARC/"):
        return "warc"
    if head.startswith(b"PAR1"):
        return "parquet"
    # A file's magic bytes, or the marker before the first message of a stream.
    if head.startswith((b"ARROW1", b"\xff\xff\xff\xff")):
        return "arrow"
    if head.startswith(b"filedesc:"):
        return "arc"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "zip"
    if head.startswith(b"%PDF-"):
        return "pdf"
    # A byte order mark may come before the first line.
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"{"):
        return "lines"
    end = os.path.splitext(remove_compression_suffix(source.path))[1]
    named = _BY_NAME.get(end, "warc")
    return "array" if named == "lines" and _is_array(start) else named


def _is_array(head: bytes) -> bool:
    """Return whether a file of JSON begins as an array over several lines. Where the second line is
    an object by itself, the first one is a damaged row, and the others are read.
    """
    first, second, *_ = [line.strip() for line in head.splitlines()] + [b"", b""]
    return first == b"[" and not (second.startswith(b"{") and second.endswith(b"}"))


def _read_decoded_head(source: InputStream, magic: bytes) -> bytes:
    if not magic:
        return source.read_block(0, _HEAD)
    first = next(CompressedMembers(source, magic, bool).iter_chunks(0), None)
    return first.data[:_HEAD] if isinstance(first, MemberChunk) else b""
