"""`metadata.json`: the location of every tensor of a checkpoint, as JSON, which runs no code when
it is read.

torch.distributed.checkpoint keeps the same facts as a pickle in `.metadata`. Layout of the file:

    {"format_version": 2, "tensors": {NAME: {"dtype": "float32", "shape": [8, 4], "chunks": [
        {"offsets": [0, 0], "sizes": [4, 4], "file": "__0_0.distcp", "begin": 0, "bytes": 1234},
        …]}}}

Invariants:
- Only tensors are written and read.
- Chunks lie within their tensor and fill it; their bytes lie within a file of the checkpoint's own
  folder.
"""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from llmsys.errors import CheckpointError
from llmsys.storage.local_files import is_plain_file_name
from llmsys.storage.stored_formats import CHECKPOINT_METADATA, VERSION_KEY

METADATA = "metadata.json"
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


def format_metadata(metadata: Metadata) -> bytes:
    """Return torch's metadata as the bytes of `metadata.json`; `storage_data` holds the locations
    of its chunks.

    Raises:
        TypeError: an entry is no tensor. Such values belong into `state.json`.
    """
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError(
                f"{name} is not a tensor. A checkpoint stores tensors only; put other values into "
                "its record."
            )
        chunks = [
            _format_chunk(chunk, metadata.storage_data[MetadataIndex(name, chunk.offsets)])
            for chunk in entry.chunks
        ]
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return json.dumps({VERSION_KEY: CHECKPOINT_METADATA.version, "tensors": tensors}).encode()


def _format_chunk(chunk: ChunkStorageMetadata, place: _StorageInfo) -> dict[str, Any]:
    return {
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "file": place.relative_path,
        "begin": place.offset,
        "bytes": place.length,
    }


def parse_metadata(content: bytes, checkpoint: Path) -> Metadata:
    """Return torch's metadata from the bytes of `metadata.json`, with every number and name
    checked.

    Raises:
        CheckpointError: the content is damaged, of a newer version, or points outside of what it
            describes.
    """
    try:
        values = json.loads(content)
        if (version := values[VERSION_KEY]) != CHECKPOINT_METADATA.version:
            raise ValueError(
                f"format {version}; this version reads format {CHECKPOINT_METADATA.version}"
            )
        file_bytes: dict[str, int] = {}
        entries: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, entry in values["tensors"].items():
            try:
                entries[name] = _parse_tensor(entry)
                for chunk, found in zip(entries[name].chunks, entry["chunks"], strict=True):
                    size = prod(chunk.sizes) * entries[name].properties.dtype.itemsize
                    places[MetadataIndex(name, chunk.offsets)] = _parse_place(
                        found, size, checkpoint, file_bytes
                    )
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{name}: {_describe(error)}") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{checkpoint / METADATA} cannot be read ({_describe(error)}). Use another checkpoint."
        ) from None
    mappings = {name: (name,) for name in entries}
    return Metadata(dict(entries), mappings, places, StorageMeta(), CURRENT_DCP_VERSION)


def _parse_tensor(entry: Any) -> TensorStorageMetadata:
    dtype, shape = entry["dtype"], _parse_size(entry["shape"])
    if dtype not in DTYPES:
        raise ValueError(f"{dtype!r} is not a torch dtype")
    chunks = [
        ChunkStorageMetadata(_parse_size(one["offsets"]), _parse_size(one["sizes"]))
        for one in entry["chunks"]
    ]
    for chunk in chunks:
        ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(shape) or any(
            end > length for end, length in zip(ends, shape, strict=True)
        ):
            raise ValueError(
                f"a chunk of {list(chunk.sizes)} at {list(chunk.offsets)} is not within "
                f"{list(shape)}"
            )
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        raise ValueError(f"its chunks do not fill {list(shape)}")
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[dtype]), shape, chunks)


def _parse_place(
    found: Any, size: int, checkpoint: Path, file_bytes: dict[str, int]
) -> _StorageInfo:
    file, begin, length = found["file"], *_parse_counts([found["begin"], found["bytes"]])
    if not is_plain_file_name(file):
        raise ValueError(f"{file!r} is not the name of a file in the checkpoint's folder")
    if file not in file_bytes:
        path = checkpoint / file
        file_bytes[file] = path.stat().st_size if path.is_file() else 0
    if length < size or begin + length > file_bytes[file]:
        raise ValueError(f"{file} has no {length} bytes at {begin} for {size} bytes of numbers")
    return _StorageInfo(file, begin, length)


def _parse_size(values: Any) -> torch.Size:
    return torch.Size(_parse_counts(values))


def _parse_counts(values: Iterable[Any]) -> list[int]:
    counts = list(values)
    # Not isinstance, since True is an int.
    if not all(type(one) is int and 0 <= one < 1 << 63 for one in counts):
        raise ValueError(f"{counts} are not counts")
    return counts


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)
