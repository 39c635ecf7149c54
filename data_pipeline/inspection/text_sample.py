"""Measure on a sample how much text a crawl or a folder of documents will leave.

Reads the beginning of a few files with the reader, extractor, languages and rules of a config.
Writes into a temporary folder, and nothing else.
"""

import tempfile
from pathlib import Path

import pyarrow.compute as pc

from llmsys.config.cleaning import ReadConfig
from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.language.rules_by_language import serialize_rules_by_language
from llmsys.data_pipeline.readers.input_files import find_input_files
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.stages.apply_rules import apply_rules_to_file
from llmsys.data_pipeline.stages.extract_text import extract_file

# Files of which a sample is read: the first, the last, and some between.
SAMPLED_FILES = 4
# Bytes of each, as it is stored; about 50 pages of a crawl in one megabyte.
SAMPLED_BYTES = 1 << 20


def measure_text_share(data: CrawlConfig, *, is_crawl: bool) -> float | None:
    """Measure the bytes of kept text per byte of the input files as they are stored.

    Neither duplicates nor lists of URLs are looked at: a sample has fewer duplicates than the
    whole.

    Args:
        data: The section `data` of a run, whose inputs are local files.
        is_crawl: The inputs are crawl files, whose pages are extracted and filtered; text of other
            files is taken as it is.

    Returns:
        The share, which is above 1 where compression saves more than filtering; None where the
        sample has nothing that can be read.

    Raises:
        DataError: An input is missing.
    """
    found = find_input_files(data)
    step = max(1, (len(found.paths) - 1) // (SAMPLED_FILES - 1))
    read = kept = 0
    with tempfile.TemporaryDirectory(prefix="llmsys-sample-") as folder:
        for path in found.paths[::step][:SAMPLED_FILES]:
            settings = found.get_read_config(path, data.read)
            if is_crawl:
                stop, text = _measure_pages(path, data, settings, Path(folder))
            else:
                stop, text = _measure_documents(path, data, settings)
            read += stop
            kept += text
    return kept / read if read and kept else None


def _measure_pages(
    path: str, data: CrawlConfig, settings: ReadConfig, folder: Path
) -> tuple[int, int]:
    """Return the bytes read of a crawl file, and those of the texts that its rules keep."""
    stop = min(SAMPLED_BYTES, Path(path).stat().st_size)
    texts = folder / "texts"
    extract_file(
        _ignore_progress,
        source=path,
        output=texts,
        unread=folder / "unread",
        config=data.extract,
        read=settings,
        stop=stop,
    )
    result = apply_rules_to_file(
        _ignore_progress,
        source=texts,
        kept=folder / "kept",
        dropped=folder / "dropped",
        config=data,
        rules=serialize_rules_by_language(data),
    )
    # None for a file without a page.
    counts = [stage["bytes_out"] for stage in result["tally"]["stages"].values()]
    return stop, int(counts[-1]) if counts else 0


def _measure_documents(path: str, data: CrawlConfig, settings: ReadConfig) -> tuple[int, int]:
    """Return the bytes read of a file of documents, and those of their texts."""
    position = text = 0
    for batch in read_pages(path, max_page_bytes=data.extract.max_page_bytes, config=settings):
        position = max(position, batch.position)
        lengths = pc.binary_length(batch.pages.column("text"))
        text += pc.sum(lengths).as_py() or 0
        if position >= SAMPLED_BYTES:
            break
    return position, text


def _ignore_progress(done: float, failed: int) -> None:
    """Take the progress of a stage, and show nothing."""
