"""Token ids of documents that an earlier config encoded with the same tokenizer.

Reads an encoded file of that config, whose rows have a digest of their text.

Invariants:
    - Ids are taken over for texts of the same digest, and no others. It is a cryptographic one,
      because anybody may have written the texts.
    - Memory: 24 bytes for each document of the file. Its ids stay in the mapped file.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens
from llmsys.storage.arrow_file import read_batches

_HALVES = np.dtype([("first", ">u8"), ("second", ">u8")])


class KnownTokens:
    """Ids by the digest of a text."""

    def __init__(self, tokens: Sequence[pa.ListArray], digests: Sequence[pa.Array]) -> None:
        """Index the digests.

        Args:
            tokens: Rows of ids by batch; each ends with the end-of-sequence id.
            digests: The 16-byte digest of the text of each row, by batch.
        """
        self._tokens = tokens
        self._starts = np.cumsum([0, *map(len, self._tokens)])
        halves = np.concatenate([np.zeros(0, _HALVES), *map(_split_digests, digests)])
        self._rows = np.argsort(halves["first"], kind="stable")
        self._first = halves["first"][self._rows].astype(np.uint64)
        self._second = halves["second"][self._rows].astype(np.uint64)

    def encode_others(
        self, digests: Sequence[bytes], encode: Callable[[Integers], RaggedTokens]
    ) -> RaggedTokens:
        """Return the ids of texts, of which only those that are not known are encoded.

        Args:
            digests: Digest of each text.
            encode: Encode the texts at these indices.

        Returns:
            The ids of all of them, in order and without end ids.
        """
        rows = self._find_rows(np.frombuffer(b"".join(digests), _HALVES))
        is_known = rows >= 0
        others = np.flatnonzero(~is_known)
        parts = list(self._iter_parts(rows[is_known]))
        if len(others) or not parts:
            parts.append(encode(others))
        order = np.empty(len(rows), np.int64)
        order[is_known] = np.arange(len(rows) - len(others))
        order[others] = np.arange(len(rows) - len(others), len(rows))
        # All have the type of what is encoded now, if anything is.
        kind = parts[-1].values.dtype
        return RaggedTokens(
            np.concatenate([part.values.astype(kind, copy=False) for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        ).take_rows(order)

    def _find_rows(self, wanted: npt.NDArray[np.void]) -> Integers:
        """Return the row of each digest; -1 for one that is not known."""
        if not len(self._rows):
            return np.full(len(wanted), -1, np.int64)
        first = wanted["first"].astype(np.uint64)
        places = np.minimum(np.searchsorted(self._first, first), len(self._rows) - 1)
        # Of several texts with one first half only the first is known, which costs its time alone.
        is_equal = (self._first[places] == first) & (
            self._second[places] == wanted["second"].astype(np.uint64)
        )
        return np.where(is_equal, self._rows[places], -1)

    def _iter_parts(self, rows: Integers) -> Iterator[RaggedTokens]:
        """Yield the ids of rows, those of one batch that follow each other at a time."""
        numbers = np.searchsorted(self._starts, rows, side="right") - 1
        edges = np.flatnonzero(np.diff(numbers, prepend=-1, append=-1))
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            number = int(numbers[start])
            places = pa.array(rows[start:stop] - self._starts[number])
            yield _strip_ends(self._tokens[number].take(places))


def _split_digests(digests: pa.Array) -> npt.NDArray[np.void]:
    return np.frombuffer(b"".join(digests.to_pylist()), _HALVES)


def _strip_ends(tokens: pa.ListArray) -> RaggedTokens:
    """Return rows without their last ids."""
    lengths = np.diff(tokens.offsets.to_numpy()).astype(np.int64)
    values = tokens.flatten().to_numpy()
    is_text = np.ones(len(values), np.bool_)
    is_text[np.cumsum(lengths) - 1] = False
    return RaggedTokens(values[is_text], lengths - 1)


def read_known_tokens(path: Path, digest: str) -> KnownTokens:
    """Map an encoded file and index its digests.

    Args:
        path: Encoded file of an earlier config.
        digest: Name of the column of digests.

    Returns:
        The ids.

    Raises:
        DataError: The file is damaged.
    """
    batches = list(read_batches(path))
    return KnownTokens(
        [batch.column("tokens") for batch in batches], [batch.column(digest) for batch in batches]
    )
