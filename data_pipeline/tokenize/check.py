"""Some documents of every run are encoded once more, by the library itself and whole, and must have the same ids.

Reads a batch of documents and the tokens that were made of it. The documents are chosen by the hash of their id, so the
same ones are checked on every machine, and at least one of each batch.
"""

import numpy as np
import pyarrow as pa

from data_pipeline.document import hash_positions
from data_pipeline.rules.ragged import compute_offsets
from data_pipeline.tokenize.memo import RaggedTokens
from llmsys.errors import DataError
from llmsys.tokenizer import Tokenizer

ONE_OF = 256
"""One of so many documents is checked: what that costs is a few hundredths of encoding."""


def check_sample(batch: pa.RecordBatch, tokens: RaggedTokens, tokenizer: Tokenizer) -> int:
    """Compare the sample of a batch with the library and return its size; DataError names the document and token."""
    ids = batch.column("id").to_pylist()
    if not ids:
        return 0
    places = hash_positions(ids, "check", 0)
    rows = np.union1d(np.flatnonzero(places % np.uint64(ONE_OF) == 0), [int(places.argmin())]).tolist()
    expected = tokenizer.encode_batch(batch.column("text").take(pa.array(rows)).to_pylist())
    ends = compute_offsets(tokens.lengths)
    for row, theirs in zip(rows, expected, strict=True):
        ours = tokens.values[ends[row] : ends[row + 1]].tolist()
        if ours != theirs:
            raise DataError(_describe_difference(ids[row], ours, theirs))
    return len(rows)


def _describe_difference(name: str, ours: list[int], theirs: list[int]) -> str:
    place = next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if place is None:
        what = f"has {len(ours):,} tokens, and the library gives it {len(theirs):,}"
    else:
        what = f"has the id {ours[place]} as token {place:,}, where the library has {theirs[place]}"
    return (
        f"document {name} {what}: encoding by columns is not right for this tokenizer, and nothing was kept of it. "
        f"Set data.tokens.encoder=library, which is slower, and please report the fault with the tokenizer."
    )
