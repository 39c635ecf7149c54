"""Token ids of documents that an earlier config encoded with the same tokenizer.

Reads an encoded file of that config, whose rows have a digest of their text.

Invariants:
    - Ids are taken over for texts of the same digest, and no others. It is a cryptographic one,
      because anybody may have written the texts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens
from llmsys.storage.arrow_file import read_columns, read_schema

# Column of the digest of the text.
DIGEST = "text_digest"


class KnownTokens:
    """Ids by the digest of a text, without begin and end ids."""

    def __init__(self, digests: Sequence[bytes], tokens: RaggedTokens) -> None:
        """Remember the ids.

        Args:
            digests: Digest of each text.
            tokens: Its ids.
        """
        self._rows = {digest: row for row, digest in enumerate(digests)}
        self._tokens = tokens

    def encode_others(
        self, digests: Sequence[bytes], encode: Callable[[Integers], RaggedTokens]
    ) -> RaggedTokens:
        """Return the ids of texts, of which only those that are not known are encoded.

        Args:
            digests: Digest of each text.
            encode: Encode the texts at these indices.

        Returns:
            The ids of all of them, in order.
        """
        places = np.array([self._rows.get(digest, -1) for digest in digests], np.int64)
        others = np.flatnonzero(places < 0)
        known = self._tokens.take_rows(places[places >= 0])
        if not len(others):
            return known
        fresh = encode(others)
        order = np.empty(len(places), np.int64)
        order[places >= 0] = np.arange(len(known.lengths))
        order[others] = np.arange(len(known.lengths), len(places))
        both = RaggedTokens(
            np.concatenate([known.values.astype(fresh.values.dtype), fresh.values]),
            np.concatenate([known.lengths, fresh.lengths]),
        )
        return both.take_rows(order)


def read_known_tokens(path: Path) -> KnownTokens:
    """Read the ids of an encoded file.

    Args:
        path: Encoded file of an earlier config; its rows end with the end-of-sequence id.

    Returns:
        The ids without it.
    """
    columns = ("tokens", DIGEST)
    schema = pa.schema([read_schema(path).field(name) for name in columns])
    table = pa.Table.from_batches(read_columns(path, columns.__contains__), schema=schema)
    tokens = table.column("tokens").combine_chunks()
    offsets = tokens.offsets.to_numpy().astype(np.int64)
    is_text = np.ones(len(tokens.values), np.bool_)
    is_text[offsets[1:] - 1] = False
    return KnownTokens(
        table.column(DIGEST).to_pylist(),
        RaggedTokens(tokens.values.to_numpy()[is_text], np.diff(offsets) - 1),
    )
