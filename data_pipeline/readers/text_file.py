"""Read a file, plain or compressed, as one document: a text, or a saved page of HTML.

A text is UTF-8, with or without a byte order mark. A page may have any charset, and is extracted as
a page of a crawl is.
"""

from collections.abc import Iterator

from llmsys.data_pipeline.readers.charset import decide_charset
from llmsys.data_pipeline.readers.compressed_members import CompressedMembers, DamagedMember
from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord
from llmsys.data_pipeline.readers.row_reader import build_document_page

_MARK = b"\xef\xbb\xbf"


def read_text_file(
    source: InputStream, magic: bytes, max_text_bytes: int
) -> Iterator[Page | SkippedRecord]:
    """Read a file of one document.

    Args:
        source: The file.
        magic: Its compression.
        max_text_bytes: A longer text is skipped.

    Yields:
        The document, or the reason why the file is none.
    """
    reason = f"longer than {max_text_bytes} bytes: split it, one document per file"
    content = read_content(source, magic, max_text_bytes + len(_MARK), reason)
    if isinstance(content, SkippedRecord):
        yield content
        return
    try:
        text = content.removeprefix(_MARK).decode()
    except UnicodeDecodeError as error:
        yield SkippedRecord(
            source.path, error.start, "not UTF-8: convert it, such as with iconv -t UTF-8"
        )
        return
    values = {"text": text, "url": "", "id": "", "date": ""}
    found = build_document_page(0, values, max_text_bytes, "text")
    yield found if isinstance(found, Page) else SkippedRecord(source.path, 0, found)


def read_html_file(
    source: InputStream, magic: bytes, max_page_bytes: int
) -> Iterator[Page | SkippedRecord]:
    """Read a file of one page.

    Args:
        source: The file.
        magic: Its compression.
        max_page_bytes: A longer page is skipped.

    Yields:
        The page, without URL and date, or the reason why the file is none.
    """
    reason = f"page longer than {max_page_bytes} bytes: raise data.read.max_page_bytes"
    content = read_content(source, magic, max_page_bytes, reason)
    if isinstance(content, SkippedRecord):
        yield content
        return
    charset = decide_charset(content, "")
    yield Page(
        offset=0,
        url="",
        date="",
        payload=content,
        charset=charset.codec,
        content_type="text/html",
    )


def read_content(
    source: InputStream, magic: bytes, limit: int, reason: str
) -> bytes | SkippedRecord:
    """Read all of a file.

    Args:
        source: The file.
        magic: Its compression.
        limit: Maximum number of decoded bytes.
        reason: Why a longer file is skipped.

    Returns:
        The decoded bytes, or the loss.
    """
    too_long = SkippedRecord(source.path, 0, reason)
    if not magic:
        return too_long if source.size > limit else source.read_block(0, source.size)
    content = bytearray()
    for piece in CompressedMembers(source, magic, bool).iter_chunks(0):
        # A part of a document is another document.
        if isinstance(piece, DamagedMember):
            return SkippedRecord(source.path, piece.offset, piece.reason)
        content += piece.data
        if len(content) > limit:
            return too_long
    return bytes(content)
