"""Measure on a sample how much text a crawl or a folder of documents will leave.

Reads the beginning of a few files with the reader, extractor, languages and rules of a config.
Writes into a temporary folder, and nothing else.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from llmsys.config.cleaning import ReadConfig
from llmsys.config.data import CrawlConfig
from llmsys.config.tokenizer import SentencePieceConfig
from llmsys.data_pipeline.language.rules_by_language import serialize_rules_by_language
from llmsys.data_pipeline.readers.input_files import find_input_files
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.stages.apply_rules import apply_rules_to_file
from llmsys.data_pipeline.stages.extract_text import extract_file
from llmsys.data_pipeline.tokenize.train_sentencepiece import train_sentencepiece
from llmsys.dataset.token_shards import read_batches

# Files of which a sample is read: the first, the last, and some between. Of small files as many as
# have the bytes of four large ones, up to a number whose opening takes some seconds.
SAMPLED_FILES, MAX_SAMPLED_FILES = 4, 512
# Bytes of each, as it is stored; about 50 pages of a crawl in one megabyte.
SAMPLED_BYTES = 1 << 20
# Bytes of kept text that are looked at, in equal parts of the files.
TOKENIZED_BYTES = 1 << 21
# One line in four is left out of the training, and measured.
HELDOUT_LINES = 4
# As SentencePiece has it.
CHARACTER_COVERAGE = 0.9995


@dataclass(frozen=True)
class TextSample:
    """A sample of the text that preparation will keep.

    Attributes:
        share: Bytes of kept text per byte of the files as they are stored; above 1 where
            compression saves more than filtering.
        num_bytes: Bytes of the kept text that was looked at.
        num_characters: Different characters that make up 99.95 % of it, each of which needs a piece
            of the vocabulary.
        bytes_per_token: Bytes of a token by pieces of the vocabulary, of tokenizers that are
            trained on `TOKENIZED_BYTES` of it, on lines that they have not seen. Vocabularies
            that the sample is too small for are left out.
        document_spread: Standard error of the bytes of a token of the sample, as a share of it,
            by how its documents differ; 0 for a single document.
    """

    share: float
    num_bytes: int
    num_characters: int
    bytes_per_token: dict[int, float]
    document_spread: float = 0.0


def measure_text_share(data: CrawlConfig, *, is_crawl: bool) -> float | None:
    """Measure the bytes of kept text per byte of the input files as they are stored.

    Args:
        data: The section `data` of a run, whose inputs are local files.
        is_crawl: The inputs are crawl files, whose pages are extracted and filtered.

    Returns:
        The share; None where the sample has nothing that can be read.

    Raises:
        DataError: An input is missing.
    """
    sample = measure_text_sample(data, is_crawl=is_crawl)
    return None if sample is None else sample.share


def measure_text_sample(
    data: CrawlConfig, *, is_crawl: bool, vocabularies: Sequence[int] = ()
) -> TextSample | None:
    """Measure how much text input files will leave, and how long its tokens are.

    Neither duplicates nor lists of URLs are looked at: a sample has fewer duplicates than the
    whole.

    Args:
        data: The section `data` of a run, whose inputs are local files.
        is_crawl: The inputs are crawl files, whose pages are extracted and filtered; text of other
            files is taken as it is.
        vocabularies: Pieces of the tokenizers to measure.

    Returns:
        The sample; None where it has nothing that can be read.

    Raises:
        DataError: An input is missing.
    """
    found = find_input_files(data)
    paths = _choose_files(found.paths)
    read = kept = 0
    texts: list[list[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="llmsys-sample-") as folder:
        for path in paths:
            settings = found.get_read_config(path, data.read)
            sampled = _SampledTexts()
            if is_crawl:
                stop, num_kept = _measure_pages(path, data, settings, Path(folder), sampled)
            else:
                stop, num_kept = _measure_documents(path, data, settings, sampled)
            read += stop
            kept += num_kept
            texts.append(sampled.select_texts(TOKENIZED_BYTES // len(paths)))
    documents = [text for of_file in texts for text in of_file]
    whole = b"\n".join(documents)
    if not (read and kept and whole.strip()):
        return None
    text = whole.decode("utf-8", "ignore")
    measured = {pieces: _measure_tokens(text, documents, pieces) for pieces in vocabularies}
    found_lengths = {pieces: one for pieces, one in measured.items() if one is not None}
    return TextSample(
        share=kept / read,
        num_bytes=len(whole),
        num_characters=_count_characters(text),
        bytes_per_token={pieces: length for pieces, (length, _) in found_lengths.items()},
        document_spread=max((spread for _, spread in found_lengths.values()), default=0.0),
    )


def _choose_files(paths: Sequence[str]) -> Sequence[str]:
    """Return the files of the sample, evenly from all."""
    if not paths:
        return []
    first = _select_evenly(paths, MAX_SAMPLED_FILES)
    size = sum(Path(path).stat().st_size for path in first) / len(first)
    wanted = int(SAMPLED_FILES * SAMPLED_BYTES / max(size, 1))
    return _select_evenly(paths, min(MAX_SAMPLED_FILES, max(SAMPLED_FILES, wanted)))


def _select_evenly(paths: Sequence[str], number: int) -> Sequence[str]:
    step = max(1, (len(paths) - 1) // (number - 1))
    return paths[::step][:number]


def _measure_tokens(
    text: str, documents: Sequence[bytes], vocabulary: int
) -> tuple[float, float] | None:
    """Train a tokenizer on three of four lines of a text, and return the bytes of its tokens on the
    fourth, and their standard error by documents; None where the text has too few pieces.
    """
    lines = [line for line in text.split("\n") if line]
    heldout = lines[HELDOUT_LINES - 1 :: HELDOUT_LINES]
    learnt = [line for number, line in enumerate(lines) if (number + 1) % HELDOUT_LINES]
    if not heldout:
        return None
    config = SentencePieceConfig(vocab_size=vocabulary)
    try:
        model = train_sentencepiece(learnt, config)
    except RuntimeError:  # fewer pieces than the vocabulary has
        return None
    import sentencepiece  # slow to import

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = processor.encode("\n".join(heldout))
    sizes_D = np.array([len(document) for document in documents], float)
    counts_D = np.array(
        [
            len(one)
            for one in processor.encode([text.decode("utf-8", "ignore") for text in documents])
        ]
    )
    length = len("\n".join(heldout).encode()) / len(ids)
    return length, _compute_ratio_error(counts_D, sizes_D)


def _compute_ratio_error(
    counts_D: npt.NDArray[np.float64], sizes_D: npt.NDArray[np.float64]
) -> float:
    """Return the standard error of sum(counts) / sum(sizes) over documents drawn at random, as a
    share of it (Cochran 1977, "Sampling Techniques", 6.3).
    """
    rests_D = counts_D - sizes_D * (counts_D.sum() / sizes_D.sum())
    return float(np.sqrt((rests_D**2).sum()) / counts_D.sum())


def _count_characters(text: str) -> int:
    """Return how many of the most frequent characters make up 99.95 % of a text."""
    counts = [count for _, count in Counter(text).most_common()]
    needed = CHARACTER_COVERAGE * len(text)
    return next(number for number, sum_ in enumerate(accumulate(counts), start=1) if sum_ >= needed)


class _SampledTexts:
    """The kept texts of the part of a file that is read."""

    def __init__(self) -> None:
        self.texts: list[bytes] = []

    def add_texts(self, texts: pa.Array) -> None:
        """Add texts."""
        self.texts += [(text.as_py() or "").encode() for text in texts]

    def select_texts(self, most: int) -> list[bytes]:
        """Return texts from everywhere in the file, as many as there is room for; the last one may
        be cut.
        """
        step = max(1, -(-sum(map(len, self.texts)) // most))
        chosen = self.texts[::step]
        starts = accumulate(map(len, chosen), initial=0)
        return [
            text[: most - start]
            for text, start in zip(chosen, starts, strict=False)
            if text and start < most
        ]


def _measure_pages(
    path: str,
    data: CrawlConfig,
    settings: ReadConfig,
    folder: Path,
    sampled: _SampledTexts,
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
    for batch in read_batches(folder / "kept"):
        sampled.add_texts(batch.column("text"))
    # None for a file without a page.
    counts = [stage["bytes_out"] for stage in result["tally"]["stages"].values()]
    return stop, int(counts[-1]) if counts else 0


def _measure_documents(
    path: str, data: CrawlConfig, settings: ReadConfig, sampled: _SampledTexts
) -> tuple[int, int]:
    """Return the bytes read of a file of documents, and those of their texts."""
    position = text = 0
    for batch in read_pages(path, max_page_bytes=data.extract.max_page_bytes, config=settings):
        position = max(position, batch.position)
        texts = batch.pages.column("text")
        sampled.add_texts(texts)
        text += pc.sum(pc.binary_length(texts)).as_py() or 0
        if position >= SAMPLED_BYTES:
            break
    return position, text


def _ignore_progress(done: float, failed: int) -> None:
    """Take the progress of a stage, and show nothing."""
