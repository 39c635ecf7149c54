"""Ids that an earlier config made are taken over for equal texts, in the order of the new ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.tokenize.encode_documents import DIGEST_FIELD, hash_text_column
from llmsys.data_pipeline.tokenize.known_tokens import KnownTokens, read_known_tokens
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens
from llmsys.dataset.token_shards import ArrowFileWriter


def encode(texts: Sequence[str]) -> RaggedTokens:
    """A token is a byte."""
    data = [text.encode() for text in texts]
    return RaggedTokens(
        np.frombuffer(b"".join(data), np.uint8).astype(np.uint16),
        np.array([len(one) for one in data], np.int64),
    )


def hash_texts(texts: Sequence[str]) -> list[bytes]:
    return hash_text_column(pa.array(texts, pa.string()))


BEFORE = ["the first", "", "the second", "the second", "ü"]


@pytest.mark.parametrize(
    ("texts", "encoded"),
    [
        (["the second", "new", "", "the first", "newer"], ["new", "newer"]),
        (["ü", "the first"], []),
        (["The first", "u"], ["The first", "u"]),
        ([], []),
    ],
)
def test_only_new_texts_are_encoded_and_all_are_in_order(
    texts: list[str], encoded: list[str]
) -> None:
    asked: list[str] = []

    def encode_rows(rows: Integers) -> RaggedTokens:
        asked.extend(texts[row] for row in rows)
        return encode([texts[row] for row in rows])

    known = KnownTokens(hash_texts(BEFORE), encode(BEFORE))
    found, expected = known.encode_others(hash_texts(texts), encode_rows), encode(texts)
    assert asked == encoded
    assert found.values.tolist() == expected.values.tolist()
    assert found.lengths.tolist() == expected.lengths.tolist()


@pytest.mark.parametrize("sizes", [(5,), (2, 3), ()], ids=str)
def test_an_encoded_file_is_read_without_its_end_ids(tmp_path: Path, sizes: tuple[int]) -> None:
    path = tmp_path / "encoded.arrow"
    schema = pa.schema([pa.field("tokens", pa.list_(pa.uint16())), DIGEST_FIELD])
    texts = BEFORE[: sum(sizes)]
    starts = np.cumsum([0, *sizes])
    with ArrowFileWriter(path, schema) as writer:
        for first, size in zip(starts, sizes, strict=False):
            part = texts[first : first + size]
            rows = [[*text.encode(), 999] for text in part]
            columns = [pa.array(rows, schema.field(0).type), pa.array(hash_texts(part))]
            writer.write(pa.record_batch([columns[0], columns[1].cast(DIGEST_FIELD.type)], schema))
    known = read_known_tokens(path)
    found = known.encode_others(hash_texts(texts), lambda rows: encode([]))
    assert found.values.tolist() == encode(texts).values.tolist()
    assert found.lengths.tolist() == encode(texts).lengths.tolist()


def test_a_missing_text_counts_as_empty() -> None:
    assert hash_text_column(pa.array([None, ""], pa.string())) == hash_texts(["", ""])
