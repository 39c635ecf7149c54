"""Read documents from JSON lines, plain or compressed.

Reads decoded bytes; yields one page with text per line.

Invariants:
- Only a newline ends a line, because JSON strings may hold U+2028 and U+0085.
- The offset of a document is the number of decoded bytes before its line.
- Damage in the compression loses the line that it cuts, not the following ones.
"""

import json
from collections.abc import Iterator
from typing import Any

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.readers.charset import can_decode
from llmsys.data_pipeline.readers.compressed_members import DamagedMember
from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord
from llmsys.data_pipeline.readers.row_fields import add_fields, get_field, select_row_fields
from llmsys.data_pipeline.readers.row_reader import build_document_page, find_text_fields
from llmsys.data_pipeline.readers.text_lines import iter_text_lines

_ESCAPED = 6  # bytes of an escaped one-byte character, such as \u0041
_OTHER_FIELDS_BYTES = 1 << 16
_MARK = b"\xef\xbb\xbf"


def read_json_lines(
    source: InputStream, magic: bytes, max_text_bytes: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord]:
    """Read a file of JSON lines.

    Args:
        source: The file.
        magic: Its compression.
        max_text_bytes: Longer texts are skipped.
        config: Fields of a document.

    Yields:
        Documents, and a `SkippedRecord` for each line or damage without one.
    """
    limit = max_text_bytes * _ESCAPED + _OTHER_FIELDS_BYTES
    for found in iter_text_lines(source, magic, limit):
        if isinstance(found, DamagedMember):
            yield SkippedRecord(source.path, found.offset, found.reason)
        else:
            yield from _iter_line_documents(source.path, *found, max_text_bytes, config)


def _iter_line_documents(
    path: str, offset: int, line: bytes | None, limit: int, config: ReadConfig
) -> Iterator[Page | SkippedRecord]:
    if line is None:
        yield SkippedRecord(path, offset, f"longer than {limit} bytes")
        return
    line = line.removeprefix(_MARK) if offset == 0 else line
    if not line.strip():
        return
    row = _parse_json_object(line)
    if isinstance(row, str):
        yield SkippedRecord(path, offset, row)
        return
    values = {
        name: get_field(row, getattr(config, f"{name}_field"))
        for name in ("text", "url", "id", "date")
    }
    names = None if isinstance(values["text"], str) else find_text_fields(row)
    page = build_document_page(offset, values, limit, config.text_field, names)
    if isinstance(page, Page) and config.keep_fields != "none":
        page = add_fields(page, select_row_fields(row, values, config))
    yield SkippedRecord(path, offset, page) if isinstance(page, str) else page


def _parse_json_object(line: bytes) -> dict[str, Any] | str:
    """Parse the object of a line, or return the reason why there is none."""
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        if not can_decode(line, "utf-8"):  # a few damaged bytes are replaced instead
            return "not UTF-8"
        return _parse_json_object(line.decode("utf-8", "replace").encode())
    except RecursionError:
        return "not JSON: nested too deep"
    except ValueError as error:
        return f"not JSON: {str(error).split(':', 1)[0]}"
    return row if isinstance(row, dict) else "not a JSON object"
