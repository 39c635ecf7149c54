"""Read the text of one PDF from the standard input; a script, run in a process of its own.

Writes JSON to the standard output: the texts of the pages, null for a damaged one, or the reason
why there are none. It imports nothing of this package, so that it starts in 0.1 s.

pdfium reads files that somebody made to break it in C++. Here they cannot take the worker with
them, nor more memory and CPU time than they are given.

Invariants:
- Limits are set before the first byte is read.
"""

import ctypes
import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

import pypdfium2
from pypdfium2 import raw

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_MAY_COPY = 1 << 4  # bit 5 of the permissions (ISO 32000-1, table 22)


def _set_limit(kind: int, wanted: int) -> None:
    _, most = resource.getrlimit(kind)
    wanted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(kind, (wanted, most))


def _read_pages(content: bytes, max_text_bytes: int, max_pages: int) -> Mapping[str, Any]:
    try:
        document = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if error.err_code == raw.FPDF_ERR_PASSWORD:
            return {"reason": "an encrypted PDF, which needs a password"}
        if error.err_code == raw.FPDF_ERR_SECURITY:
            return {"reason": "an encrypted PDF, of a kind that pdfium does not know"}
        return {"reason": "a damaged PDF"}
    if not raw.FPDF_GetDocPermissions(document) & _MAY_COPY:
        return {"reason": "a PDF whose owner forbids to copy its text"}
    if len(document) > max_pages:
        return {"reason": f"a PDF of {len(document)} pages: more than {max_pages}"}
    texts: list[str | None] = []
    size = 0
    for number in range(len(document)):
        text = _read_page(document, number)
        size += len((text or "").encode()) + 1
        if size > max_text_bytes:
            return {"reason": f"longer than {max_text_bytes} bytes"}
        texts.append(text)
    return {"texts": texts}


def _read_page(document: Any, number: int) -> str | None:
    try:
        page = document[number]
        text = page.get_textpage().get_text_range()
        page.close()
    except pypdfium2.PdfiumError:
        return None
    # pdfium has joined words that a hyphen divides at the end of a line, and marks the place.
    return str(text).replace("\r\n", "\n").replace("\ufffe", "")


def main() -> None:
    """Read the PDF within the limits of the command line."""
    max_text_bytes, max_pages, max_memory_bytes, max_cpu_seconds = map(int, sys.argv[1:])
    if sys.platform == "linux":
        # It ends with the worker that asks.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _set_limit(resource.RLIMIT_CORE, 0)
    _set_limit(resource.RLIMIT_AS, max_memory_bytes)
    _set_limit(resource.RLIMIT_CPU, max_cpu_seconds)
    try:
        found = _read_pages(sys.stdin.buffer.read(), max_text_bytes, max_pages)
    except MemoryError:
        found = {"reason": f"a PDF that takes more than {max_memory_bytes} bytes of memory"}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
