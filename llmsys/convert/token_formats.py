"""Write the tokens of a prepared dataset for other trainers: Megatron-LM, nanoGPT, MosaicML
streaming (MDS).

Reads a dataset folder. Documents keep their shuffled order and their end-of-sequence token. The
folder that is written has `train` and `heldout` in the format's own names, and a copy of
`tokenizer/`.

- megatron: train.bin, train.idx, heldout.bin, heldout.idx; the data path is FOLDER/train.
- nanogpt: train.bin and val.bin, ids as uint16 one after another.
- mds: train/ and val/, each with index.json and shards; a sample is a document with the columns
  `id` and `tokens`.

Invariants:
- Memory holds one document, the lengths of all documents (Megatron) or one shard (MDS).
"""

import json
import shutil
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, assert_never, get_args

import numpy as np
from numpy.typing import NDArray

from llmsys.convert.folders import publish_folder
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.errors import DataError
from llmsys.progress import Progress

TokenFormat = Literal["megatron", "nanogpt", "mds"]
FORMATS: tuple[TokenFormat, ...] = get_args(TokenFormat)
Tokens = NDArray[Any]


def convert_tokens(source: Path, destination: Path, form: TokenFormat) -> Path:
    """Write the tokens of a dataset in the format of another trainer.

    Args:
        source: Dataset folder with tokens.
        destination: Folder to create; must not exist.
        form: The format.

    Returns:
        `destination`.

    Raises:
        ConfigError: The destination exists.
        DataError: The dataset has no tokens, is of pairs, or its ids do not fit the format.
    """
    manifest = load_manifest(source)
    splits = [
        split
        for split in ("train", "heldout")
        if split in manifest.splits and manifest.splits[split].documents
    ]
    if not splits or "train_source" in manifest.splits:
        what = "holds pairs or labels" if splits else "has no tokens"
        raise DataError(
            f"{source} {what}; only the tokens of documents are written for other trainers. Give "
            "another."
        )
    if manifest.answers:
        raise DataError(
            f"{source} holds chats, whose loss is on answers alone, which no other format keeps. "
            "Give text."
        )
    size = manifest.vocab_size or 0
    if form == "nanogpt" and size > 1 << 16:
        raise DataError(
            f"{source} has {size:,} ids, and nanoGPT reads uint16, which ends at 65,535. Use "
            "--tokens megatron or mds."
        )
    total = sum(manifest.splits[split].tokens for split in splits)
    with (
        publish_folder(destination) as folder,
        Progress("convert", total=total, unit="tok") as progress,
    ):
        for split in splits:
            shards = open_tokens(source, split)
            with _build_writer(form, folder, split, size) as writer:
                for name, tokens in _iter_documents(shards):
                    writer.write_document(name, tokens)
                    progress.advance(len(tokens))
        shutil.copytree(
            source / "tokenizer", folder / "tokenizer", ignore=shutil.ignore_patterns(".*")
        )
    return destination


def _iter_documents(shards: TokenShards) -> Iterator[tuple[str, Tokens]]:
    for document in range(shards.num_documents):
        yield str(shards.get_lineage(document)["id"]), shards.get_tokens(document)


class _TokenWriter(ABC):
    """A writer of the documents of one split; `close` completes its files."""

    @abstractmethod
    def write_document(self, name: str, tokens: Tokens) -> None:
        """Append one document."""

    @abstractmethod
    def close(self) -> None:
        """Write what comes after the last document."""

    def __enter__(self) -> "_TokenWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


def _build_writer(form: TokenFormat, folder: Path, split: str, vocab_size: int) -> _TokenWriter:
    match form:
        case "megatron":
            return _MegatronWriter(folder / split, vocab_size)
        case "nanogpt":
            return _NanoGptWriter(folder / f"{_get_split_name(split)}.bin")
        case "mds":
            return _MdsWriter(folder / _get_split_name(split), vocab_size)
        case unreachable:
            assert_never(unreachable)


def _get_split_name(split: str) -> str:
    return "val" if split == "heldout" else split


class _NanoGptWriter(_TokenWriter):
    """Ids as uint16."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write_document(self, name: str, tokens: Tokens) -> None:
        self._file.write(tokens.astype("<u2").tobytes())

    def close(self) -> None:
        self._file.close()


class _MegatronWriter(_TokenWriter):
    """megatron/core/datasets/indexed_dataset.py: ids in .bin; lengths, byte offsets and document
    borders in .idx.
    """

    # Megatron's own choice of a dtype (DType.optimal_dtype), with its code in the index.
    _SMALL_VOCABULARY = 65_500
    _UINT16, _INT32 = ("<u2", 8), ("<i4", 4)

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self._index = prefix.with_suffix(".idx")
        self._dtype, self._code = (
            self._UINT16 if vocab_size < self._SMALL_VOCABULARY else self._INT32
        )
        self._file = prefix.with_suffix(".bin").open("wb")
        self._lengths: list[int] = []

    def write_document(self, name: str, tokens: Tokens) -> None:
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._lengths.append(len(tokens))

    def close(self) -> None:
        self._file.close()
        lengths = np.array(self._lengths, "<i4")
        offsets = np.cumsum(lengths, dtype="<i8") - lengths
        borders = np.arange(len(lengths) + 1, dtype="<i8")  # a document is one sequence
        with self._index.open("wb") as file:
            file.write(
                b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, self._code, len(lengths), len(borders))
            )
            for array in (lengths, offsets * np.dtype(self._dtype).itemsize, borders):
                file.write(array.tobytes())


class _MdsWriter(_TokenWriter):
    """streaming/base/format/mds: shards of samples with their offsets, and an index of the
    shards.
    """

    _SHARD_BYTES = 1 << 26  # the library's default
    _SHAPES = ((1 << 8, 0, "<u1"), (1 << 16, 1, "<u2"), (1 << 32, 2, "<u4"))

    def __init__(self, folder: Path, vocab_size: int) -> None:
        folder.mkdir()
        self._folder = folder
        self._dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
        self._about = {
            "column_encodings": ["str", f"ndarray:{self._dtype}"],
            "column_names": ["id", "tokens"],
            "column_sizes": [None, None],
            "compression": None,
            "format": "mds",
            "hashes": [],
            "size_limit": self._SHARD_BYTES,
            "version": 2,
        }
        self._head = json.dumps(self._about, sort_keys=True).encode()
        self._shards: list[dict[str, Any]] = []
        self._samples: list[bytes] = []
        self._size = 0

    def write_document(self, name: str, tokens: Tokens) -> None:
        columns = [name.encode(), self._encode_array(tokens)]
        sample = struct.pack("<II", *map(len, columns)) + b"".join(columns)
        if self._samples and self._size + len(sample) + 4 > self._SHARD_BYTES:
            self._write_shard()
        self._samples.append(sample)
        self._size += len(sample) + 4

    def close(self) -> None:
        self._write_shard()
        (self._folder / "index.json").write_text(
            json.dumps({"shards": self._shards, "version": 2}, sort_keys=True)
        )

    def _encode_array(self, tokens: Tokens) -> bytes:
        """Return an array with its own shape: a byte with axes and size of an axis, the
        axis, the values.
        """
        code, dtype = next(
            (code, dtype) for limit, code, dtype in self._SHAPES if len(tokens) < limit
        )
        return (
            bytes([1 << 2 | code])
            + np.array([len(tokens)], dtype).tobytes()
            + tokens.astype(self._dtype).tobytes()
        )

    def _write_shard(self) -> None:
        sizes = np.array([0, *map(len, self._samples)], np.int64)
        # the number of samples and the offsets, of four bytes each, and the description come first
        offsets = sizes.cumsum() + 4 + 4 * len(sizes) + len(self._head)
        name = f"shard.{len(self._shards):05d}.mds"
        data = [
            struct.pack("<I", len(self._samples)),
            offsets.astype("<u4").tobytes(),
            self._head,
            *self._samples,
        ]
        (self._folder / name).write_bytes(b"".join(data))
        raw = {"basename": name, "bytes": int(offsets[-1]), "hashes": {}}
        self._shards.append(
            self._about | {"raw_data": raw, "samples": len(self._samples), "zip_data": None}
        )
        self._samples, self._size = [], 0
