"""Repeat and leave out encoded documents by weights and caps of `data.sampling`.

Reads documents/ and the encoded file of each. Writes, where there are caps, sorted keys of each
file and the documents above a cap by ranges of keys; then an encoded file with the rows that
remain, in which a row may occur several times.

Invariants:
- What happens to a document follows from its columns, its id and the other documents with the same
  value, never from the order or number of files.
- Held-out documents stay, each once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from llmsys.config.sampling import (
    MAX_COPIES,
    BucketWeightsConfig,
    CapConfig,
    SamplingRule,
    ValueWeightsConfig,
)
from llmsys.data_pipeline.core.document_schema import hash_positions, read_cells
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.rules.derived_columns import DERIVED, NO_VALUE
from llmsys.data_pipeline.tokenize.repository_order import compute_places
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches, read_schema
from llmsys.errors import ConfigError, DataError
from llmsys.storage.arrow_file import read_columns

# Documents with a value that is capped, sorted by key. `rank` orders those of one value.
KEY_SCHEMA = pa.schema([("key", pa.uint64()), ("rank", pa.uint64()), ("rule", pa.uint8())])
# Of each value above its cap the last rank that stays, sorted by key.
CUTOFF_SCHEMA = pa.schema([("key", pa.uint64()), ("rank", pa.uint64())])

# Keys of one task, 17 bytes each.
RANGE_KEYS = 1 << 22
_WITHIN, _ABOVE = "within the cap", "above the cap"

Labels = list[str]
Counts = dict[str, list[int]]


@dataclass(frozen=True)
class Sampler:
    """The rules of a dataset; picklable.

    Attributes:
        rules: `data.sampling`.
        seed: `data.tokens.seed`.
    """

    rules: tuple[SamplingRule, ...]
    seed: int

    @property
    def caps(self) -> list[tuple[int, CapConfig]]:
        """Return the caps, with their places among the rules."""
        return [(n, rule) for n, rule in enumerate(self.rules) if isinstance(rule, CapConfig)]

    def check_columns(self, path: Path) -> None:
        """Check that documents have the columns of all rules.

        Args:
            path: A file of documents.

        Raises:
            ConfigError: There is no such column, or it has no numbers where a rule needs them.
        """
        schema = read_schema(path)
        for number, rule in enumerate(self.rules):
            name = f"data.sampling.{number}.column={rule.column}"
            stored = find_stored_column(rule.column, schema)
            if stored not in schema.names:
                there = ", ".join(sorted({*schema.names, *DERIVED} - {"text", "id"}))
                raise ConfigError(f"{name} is no column of the documents. Use one of: {there}.")
            kind = schema.field(stored).type
            if isinstance(rule, BucketWeightsConfig) and not _is_number(kind):
                raise ConfigError(
                    f"{name} has values of type {kind}, and buckets are ranges of numbers. Use "
                    "kind=values, or a column of numbers."
                )

    def iter_weights(
        self, documents: Path, encoded: Path
    ) -> Iterator[tuple[pa.RecordBatch, list[Labels], NDArray[np.float64]]]:
        """Yield encoded rows with their labels and weights, batch by batch.

        Args:
            documents: A file of documents.
            encoded: Its encoded file.

        Yields:
            The encoded rows, of length R; for each rule the R labels; and R weights without caps.
        """
        schema = read_schema(documents)
        stored = {find_stored_column(rule.column, schema) for rule in self.rules}
        columns = read_columns(documents, stored.__contains__)
        for batch, rows in zip(columns, read_batches(encoded), strict=True):
            weights = np.ones(rows.num_rows)
            labels = []
            for rule in self.rules:
                found, factors = _weigh_rows(rule, batch)
                labels.append(found)
                weights *= factors
            yield rows, labels, weights


def find_stored_column(column: str, schema: pa.Schema) -> str:
    """Find the stored column that a rule reads.

    Args:
        column: The column of a rule.
        schema: Schema of the documents.

    Returns:
        The column itself, or the one that it follows from.
    """
    return DERIVED[column][0] if column not in schema.names and column in DERIVED else column


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _weigh_rows(rule: SamplingRule, batch: pa.RecordBatch) -> tuple[Labels, NDArray[np.float64]]:
    """Return the label and the weight of each document by one rule."""
    match rule:
        case ValueWeightsConfig():
            values = _read_values(rule.column, batch)
            labels = [value if value in rule.weights else "(other)" for value in values]
            factors = [rule.weights.get(value, rule.other) for value in values]
            return labels, np.array(factors, np.float64)
        case BucketWeightsConfig():
            cells = batch.column(rule.column)
            numbers = cells.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
            buckets = np.searchsorted(np.array(rule.edges), numbers, side="right")
            buckets[np.isnan(numbers)] = len(rule.weights)
            names = [*_name_buckets(rule), NO_VALUE]
            factors = np.array([*rule.weights, rule.missing])[buckets]
            return [names[bucket] for bucket in buckets.tolist()], factors
        case CapConfig():
            return _read_values(rule.column, batch), np.ones(batch.num_rows)
        case unreachable:
            assert_never(unreachable)


def _read_values(column: str, batch: pa.RecordBatch) -> Labels:
    stored = find_stored_column(column, batch.schema)
    cells = read_cells(batch.column(stored))
    if stored != column:
        derive = DERIVED[column][1]
        return [derive(cell or "") or NO_VALUE for cell in cells]
    return [
        NO_VALUE
        if cell is None or cell == ""
        else str(cell).lower()
        if isinstance(cell, bool)
        else str(cell)
        for cell in cells
    ]


def _name_buckets(rule: BucketWeightsConfig) -> Labels:
    edges = [f"{edge:g}" for edge in rule.edges]
    inner = [f"{low} to {high}" for low, high in pairwise(edges)]
    return [f"below {edges[0]}", *inner, f"{edges[-1]} and above"]


def _hash_values(rule: int, values: Labels) -> NDArray[np.uint64]:
    """Return a key of each value that is different for each cap."""
    digests = {
        value: xxhash.xxh64_intdigest(value.encode("utf-8", "surrogatepass"), rule)
        for value in set(values)
    }
    return np.array([digests[value] for value in values], np.uint64)


def _mask_training(rows: pa.RecordBatch) -> NDArray[np.bool_]:
    mask: NDArray[np.bool_] = rows.column("heldout").to_numpy() == 0
    return mask


def write_cap_keys(
    report: Report, *, documents: Path, encoded: Path, output: Path, sampler: Sampler
) -> dict[str, Any]:
    """Write the keys of the training documents of one file that have a weight above 0.

    Args:
        report: Progress callback, in documents.
        documents: The file of documents.
        encoded: Its encoded file.
        output: The file of keys to write.
        sampler: The rules.

    Returns:
        `keys`, their number.
    """
    keys, ranks, rules = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)], [np.zeros(0, np.uint8)]
    for rows, labels, weights in sampler.iter_weights(documents, encoded):
        ids = rows.column("id").to_pylist()
        own = hash_positions(ids, "cap", sampler.seed)
        for number, _ in sampler.caps:
            has_value = np.array([label != NO_VALUE for label in labels[number]], np.bool_)
            chosen = _mask_training(rows) & (weights > 0) & has_value
            keys.append(_hash_values(number, labels[number])[chosen])
            ranks.append(own[chosen])
            rules.append(np.full(int(chosen.sum()), number, np.uint8))
        report(rows.num_rows, 0)
    columns = [np.concatenate(parts) for parts in (keys, ranks, rules)]
    order = np.lexsort((columns[1], columns[0]))
    with ArrowFileWriter(output, KEY_SCHEMA) as writer:
        arrays = [pa.array(column[order]) for column in columns]
        writer.write(pa.record_batch(arrays, schema=KEY_SCHEMA))
    return {"keys": len(order)}


def write_cutoffs(
    report: Report,
    *,
    sources: Sequence[Path],
    output: Path,
    number: int,
    ranges: int,
    sampler: Sampler,
) -> dict[str, Any]:
    """Write the cut-offs of one range of keys.

    Args:
        report: Progress callback, in documents.
        sources: Files of keys.
        output: The file of cut-offs to write.
        number: Index of the range.
        ranges: Number of ranges.
        sampler: The rules.

    Returns:
        `values`, the number of values above their cap.
    """
    found = []
    for source in sources:
        for batch in read_batches(source):
            keys = batch.column("key").to_numpy()
            begin, end = (
                int(np.searchsorted(keys, np.uint64((edge << 64) // ranges)))
                if edge < ranges
                else len(keys)
                for edge in (number, number + 1)
            )
            found.append(batch.slice(begin, end - begin))
            report(end - begin, 0)
    keys, ranks, rules = (
        np.concatenate([part.column(name).to_numpy() for part in found])
        for name in KEY_SCHEMA.names
    )
    order = np.lexsort((ranks, keys))
    keys, ranks, rules = keys[order], ranks[order], rules[order]
    limits = np.zeros(256, np.int64)
    for place, cap in sampler.caps:
        limits[place] = cap.max_documents
    own, starts, counts = np.unique(keys, return_index=True, return_counts=True)
    most = limits[rules[starts]] if len(starts) else counts
    above = counts > most
    last = starts[above] + most[above] - 1
    with ArrowFileWriter(output, CUTOFF_SCHEMA) as writer:
        arrays = [pa.array(own[above]), pa.array(ranks[last])]
        writer.write(pa.record_batch(arrays, schema=CUTOFF_SCHEMA))
    return {"values": int(above.sum())}


class _Cutoffs:
    """The last rank that stays of each value above its cap. Their files are mapped, not read: there
    may be as many values as documents.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._ranges = [
            (batch.column("key").to_numpy(), batch.column("rank").to_numpy())
            for path in paths
            for batch in read_batches(path)
            if batch.num_rows
        ]

    def mask_above(self, keys: NDArray[np.uint64], ranks: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return a mask of the documents that come after the last one of their value."""
        above = np.zeros(len(keys), np.bool_)
        for own, last in self._ranges:
            places = np.minimum(np.searchsorted(own, keys), len(own) - 1)
            above |= (own[places] == keys) & (ranks > last[places])
        return above


def sample_file(
    report: Report,
    *,
    documents: Path,
    encoded: Path,
    cutoffs: Sequence[Path],
    output: Path,
    sampler: Sampler,
) -> dict[str, Any]:
    """Write the rows of one encoded file that are in the training tokens, each as often as there,
    and the held-out ones.

    Args:
        report: Progress callback, in documents.
        documents: The file of documents.
        encoded: Its encoded file.
        cutoffs: Files of `write_cutoffs`; empty without caps.
        output: The encoded file to write.
        sampler: The rules.

    Returns:
        `rules`: for each rule {label: [documents, tokens, copies, tokens of copies]}, and
        `training`, the number of training rows written.

    Raises:
        DataError: The weights of a document are above `MAX_COPIES` together.
    """
    limits = _Cutoffs(cutoffs)
    counts: list[Counts] = [{} for _ in sampler.rules]
    training = 0
    with ArrowFileWriter(output, read_schema(encoded)) as writer:
        for rows, labels, weights in sampler.iter_weights(documents, encoded):
            ids = rows.column("id").to_pylist()
            ranks = hash_positions(ids, "cap", sampler.seed)
            for number, _ in sampler.caps:
                keys = _hash_values(number, labels[number])
                above = limits.mask_above(keys, ranks)
                labels[number] = [_ABOVE if one else _WITHIN for one in above.tolist()]
                weights[above] = 0
            is_training = _mask_training(rows)
            copies = np.where(is_training, _draw_copies(ids, weights, sampler.seed), 1)
            tokens = np.diff(rows.column("tokens").offsets.to_numpy()).astype(np.int64)
            for found, own in zip(counts, labels, strict=True):
                _count_labels(found, own, tokens, copies, is_training)
            training += int(copies[is_training].sum())
            writer.write(_repeat_rows(rows, copies, sampler.seed))
            report(rows.num_rows, 0)
    return {"rules": counts, "training": training}


def _draw_copies(ids: Sequence[str], weights: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    """Return the copies of each document: the whole part of its weight, and one more for a share
    of the documents that is the rest.
    """
    if (weights > MAX_COPIES).any():
        row = int(np.argmax(weights))
        raise DataError(
            f"document {ids[row]} has a weight of {weights[row]:g} by the rules of data.sampling "
            f"together, and {MAX_COPIES} is the most. Lower a weight."
        )
    whole = np.floor(weights)
    draws = hash_positions(ids, "sampling", seed) / 2.0**64
    copies: NDArray[np.int64] = (whole + (draws < weights - whole)).astype(np.int64)
    return copies


def _count_labels(
    counts: Counts,
    labels: Labels,
    tokens: NDArray[np.int64],
    copies: NDArray[np.int64],
    is_training: NDArray[np.bool_],
) -> None:
    own = np.array(labels, object)
    for label in sorted(set(labels)):
        chosen = is_training & (own == label)
        sums = counts.setdefault(label, [0, 0, 0, 0])
        sums[0] += int(chosen.sum())
        sums[1] += int(tokens[chosen].sum())
        sums[2] += int(copies[chosen].sum())
        sums[3] += int((tokens * copies)[chosen].sum())


def _repeat_rows(rows: pa.RecordBatch, copies: NDArray[np.int64], seed: int) -> pa.RecordBatch:
    """Return each row as often as it has copies, which have places of their own in the shuffle."""
    sources = np.repeat(np.arange(rows.num_rows), copies)
    nth = np.arange(len(sources)) - np.repeat(np.cumsum(copies) - copies, copies)
    repeated = rows.take(pa.array(sources))
    places = repeated.column("place").to_numpy().copy()
    ids = repeated.column("id").to_pylist()
    # Copies of the files of a repository are next to each other, too.
    is_grouped = "repository" in repeated.schema.names
    groups = repeated.column("repository") if is_grouped else pa.nulls(len(ids))
    for number in range(1, int(nth.max(initial=0)) + 1):
        chosen = np.flatnonzero(nth == number)
        own = [ids[row] for row in chosen.tolist()]
        places[chosen] = compute_places(
            own, groups.take(pa.array(chosen)), f"shuffle copy {number}", seed
        )
    index = repeated.schema.get_field_index("place")
    return repeated.set_column(index, repeated.schema.field(index), pa.array(places))
