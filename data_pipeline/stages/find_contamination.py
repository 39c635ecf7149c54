"""Find evaluation items in documents: a map over files, then one reduction over all matches.

`write_matches` finds n-grams of items, and passages like items, in one file. `filter_matches`
exempts n-grams and items that occur in too many documents. Memory holds the index, then the
matches, never all texts.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.decontaminate.evaluation_index import (
    EvaluationIndex,
    ItemMatches,
    load_evaluation_index,
)
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.text.word_hashes import HashedWords, WordHasher, iter_joined_readings
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches

# Row of the document in its file, number of the n-gram or part in the index, the range of matching
# characters, and the share of an item's words; 0 for an exact n-gram.
_PLACE = ("row", "gram", "begin", "end")
MATCH_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("gram", pa.int32()),
        ("begin", pa.int64()),
        ("end", pa.int64()),
        ("share", pa.float32()),
    ]
)

# Matches; `spared` marks n-grams that too many documents have.
DECIDED_SCHEMA = pa.schema([*MATCH_SCHEMA, ("spared", pa.bool_())])

_SLICE_CHARACTERS = 2 << 20  # searched together: bounds memory, hides the cost of a call


@lru_cache(maxsize=1)
def _get_word_hasher() -> WordHasher:
    """Return one hasher per process: it caches words."""
    return WordHasher()


def write_matches(
    report: Report,
    *,
    source: Path,
    output: Path,
    index: Path,
    digest: str,
    fuzzy: Path | None = None,
) -> dict[str, Any]:
    """Write every match in one file of documents. Progress is in documents.

    Args:
        report: Progress callback.
        source: File of documents.
        output: File of matches, `MATCH_SCHEMA`.
        index: The n-gram index.
        digest: Digest of the index; it keys the cache of loaded indexes.
        fuzzy: The index of fuzzy matches; None without them.

    Returns:
        Numbers of rows and matches.
    """
    items = load_evaluation_index(index, fuzzy, digest)
    words = _get_word_hasher()
    rows = matches = 0
    with ArrowFileWriter(output, MATCH_SCHEMA, "zstd") as writer:
        for batch in read_batches(source):
            texts = batch.column("text").to_pylist()
            for first, last in _list_text_ranges(texts):
                found = _find_matches(texts[first:last], rows + first, items, words)
                if found.num_rows:
                    writer.write(found)
                    matches += found.num_rows
            rows += batch.num_rows
            report(batch.num_rows, 0)
    return {"rows": rows, "matches": matches}


def _find_matches(
    texts: Sequence[str], first_row: int, index: EvaluationIndex, words: WordHasher
) -> pa.RecordBatch:
    """Return the matches in all readings of some texts, each once, ordered by text and position."""
    split = words.hash_words(texts)
    rows = np.arange(len(texts)) + first_row
    found = [_locate_matches(texts, rows, split, index.find_ngrams(split), words)]
    # A fuzzy match needs no rejoined words: broken ones are a few changed words more.
    if (passages := index.find_passages(split)) is not None:
        found.append(_locate_matches(texts, rows, split, passages, words))
    for number, text in enumerate(texts):
        for joined in iter_joined_readings(text):
            split = words.hash_words([joined])
            exact = index.find_ngrams(split)
            found.append(_locate_matches([joined], rows[[number]], split, exact, words))
    if not any(matches.num_rows for matches in found[1:]):
        return found[0]
    columns = [
        np.concatenate([matches.column(name).to_numpy() for matches in found])
        for name in MATCH_SCHEMA.names
    ]
    row, gram, begin, end, _ = columns
    # Longer n-grams first at one position: they name the item best.
    order = np.lexsort((end, gram, -index.get_words(gram), begin, row))
    ordered = np.stack([column[order] for column in columns[: len(_PLACE)]])
    is_new = np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))
    return pa.record_batch(
        [pa.array(column[order][is_new]) for column in columns], schema=MATCH_SCHEMA
    )


def _locate_matches(
    texts: Sequence[str],
    rows: Integers,
    split: HashedWords,
    matches: ItemMatches,
    words: WordHasher,
) -> pa.RecordBatch:
    """Return the matches in one reading of texts with their characters. `rows` are the numbers of
    their documents.
    """
    if not len(matches.first):
        return pa.RecordBatch.from_pylist([], MATCH_SCHEMA)
    documents = np.searchsorted(split.offsets, matches.first, side="right") - 1
    spans = _compute_match_spans(
        words, texts, split.offsets, documents, matches.first, matches.length
    )
    columns = [
        rows[documents],
        matches.number.astype(np.int32),
        *spans,
        matches.share.astype(np.float32),
    ]
    return pa.record_batch([pa.array(column) for column in columns], schema=MATCH_SCHEMA)


def _list_text_ranges(texts: Sequence[str]) -> list[tuple[int, int]]:
    """List ranges of texts of at most `_SLICE_CHARACTERS`, or of one longer text."""
    ranges = []
    first = 0
    size = 0
    for number, text in enumerate(texts):
        if number > first and size + len(text) > _SLICE_CHARACTERS:
            ranges.append((first, number))
            first = number
            size = 0
        size += len(text)
    return [*ranges, (first, len(texts))] if texts else []


def _compute_match_spans(
    words: WordHasher,
    texts: Sequence[str],
    offsets: Any,
    documents: Any,
    positions: Any,
    lengths: Any,
) -> Any:
    """Return begin and end of each match in its text, in characters."""
    begin, end = np.empty(len(positions), np.int64), np.empty(len(positions), np.int64)
    for document in np.unique(documents).tolist():
        here = documents == document
        begins, ends = words.get_word_spans(texts[document])
        first = positions[here] - offsets[document]
        begin[here] = begins[first]
        end[here] = ends[first + lengths[here] - 1]
    return begin, end


def filter_matches(
    report: Report, *, sources: Sequence[Path], output: Path, max_documents: int
) -> dict[str, Any]:
    """Write one record batch of matches per source, with a mark on exempt n-grams. Progress is in
    files.

    Args:
        report: Progress callback.
        sources: Files of matches.
        output: File to write, `DECIDED_SCHEMA`.
        max_documents: An n-gram or fuzzy match in more documents is exempt. 0: none is.

    Returns:
        Number of exempt n-grams and fuzzy matches.
    """
    tables = [_read_matches(source) for source in sources]
    exempt = _select_exempt_grams(tables, max_documents)
    with ArrowFileWriter(output, DECIDED_SCHEMA, "zstd") as writer:
        for table in tables:
            spared = np.isin(table.column("gram").to_numpy(), exempt)
            writer.write(pa.record_batch([*table.columns, pa.array(spared)], schema=DECIDED_SCHEMA))
            report(1, 0)
    return {"exempt": len(exempt)}


def _read_matches(source: Path) -> pa.RecordBatch:
    batches = list(read_batches(source))
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], MATCH_SCHEMA)


def _select_exempt_grams(
    tables: Sequence[pa.RecordBatch], max_documents: int
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the n-grams in more than `max_documents` documents. A document counts once."""
    pairs = [np.zeros(0, np.int64)]
    for table in tables:
        row = table.column("row").to_numpy()
        gram = table.column("gram").to_numpy().astype(np.int64)
        # Row and n-gram in one integer: a document counts once per n-gram.
        pairs.append(np.unique((row << 32) | gram) & 0xFFFFFFFF)
    grams, counts = np.unique(np.concatenate(pairs), return_counts=True)
    return grams[counts > max_documents] if max_documents else grams[:0]
