"""Ids that an earlier config made are taken over for equal texts, in the order of the new ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from llmsys.data_pipeline.text.ragged_arrays import Integers
from llmsys.data_pipeline.tokenize.encode_documents import DIGEST_FIELD, hash_text_column
from llmsys.data_pipeline.tokenize.known_tokens import read_known_tokens
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens
from llmsys.dataset.token_shards import ArrowFileWriter

BEFORE = ["the first", "", "the second", "the second", "ü"]
SCHEMA = pa.schema([pa.field("tokens", pa.list_(pa.uint16())), DIGEST_FIELD])
END = 999


def encode(texts: Sequence[str]) -> RaggedTokens:
    """A token is a byte."""
    data = [text.encode() for text in texts]
    return RaggedTokens(
        np.frombuffer(b"".join(data), np.uint8).astype(np.uint16),
        np.array([len(one) for one in data], np.int64),
    )


def hash_texts(texts: Sequence[str]) -> list[bytes]:
    return hash_text_column(pa.array(texts, pa.string()))


def write_encoded(path: Path, parts: Sequence[Sequence[str]]) -> Path:
    """Write a file of an earlier config, a batch for each part."""
    with ArrowFileWriter(path, SCHEMA) as writer:
        for texts in parts:
            rows = [[*text.encode(), END] for text in texts]
            columns = [pa.array(rows, SCHEMA.field(0).type), pa.array(hash_texts(texts))]
            writer.write(
                pa.record_batch([columns[0], columns[1].cast(DIGEST_FIELD.type)], schema=SCHEMA)
            )
    return path


@pytest.mark.parametrize("sizes", [(5,), (2, 0, 3), (1, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("texts", "encoded"),
    [
        (["the second", "new", "", "the first", "newer"], ["new", "newer"]),
        (["ü", "the first"], []),
        (["", "", "the second"], []),
        (["The first", "u"], ["The first", "u"]),
        ([], []),
    ],
    ids=["some", "all", "repeated", "none", "no document"],
)
def test_only_new_texts_are_encoded_and_all_are_in_order(
    texts: list[str], encoded: list[str], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    starts = np.cumsum([0, *sizes]).tolist()
    parts = [BEFORE[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    path = write_encoded(tmp_path / "encoded.arrow", parts)
    known = read_known_tokens(path, DIGEST_FIELD.name)
    asked: list[str] = []

    def encode_rows(rows: Integers) -> RaggedTokens:
        asked.extend(texts[row] for row in rows)
        return encode([texts[row] for row in rows])

    found, expected = known.encode_others(hash_texts(texts), encode_rows), encode(texts)
    assert asked == encoded
    assert found.values.dtype == expected.values.dtype
    assert found.values.tolist() == expected.values.tolist()
    assert found.lengths.tolist() == expected.lengths.tolist()


def test_of_a_file_without_documents_nothing_is_known(tmp_path: Path) -> None:
    known = read_known_tokens(write_encoded(tmp_path / "encoded.arrow", []), DIGEST_FIELD.name)
    found = known.encode_others(hash_texts(BEFORE), lambda rows: encode(BEFORE))
    assert found.values.tolist() == encode(BEFORE).values.tolist()


def test_texts_whose_digests_agree_in_one_half_are_others(tmp_path: Path) -> None:
    path = write_encoded(tmp_path / "encoded.arrow", [BEFORE])
    known = read_known_tokens(path, DIGEST_FIELD.name)
    digest = hash_texts(["the first"])[0]
    twins = [digest[:8] + bytes(8), bytes(8) + digest[8:], digest]
    asked: list[int] = []

    def encode_rows(rows: Integers) -> RaggedTokens:
        asked.extend(rows.tolist())
        return encode(["a", "b"])

    found = known.encode_others(twins, encode_rows)
    assert asked == [0, 1]
    assert found.values.tolist() == list(b"abthe first")


def test_a_missing_text_counts_as_empty() -> None:
    assert hash_text_column(pa.array([None, ""], pa.string())) == hash_texts(["", ""])
