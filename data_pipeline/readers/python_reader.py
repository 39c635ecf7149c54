"""Readers of the user's own code: the class to extend, its place among the readers, and a test kit.

    class Mailbox(PythonReader):
        def read(self, file):
            for message in file.read().decode("utf-8", "replace").split("\nFrom "):
                yield Document(text=message)

Invariants:
- Documents depend on the bytes of the file and the options alone; `check_python_reader` tests it.
- Damage that the code reports as OSError or EOFError loses the rest of its file, and is counted.
  Any other error ends the task and names the line of the code.
"""

import io
import lzma
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, cast

from llmsys.config.cleaning import PythonReaderConfig
from llmsys.config.loading.python_object import describe_error, load_python_object
from llmsys.config.section import Section
from llmsys.data_pipeline.readers.input_stream import InputStream, ReadError
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord
from llmsys.data_pipeline.readers.row_reader import build_document_page
from llmsys.errors import ConfigError, DataError


@dataclass(frozen=True)
class Document:
    """A document of a file: either its text, or HTML from which `data.extract` takes the text.

    Attributes:
        text: text that needs no extraction.
        html: a page in UTF-8.
        url: address, "" for none.
        date: time of capture, such as 2024-05-01T12:00:00Z.
        id: unique name; "" for a hash of url, date and text.
    """

    text: str | None = None
    html: str | None = None
    url: str = ""
    date: str = ""
    id: str = ""


class PythonReader(Section):
    """Base class of a reader: fields are options."""

    @abstractmethod
    def read(self, file: BinaryIO) -> Iterator[Document]:
        """Yield the documents of a file.

        Args:
            file: The bytes of the file as they are stored, open for reading: gzip.open takes it,
                and io.TextIOWrapper where the file is text.

        Yields:
            The documents: the same ones in the same order whenever the bytes are the same. Errors
            of damaged files (OSError, EOFError, those of zlib and lzma) lose the rest of the file;
            any other ends the task.
        """


def load_python_reader(config: PythonReaderConfig) -> PythonReader:
    """Run the user's code and build the reader.

    Args:
        config: the section.

    Returns:
        The user's object.

    Raises:
        ConfigError: the class is missing or wrong, or an option is.
    """
    return load_python_object(config, PythonReader, "data.read.reader")  # type: ignore[type-abstract]


def read_with_python(
    source: InputStream, limit: int, config: PythonReaderConfig
) -> Iterator[Page | SkippedRecord]:
    """Yield the documents of one file; their offsets are their numbers, counted from 0.

    Args:
        source: the file.
        limit: maximum length of a text or page in UTF-8 bytes.
        config: the section of the reader.

    Yields:
        Pages, and a `SkippedRecord` for a document that is too long, and for the rest of a damaged
        file.

    Raises:
        DataError: the user's code failed, or yielded anything but documents.
        ReadError: the storage failed.
    """
    reader = load_python_reader(config)
    number = 0
    try:
        for document in reader.read(cast(BinaryIO, io.BufferedReader(source))):
            page = _build_page(document, number, limit, config.path)
            yield page if isinstance(page, Page) else SkippedRecord(source.path, number, page)
            number += 1
    except (ReadError, DataError):
        raise
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        yield SkippedRecord(source.path, number, f"damaged file after {number} documents: {error}")
    except Exception as error:
        raise DataError(
            f"{config.path} failed on {source.path} after {number} documents: "
            f"{describe_error(error, config.files[0])}. Correct the code."
        ) from error


def _build_page(document: object, number: int, limit: int, path: str) -> Page | str:
    """Return the page of a document, or the reason why it is none."""
    if not isinstance(document, Document) or (document.text is None) == (document.html is None):
        raise DataError(
            f"{path} yielded {document!r:.80} as document {number}. Yield Document(text=…) or "
            "Document(html=…)."
        )
    values = {
        "text": document.html or document.text,
        "url": document.url,
        "id": document.id,
        "date": document.date,
    }
    page = build_document_page(number, values, limit, "text")
    if document.html is None or isinstance(page, str):
        return page
    return replace(page, text=None, payload=(page.text or "").encode(), content_type="text/html")


def check_python_reader(reader: PythonReader, content: bytes, texts: Sequence[str]) -> None:
    """Test a reader on the bytes of a file.

    Args:
        reader: the user's object.
        content: the file.
        texts: texts or pages of HTML that it should yield, in order.

    Raises:
        ConfigError: it yields other documents, or others when it reads the file again.
    """
    name = type(reader).__name__
    first, again = (list(reader.read(io.BytesIO(content))) for _ in range(2))
    if first != again:
        raise ConfigError(
            f"{name} yields other documents when it reads a file again. Keep nothing between two "
            "files."
        )
    found = [document.text if document.html is None else document.html for document in first]
    if found != list(texts):
        raise ConfigError(
            f"{name} yields {found}, not {list(texts)}. Correct read, or the expected texts."
        )
