"""Read a plain text file as one document.

Reads UTF-8, with or without a byte order mark.
"""

from collections.abc import Iterator

from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord
from llmsys.data_pipeline.readers.row_reader import build_document_page

_MARK = b"\xef\xbb\xbf"


def read_text_file(source: InputStream, max_text_bytes: int) -> Iterator[Page | SkippedRecord]:
    """Yield the document of a file, or the reason why it is none."""
    if source.size > max_text_bytes + len(_MARK):
        yield SkippedRecord(
            source.path, 0, f"longer than {max_text_bytes} bytes: split it, one document per file"
        )
        return
    try:
        text = source.read_block(0, source.size).removeprefix(_MARK).decode()
    except UnicodeDecodeError as error:
        yield SkippedRecord(
            source.path, error.start, "not UTF-8: convert it, such as with iconv -t UTF-8"
        )
        return
    values = {"text": text, "url": "", "id": "", "date": ""}
    found = build_document_page(0, values, max_text_bytes, "text")
    yield found if isinstance(found, Page) else SkippedRecord(source.path, 0, found)
