"""Held-out pages that no rule has touched, for the comparison of datasets of one crawl.

Which page is held out follows from the hash of its id, or from its file, before any rule. A page
of which the crawl has a copy, equal or near, is left out: another dataset, without the removal of
duplicates, would train on the copy.

Reads a dataset of the crawl without rules; writes pages as Parquet, in the order of its documents.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.cleaning import NoPiiReplacement, NoUrlFilter, ReadConfig
from llmsys.config.data import CrawlConfig, DocumentFilesConfig
from llmsys.config.decontamination import NoDecontamination
from llmsys.config.deduplication import (
    DeduplicationConfig,
    ExactDedupConfig,
    MinHashDedupConfig,
    NoDeduplication,
)
from llmsys.config.language import LanguageConfig
from llmsys.data_pipeline.core.document_schema import count_text_bytes, select_heldout
from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.language.identify import compute_keep_mask
from llmsys.data_pipeline.readers.input_files import find_heldout_files
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import read_batches
from llmsys.storage.arrow_file import map_file, open_arrow

_COMPARISONS = ("exact_duplicates", "near_duplicates")
_COLUMNS = ("id", "url", "date", "text")
Mask = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class WrittenPages:
    """Pages of a file.

    Attributes:
        documents: Their number.
        text_bytes: UTF-8 bytes of their texts.
        left_out: Held-out pages that are not among them because the crawl has copies.
    """

    documents: int
    text_bytes: int
    left_out: int = 0


def build_unfiltered_config(data: CrawlConfig, folder: Path, *, has_urls: bool) -> CrawlConfig:
    """Return the config of a dataset of the same pages without rules.

    Args:
        data: The section `data` of a run: its inputs and extraction are kept.
        folder: Folder of the dataset.
        has_urls: Keep the URL filter, which no other dataset of the comparison changes.

    Returns:
        A config that drops nothing but copies: pages of other languages may be copies, too.
    """
    changes: dict[str, Any] = {
        "folder": folder,
        "url": data.url if has_urls else NoUrlFilter(),
        "language": data.language.model_copy(update={"languages": (), "min_score": 0.0}),
        "rules": (),
        "deduplicate": DeduplicationConfig(
            url=NoDeduplication(), exact=ExactDedupConfig(), minhash=MinHashDedupConfig()
        ),
        "decontaminate": NoDecontamination(),
        "pii": NoPiiReplacement(),
        "documents": data.documents.model_copy(update={"export_formats": ()}),
    }
    return data.model_copy(update=changes)


def build_pages_config(data: CrawlConfig, pages: Path, folder: Path) -> CrawlConfig:
    """Return the config of a dataset that has every page of a file, as it is, and holds it out.

    Args:
        data: The section `data` of a run: limits, executor and layout are kept.
        pages: File that `write_heldout_pages` or `write_kept_pages` wrote.
        folder: Folder of the dataset.

    Returns:
        The config.
    """
    read = ReadConfig(
        text_field="text", url_field="url", id_field="id", date_field="date", keep_fields="none"
    )
    return keep_all_documents(data, folder).model_copy(
        update={"heldout_inputs": (str(pages),), "read": read}
    )


def keep_all_documents(data: CrawlConfig, folder: Path) -> CrawlConfig:
    """Return a config without inputs that drops and changes nothing.

    Args:
        data: The section `data` of a run: limits, executor and layout are kept.
        folder: Folder of the dataset.

    Returns:
        The config; its `heldout_inputs` are to be set.
    """
    return CrawlConfig(
        name=folder.name,
        folder=folder,
        extract=data.extract,
        language=LanguageConfig(kind=data.language.kind, languages=(), min_score=0),
        deduplicate=DeduplicationConfig(exact=NoDeduplication(), minhash=NoDeduplication()),
        tokens=data.tokens,
        documents=DocumentFilesConfig(num_shards=data.documents.num_shards),
        executor=data.executor,
        read=data.read,
    )


def write_heldout_pages(data: CrawlConfig, language: LanguageConfig, output: Path) -> WrittenPages:
    """Write the held-out pages of which the crawl has no copy.

    Args:
        data: Config of `build_unfiltered_config`, whose dataset is prepared up to its documents.
        language: Languages of the pages, and their minimum score.
        output: Parquet file to write: id, url, date and text.

    Returns:
        What was written.

    Raises:
        DataError: The dataset is missing or damaged.
    """
    files = find_heldout_files(data)
    copied = pa.array(sorted(_find_copied_ids(data.folder)), pa.string())
    left_out = 0

    def choose_pages(batch: pa.RecordBatch) -> Mask:
        nonlocal left_out
        codes, scores = batch.column("language"), batch.column("language_score")
        is_wanted = compute_keep_mask(codes, scores, language).to_numpy(zero_copy_only=False)
        held = select_heldout(batch, data.split, files) & is_wanted
        has_copy = pc.is_in(batch.column("id"), value_set=copied).to_numpy(zero_copy_only=False)
        left_out += int((held & has_copy).sum())
        mask: Mask = held & ~has_copy
        return mask

    documents, text_bytes = _write_pages(data.folder, output, choose_pages)
    return WrittenPages(documents, text_bytes, left_out)


def write_kept_pages(folder: Path, pages: Path, output: Path) -> WrittenPages:
    """Write those of some pages that a dataset keeps, with the texts that it has of them.

    Args:
        folder: A prepared dataset of the same crawl.
        pages: File that `write_heldout_pages` wrote.
        output: Parquet file to write: id, url, date and text.

    Returns:
        What was written.

    Raises:
        DataError: The dataset is missing or damaged.
    """
    import pyarrow.parquet as pq  # slow to import

    ids = pq.read_table(pages, columns=["id"]).column("id").combine_chunks()

    def choose_pages(batch: pa.RecordBatch) -> Mask:
        mask: Mask = pc.is_in(batch.column("id"), value_set=ids).to_numpy(zero_copy_only=False)
        return mask

    return WrittenPages(*_write_pages(folder, output, choose_pages))


def _find_copied_ids(folder: Path) -> set[str]:
    """Return the ids of the documents that stay of several equal or near ones."""
    journal = Journal(folder)
    names = [name for stage in _COMPARISONS for name in journal.iter_output_names(stage)]
    journal.close()
    found = set[str]()
    for name in names:
        path = folder / name
        arrow = open_arrow(path, map_file(path))
        for number in range(arrow.num_record_batches):
            found.update(arrow.get_batch(number).column("kept").to_pylist())
    return found


def _write_pages(
    folder: Path, output: Path, choose_pages: Callable[[pa.RecordBatch], Mask]
) -> tuple[int, int]:
    """Write the chosen documents of a dataset; return their number and the bytes of their
    texts.
    """
    import pyarrow.parquet as pq  # slow to import

    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.tmp")
    schema = pa.schema([(name, pa.large_string()) for name in _COLUMNS])
    documents = 0
    text_bytes = 0
    with pq.ParquetWriter(aside, schema, compression="zstd") as writer:
        for batch in _iter_documents(folder):
            chosen = batch.select(_COLUMNS).filter(pa.array(choose_pages(batch)))
            if chosen.num_rows:
                writer.write_batch(chosen.cast(schema))
            documents += chosen.num_rows
            text_bytes += int(count_text_bytes(chosen.column("text")).sum())
    os.replace(aside, output)
    return documents, text_bytes


def _iter_documents(folder: Path) -> Iterator[pa.RecordBatch]:
    for file in load_manifest(folder).documents.files:
        yield from read_batches(folder / "documents" / file.name)
