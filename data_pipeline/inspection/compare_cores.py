"""Compare the compiled core with the Python extractor on the pages of crawl files.

Reads crawl files; writes nothing. `llmsys doctor core` prints the result.
"""

import time
import unicodedata
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from llmsys.config.cleaning import ArticleExtractorConfig, ReadConfig
from llmsys.data_pipeline.core.native import NativeCore, describe_core, load_core
from llmsys.data_pipeline.extract.extractor import clean_text, iter_accepted_pages
from llmsys.data_pipeline.extract.main_content import extract_article
from llmsys.data_pipeline.readers.page_reader import read_pages


class CoreComparison(NamedTuple):
    """Texts of the compiled core next to Python's.

    Attributes:
        core: Which core prepares data.
        pages: Pages that were extracted.
        different: Pages with another text; 0 where there is no compiled core.
        left: Pages that the compiled core leaves to Python.
        python_seconds: CPU seconds of Python.
        compiled_seconds: CPU seconds of the compiled core; None without one.
    """

    core: str
    pages: int
    different: int
    left: int
    python_seconds: float
    compiled_seconds: float | None

    def to_text(self) -> str:
        """Return the lines that the command prints.

        Returns:
            One line without a compiled core, else two.
        """
        if self.compiled_seconds is None:
            return f"{self.core}\n{self.pages:,} pages in {self.python_seconds:.2f} CPU s"
        times = self.python_seconds / max(self.compiled_seconds, 1e-9)
        return (
            f"{self.core}\n{self.pages:,} pages, {self.different} with another text than Python's, "
            f"{self.left} left to Python; {self.compiled_seconds:.2f} CPU s instead of "
            f"{self.python_seconds:.2f} ({times:.1f} times as fast)"
        )


def compare_cores(files: Iterable[str]) -> CoreComparison:
    """Extract the pages of crawl files by Python and, where there is one, by the compiled core.

    Args:
        files: Paths of crawl files.

    Returns:
        Counts and CPU times.
    """
    pages = list(_iter_pages(files))
    began = time.process_time()
    expected = [clean_text(extract_article(page)) for page in pages]
    python_seconds = time.process_time() - began
    core = load_core()
    if not isinstance(core, NativeCore):
        return CoreComparison(describe_core(), len(pages), 0, 0, python_seconds, None)
    began = time.process_time()
    texts = core.extract_articles(pages)
    compiled_seconds = time.process_time() - began
    different = sum(
        text is not None and unicodedata.normalize("NFC", text.decode()) != right
        for text, right in zip(texts, expected, strict=True)
    )
    left = texts.count(None)
    return CoreComparison(
        describe_core(), len(pages), different, left, python_seconds, compiled_seconds
    )


def _iter_pages(files: Iterable[str]) -> Iterator[bytes]:
    config = ArticleExtractorConfig()
    for file in files:
        for batch in read_pages(file, max_page_bytes=config.max_page_bytes, config=ReadConfig()):
            yield from iter_accepted_pages(batch.pages, config)
