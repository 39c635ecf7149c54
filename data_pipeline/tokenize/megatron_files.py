"""Read Megatron-LM's indexed datasets (.idx and .bin) into token rows: documents whose ids stay as
they are.

Reads megatron/core/datasets/indexed_dataset.py's format: a header, the length and byte offset of
each sequence, and the first sequence of each document. A document that does not end with the
end-of-sequence id of the tokenizer gets one.

Invariants:
- The index and the size of .bin agree before any id is read. An id outside of the vocabulary is an
  error.
"""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from llmsys.config.data import TokensConfig
from llmsys.data_pipeline.core.document_schema import hash_positions, is_heldout
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.tokenize.encode_documents import build_encoded_schema, build_list_array
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import load_tokenizer

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<QBQQ")
# Codes 6 and 7 are floats, which are no ids.
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_PART_TOKENS = 1 << 23
_BATCH_TOKENS = 1 << 20


@dataclass(frozen=True)
class TokenPart:
    """Documents `first` to `last` (exclusive) of an indexed dataset, and their number of tokens.

    Attributes:
        path: the index file; the ids are in the .bin file of the same name.
        is_heldout: True, False, or None where the share of the config decides.
    """

    path: Path
    first: int
    last: int
    tokens: int
    is_heldout: bool | None


class MegatronDataset:
    """The sequences and documents of one index file."""

    def __init__(self, path: Path) -> None:
        """Read the index. Raise DataError if it is missing, damaged or does not fit its .bin
        file.
        """
        self.path = path
        self.data = path.with_suffix(".bin")
        try:
            content = path.read_bytes()
            size = self.data.stat().st_size
        except OSError as error:
            raise DataError(
                f"data.inputs: {error.filename} cannot be read: {error.strerror}. Name index "
                "files, such as data.inputs='[tokens_text_document.idx]', with their .bin files "
                "next to them."
            ) from None
        start = len(_MAGIC) + _HEADER.size
        if not content.startswith(_MAGIC) or len(content) < start:
            raise DataError(
                f"{path} is no index of Megatron-LM: it does not begin with MMIDIDX. Name an .idx "
                "file."
            )
        version, code, sequences, documents = _HEADER.unpack_from(content, len(_MAGIC))
        if version != 1 or code not in _DTYPES:
            raise DataError(
                f"{path} has version {version} and dtype {code}; 1 and integers are read. Write "
                "it again."
            )
        self.dtype = np.dtype(_DTYPES[code])
        if len(content) < start + 12 * sequences + 8 * documents or not documents:
            raise DataError(
                f"{path} is cut off: {len(content):,} bytes for {sequences:,} sequences. Copy it "
                "again."
            )
        self.lengths = np.frombuffer(content, "<i4", sequences, start).astype(np.int64)
        self.offsets = np.frombuffer(content, "<i8", sequences, start + 4 * sequences)
        self.borders = np.frombuffer(content, "<i8", documents, start + 12 * sequences)
        self._check(size)

    def _check(self, size: int) -> None:
        ends = self.offsets + self.lengths * self.dtype.itemsize
        if ((self.lengths < 0) | (self.offsets < 0)).any() or (
            len(ends) and int(ends.max()) > size
        ):
            raise DataError(
                f"{self.data} has {size:,} bytes, and its index names "
                f"{int(ends.max(initial=0)):,}. Copy both again."
            )
        if (
            int(self.borders[0])
            or int(self.borders[-1]) != len(self.lengths)
            or (np.diff(self.borders) < 0).any()
        ):
            raise DataError(
                f"{self.path}: the borders of its documents do not fit its sequences. Write it "
                "again."
            )

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.borders) - 1

    def count_document_tokens(self) -> Any:
        """Return the tokens of each document, (documents,) int64."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        return np.diff(before[self.borders])

    def iter_documents(self, first: int, last: int) -> Iterator[Any]:
        """Yield the ids of documents, (T,) of the file's dtype."""
        ids = (
            np.memmap(self.data, self.dtype, "r")
            if self.data.stat().st_size
            else np.zeros(0, self.dtype)
        )
        size = self.dtype.itemsize
        for begin, end in pairwise(self.borders[first : last + 1].tolist()):
            spans = zip(
                self.offsets[begin:end].tolist(), self.lengths[begin:end].tolist(), strict=True
            )
            yield np.concatenate(
                [np.zeros(0, self.dtype), *(ids[at // size : at // size + n] for at, n in spans)]
            )


def list_parts(path: Path, is_heldout: bool | None) -> list[TokenPart]:
    """Divide an indexed dataset into parts of about eight million tokens.

    Args:
        path: its index file.
        is_heldout: whether its documents are held out; None where the share of the config decides.

    Returns:
        Parts in the order of the file.
    """
    tokens = MegatronDataset(path).count_document_tokens()
    number = np.cumsum(tokens) // _PART_TOKENS
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(tokens)]
    return [
        TokenPart(path, first, last, int(tokens[first:last].sum()), is_heldout)
        for first, last in pairwise(edges)
        if last > first
    ]


def read_token_part(
    report: Report, *, part: TokenPart, output: Path, model: Path, data: TokensConfig
) -> dict[str, Any]:
    """Write the documents of one part as token rows. Progress is in tokens.

    Args:
        report: progress callback.
        part: the documents.
        output: the file of token rows to write.
        model: the tokenizer of the ids.
        data: seeds and the share of held-out documents.

    Returns:
        `documents`, and `empty`: how many had no token and were left out.

    Raises:
        DataError: an id is not of the tokenizer's vocabulary.
    """
    tokenizer = load_tokenizer(model)
    dataset = MegatronDataset(part.path)
    schema = build_encoded_schema(tokenizer.vocab_size)
    rows: list[tuple[int, Any, int]] = []
    documents = pending = 0
    with ArrowFileWriter(output, schema) as writer:

        def flush() -> None:
            if rows:
                writer.write(_build_token_rows(rows, part, data, schema))
                report(sum(len(ids) for _, ids, _ in rows), 0)
                rows.clear()

        for number, ids in enumerate(dataset.iter_documents(part.first, part.last), part.first):
            if not len(ids):
                continue
            if int(ids.min()) < 0 or int(ids.max()) >= tokenizer.vocab_size:
                raise DataError(
                    f"{part.path}: document {number:,} has the id {int(ids.max())}, and the "
                    f"tokenizer has {tokenizer.vocab_size:,}. Give the tokenizer that made the "
                    "ids in tokenizer.path."
                )
            text = ids[:-1] if int(ids[-1]) == tokenizer.eos_id else ids
            ended = (
                np.append(text, ids.dtype.type(tokenizer.eos_id)) if len(text) == len(ids) else ids
            )
            rows.append((number, ended, len(tokenizer.decode(text.tolist()).encode())))
            documents = documents + 1
            pending = pending + len(ended)
            if pending >= _BATCH_TOKENS:
                flush()
                pending = 0
        flush()
    return {"documents": documents, "empty": part.last - part.first - documents}


def _build_token_rows(
    rows: list[tuple[int, Any, int]], part: TokenPart, data: TokensConfig, schema: pa.Schema
) -> pa.RecordBatch:
    """Build token rows; `offset` is the number of a document in its file."""
    numbers, tokens, sizes = zip(*rows, strict=True)
    ids = [
        hashlib.blake2b(f"{part.path}\0{number}".encode(), digest_size=16).hexdigest()
        for number in numbers
    ]
    held = is_heldout(ids, data.split.heldout_fraction, data.split.seed)
    if part.is_heldout is not None:
        held = np.full(len(ids), part.is_heldout)
    dtype = schema.field("tokens").type.value_type.to_pandas_dtype()
    columns = [
        build_list_array(
            np.concatenate(tokens).astype(dtype), np.array([len(one) for one in tokens]), schema
        ),
        pa.array(ids),
        pa.array([str(part.path)] * len(ids)),
        pa.array(numbers, pa.int64()),
        pa.array(np.zeros(len(ids), np.uint64)),
        pa.array(sizes, pa.int64()),
        pa.array(hash_positions(ids, "shuffle", data.tokens.seed)),
        pa.array(held.astype(np.uint8)),
    ]
    return pa.record_batch(columns, schema=schema)
