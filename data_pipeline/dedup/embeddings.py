"""Embeddings of documents: their columns, and whole numbers whose products are exact.

A unit vector times `SCALE`, rounded to whole numbers, has products that float32 holds exactly: by
Cauchy-Schwarz no sum of them passes 2^24, in whatever order a library adds. So clusters do not
depend on threads, batches or the processor. Where a cosine decides about a document it is computed
from the stored numbers, in float64.

Invariants:
    - Stored embeddings have length 1, as far as their type can hold it, and finite numbers.
    - A cosine of whole numbers differs from that of the stored ones by at most `compute_slack`.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from llmsys.errors import DataError

Floats = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.int64]
MAX_NUMBERS = 32_768
# With half a step of rounding for each of MAX_NUMBERS: (4000 + sqrt(32768) / 2)² < 2^24.
SCALE = 4_000
_PAIR_BYTES = 32_000_000  # of pairs whose cosines are computed at a time

Precision = Literal["float16", "float32"]


def build_embedding_schema(precision: Precision) -> pa.Schema:
    """Return the columns of stored embeddings.

    Args:
        precision: Type of their numbers.

    Returns:
        `high`, the hash of the embedding; the hash of the text; row and rank of the document; the
        embedding.
    """
    return pa.schema(
        [
            ("high", pa.uint64()),
            ("text_high", pa.uint64()),
            ("text_low", pa.uint64()),
            *_RANK,
            ("embedding", pa.list_(pa.type_for_alias(precision))),
        ]
    )


# Documents sort by it: the longest first, then the smallest id.
_RANK = (
    ("row", pa.int64()),
    ("shortness", pa.int64()),
    ("id_high", pa.uint64()),
    ("id_low", pa.uint64()),
)


def build_assigned_schema(precision: Precision) -> pa.Schema:
    """Return the columns of embeddings with their clusters.

    Args:
        precision: Type of their numbers.

    Returns:
        `high`, the key of the cluster; row and rank of the document; the embedding.
    """
    embedding = ("embedding", pa.list_(pa.type_for_alias(precision)))
    return pa.schema([("high", pa.uint64()), *_RANK, embedding])


def normalize_embeddings(
    values: Floats, precision: Precision
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Scale embeddings to length 1.

    Args:
        values: (N, numbers).
        precision: Type of the result.

    Returns:
        The embeddings that have a direction, and a mask (N,) of them: one with a number that is not
        finite, or with zeros alone, has none.
    """
    wide = np.asarray(values, np.float64)
    usable = np.asarray(np.isfinite(wide).all(axis=1), np.bool_)
    wide = np.where(usable[:, None], wide, 0.0)
    # Of the largest number first, so that no square overflows.
    largest = np.abs(wide).max(axis=1, initial=0.0)
    usable &= largest > 0
    wide = wide[usable] / largest[usable, None]
    return (wide / compute_lengths(wide)[:, None]).astype(precision), usable


def compute_lengths(values: Floats) -> npt.NDArray[np.float64]:
    """Compute Euclidean lengths, each from its own row alone.

    Args:
        values: (N, numbers).

    Returns:
        (N,) float64.
    """
    wide = np.ascontiguousarray(values, np.float64)
    # Not by BLAS, whose order of sums depends on the number of rows.
    return np.asarray(np.sqrt((wide * wide).sum(axis=1)), np.float64)


def hash_embeddings(values: Floats) -> npt.NDArray[np.uint64]:
    """Hash stored embeddings with xxh3_64.

    Args:
        values: (N, numbers).

    Returns:
        (N,) uint64.
    """
    rows = (xxhash.xxh3_64_intdigest(row.tobytes()) for row in values)
    return np.fromiter(rows, np.uint64, len(values))


def round_embeddings(values: Floats) -> npt.NDArray[np.float32]:
    """Return stored embeddings, or other vectors, as whole numbers.

    Args:
        values: (N, numbers), none of them zeros alone.

    Returns:
        (N, numbers) float32: unit vectors times `SCALE`, rounded.
    """
    wide = np.asarray(values, np.float64)
    return np.rint(wide * (SCALE / compute_lengths(wide))[:, None]).astype(np.float32)


def compute_slack(numbers: int) -> float:
    """Compute the error that rounding to whole numbers makes in a cosine.

    Args:
        numbers: Length of an embedding.

    Returns:
        The largest difference.
    """
    shift = float(np.sqrt(numbers)) / (2 * SCALE)
    # Of either vector, and of both; and what float64 has rounded before.
    return 2 * shift + shift * shift + 1e-9


def compute_cosines(left: Floats, right: Floats) -> npt.NDArray[np.float64]:
    """Compute the cosine of each pair of stored embeddings, from its own rows alone.

    Args:
        left: (N, numbers).
        right: (N, numbers).

    Returns:
        (N,) float64, the same with the sides exchanged.
    """
    lefts = np.ascontiguousarray(left, np.float64)
    rights = np.ascontiguousarray(right, np.float64)
    lengths = compute_lengths(lefts) * compute_lengths(rights)
    return np.asarray((lefts * rights).sum(axis=1) / lengths, np.float64)


def find_nearest(
    rows: Floats, others: Floats, threshold: float
) -> tuple[npt.NDArray[np.float64], Integers]:
    """Find for each row the nearest of the others, if its cosine reaches the threshold.

    Args:
        rows: (N, numbers) stored embeddings.
        others: (M, numbers) stored embeddings.
        threshold: Minimum cosine.

    Returns:
        (N,) cosines, -inf without such an other, and (N,) numbers of the others; the first of
        equally near ones.
    """
    best = np.full(len(rows), -np.inf)
    nearest = np.full(len(rows), -1, np.int64)
    near = mask_near_pairs(round_embeddings(rows), round_embeddings(others), threshold)
    lefts, rights = np.nonzero(near)
    step = max(1, _PAIR_BYTES // (16 * max(1, rows.shape[1])))
    for start in range(0, len(lefts), step):
        left = lefts[start : start + step]
        right = rights[start : start + step]
        cosines = compute_cosines(rows[left], others[right])
        # By row, then falling cosine; others rise within a row already.
        order = np.lexsort([right, -cosines, left])
        first = order[np.flatnonzero(np.diff(left[order], prepend=-1))]
        first = first[(cosines[first] >= threshold) & (cosines[first] > best[left[first]])]
        best[left[first]] = cosines[first]
        nearest[left[first]] = right[first]
    return best, nearest


def mask_near_pairs(
    rows: npt.NDArray[np.float32], others: npt.NDArray[np.float32], threshold: float
) -> npt.NDArray[np.bool_]:
    """Mask the pairs whose cosine may reach a threshold: all that do, and few more.

    Args:
        rows: (N, numbers) whole numbers, as of `round_embeddings`.
        others: (M, numbers) whole numbers.
        threshold: Minimum cosine.

    Returns:
        (N, M) mask.
    """
    limit = (threshold - compute_slack(rows.shape[1])) * SCALE * SCALE
    return np.asarray(rows @ others.T >= np.float32(np.floor(limit)), np.bool_)


def require_numbers(numbers: int, place: str) -> None:
    """Check the length of an embedding.

    Args:
        numbers: Its numbers.
        place: What messages call it.

    Raises:
        DataError: It has too many.
    """
    if numbers > MAX_NUMBERS:
        raise DataError(
            f"{place} has {numbers:,} numbers, above {MAX_NUMBERS:,}. Take an encoder with fewer."
        )
