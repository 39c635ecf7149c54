"""Read the text of PDF, with a form feed between its pages.

pdfium does it in a process of its own (`pdfium_process.py`), one for each PDF.

Invariants:
- No PDF raises, or takes more than the memory and CPU time of `data.read.pdf`: it is a loss with
  its reason. A process that something else kills is an error, for another attempt.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from llmsys.config.cleaning import NoPdfReader, PdfConfig, PdfiumConfig
from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.readers.page_batch import Page, SkippedRecord, remove_invalid_characters
from llmsys.data_pipeline.readers.text_file import read_content

_SCRIPT = Path(__file__).with_name("pdfium_process.py")
# How a process ends that its own input breaks.
_BROKEN = (
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
)
_UNREAD = (
    "a PDF: data.read.pdf.kind=pdfium reads its text, with pypdfium2 (pip install 'llmsys[pdf]')"
)


def read_pdf_file(
    source: InputStream, magic: bytes, max_text_bytes: int, config: PdfConfig
) -> Iterator[Page | SkippedRecord]:
    """Read a file of one document.

    Args:
        source: The file.
        magic: Its compression.
        max_text_bytes: A longer text is skipped.
        config: The limits.

    Yields:
        The document, or the reason why the file is none.
    """
    if isinstance(config, NoPdfReader):
        yield SkippedRecord(source.path, 0, _UNREAD)
        return
    reason = f"a PDF longer than {config.max_bytes} bytes, data.read.pdf.max_bytes"
    content = read_content(source, magic, config.max_bytes, reason)
    if isinstance(content, SkippedRecord):
        yield content
        return
    page = Page(offset=0, url="", date="", content_type="application/pdf")
    found = add_pdf_text(page, content, max_text_bytes, config)
    yield found if isinstance(found, Page) else SkippedRecord(source.path, 0, found)


def add_pdf_text(
    page: Page, content: bytes, max_text_bytes: int, config: PdfiumConfig
) -> Page | str:
    """Add the text of a PDF to a page.

    Args:
        page: Where the PDF is from.
        content: The PDF.
        max_text_bytes: A longer text is skipped.
        config: The limits.

    Returns:
        The page with the text and a note about damaged pages, or the reason why it is none.

    Raises:
        RuntimeError: The process failed for another reason than the PDF.
    """
    limits = (max_text_bytes, config.max_pages, config.max_memory_bytes, config.max_cpu_seconds)
    # -P: the script's folder has modules with common names.
    command = [sys.executable, "-P", str(_SCRIPT), *map(str, limits)]
    done = subprocess.run(command, input=content, capture_output=True, check=False)
    if done.returncode == -signal.SIGXCPU:
        return f"a PDF that takes more than {config.max_cpu_seconds} CPU seconds"
    if -done.returncode in _BROKEN:
        name = signal.Signals(-done.returncode).name
        return f"a PDF that breaks pdfium ({name}), such as by its need of memory"
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no message"]
        raise RuntimeError(
            f"the process that reads a PDF ended with status {done.returncode}: {lines[-1]}. Run "
            "the same command again; if it fails again, look for what ends processes."
        )
    found = json.loads(done.stdout)
    if "reason" in found:
        return str(found["reason"])
    texts = [text for text in found["texts"] if text is not None]
    if not texts:
        return "a damaged PDF: no page of it is readable"
    if not any(text.strip() for text in texts):
        return "a PDF without text, such as of scanned pages"
    damaged = len(found["texts"]) - len(texts)
    notes = [f"damaged pages of a PDF are left out: {damaged}"] if damaged else []
    text = "\n\f".join(text.strip("\n") for text in texts)
    return replace(
        page,
        text=remove_invalid_characters(text),
        more_notes=(*page.more_notes, *notes),
    )
