"""Read and write folders of safetensors files one tensor at a time.

Reads or writes `model.safetensors`, or several files with `model.safetensors.index.json`. The
format: eight bytes with the length of a JSON header, the header, and the bytes of the tensors one
after another (github.com/huggingface/safetensors, "Format").

Invariants:
- At most one tensor is held in memory.
"""

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from llmsys.convert.conversion_plan import Shape
from llmsys.errors import CheckpointError
from llmsys.storage.paths import is_plain_file_name

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# A file is opened anew after so many bytes: pages that were read through a mapping stay in memory
# until it closes.
MAPPED_BYTES = 1 << 26


class StoredTensor(NamedTuple):
    """The file, dtype and shape of a stored tensor."""

    file: str
    shape: Shape
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFolder:
    """Reads tensors by name from the files of a folder."""

    def __init__(self, folder: Path, single: str = SINGLE) -> None:
        """Read the headers of all files.

        Args:
            folder: The folder, with an index or with one file of tensors.
            single: Name of the one file of a folder without an index.

        Raises:
            CheckpointError: A file is missing, damaged, or at odds with the index.
        """
        self.folder = folder
        self._open: tuple[str, Any] | None = None
        self._read_bytes = 0
        self.tensors: dict[str, StoredTensor] = {}
        index = _read_index(folder)
        if (
            not index
            and not (folder / single).is_file()
            and (shards := sorted(folder.glob("*.safetensors")))
        ):
            raise CheckpointError(
                f"{folder} holds {shards[0].name} but neither {single} nor {INDEX}. Download the "
                f"index too, or put all tensors into {single}."
            )
        for file in sorted(set(index.values())) if index else [single]:
            self.tensors |= dict(self._read_headers(file))
        for name, file in index.items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointError(
                    f"{folder / INDEX} lists {name} in {file}, but it is not there. Download the "
                    "files again."
                )

    def read(self, name: str) -> Tensor:
        """Read one tensor.

        Args:
            name: A key of `tensors`. Tensors are read fastest file by file: one file is open at a
                time.

        Returns:
            The tensor, on the CPU.
        """
        return self._read_stored(name, self.tensors[name])

    def _read_stored(self, name: str, stored: StoredTensor) -> Tensor:
        tensor: Tensor = self._get_open_file(stored.file).get_tensor(name)
        self._read_bytes += stored.nbytes
        return tensor

    def get_largest_file_bytes(self) -> int:
        """Return the bytes of tensors in the largest file."""
        sizes: dict[str, int] = {}
        for stored in self.tensors.values():
            sizes[stored.file] = sizes.get(stored.file, 0) + stored.nbytes
        return max(sizes.values())

    def _get_open_file(self, file: str) -> Any:
        if self._open is None or self._open[0] != file or self._read_bytes > MAPPED_BYTES:
            self._open = None
            # Freed before: the pages of both mappings would be in memory.
            self._open = (file, _open_safetensors(self.folder / file))
            self._read_bytes = 0
        return self._open[1]

    def _read_headers(self, file: str) -> Iterator[tuple[str, StoredTensor]]:
        opened = _open_safetensors(self.folder / file)
        for name in opened.keys():  # noqa: SIM118 - not a mapping
            piece = opened.get_slice(name)
            code = piece.get_dtype()
            if code not in DTYPES:
                raise CheckpointError(
                    f"{self.folder / file}: {name} has dtype {code}, which is not converted. "
                    f"Use weights in one of {', '.join(DTYPES)}."
                )
            yield name, StoredTensor(file, tuple(piece.get_shape()), DTYPES[code])


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing. Download the files again.") from None
    except SafetensorError as error:
        raise CheckpointError(f"{file} is corrupt ({error}). Download the file again.") from None


def _read_index(folder: Path) -> dict[str, str]:
    """Return tensor name → file; {} where there is no index."""
    if not (folder / INDEX).exists():
        return {}
    try:
        text = (folder / INDEX).read_text()
        files: dict[str, str] = parse_weight_map(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / INDEX} cannot be read ({error!r}). Download the file again."
        ) from None
    return files


def parse_weight_map(text: str) -> dict[str, str]:
    """Return {tensor: file} of an index; raise ValueError, KeyError or TypeError where it is
    malformed.
    """
    files: dict[str, str] = dict(json.loads(text)["weight_map"])
    for file in files.values():
        if not is_shard_name(file):
            raise ValueError(f"{file!r} is not the name of a safetensors file in its folder")
    return files


def is_shard_name(name: object) -> bool:
    """Return whether a name is that of a safetensors file in the same folder."""
    return is_plain_file_name(name) and str(name).endswith(".safetensors")


class SafetensorsShardWriter:
    """Writes one safetensors file. Tensors may come in any order; `close` checks that all came."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> None:
        """Write the header, in the library's order: wide dtypes first, then by name."""
        self._path = path
        self._places: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # The library sorts by its enum of dtypes, from the widest to the narrowest.
        for name in sorted(tensors, key=lambda one: (-tensors[one][0].itemsize, one)):
            dtype, shape = tensors[name]
            begin, end = end, end + prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
            self._places[name] = begin
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._data = 8 + len(text)
        # tensors come in any order, each at its own offset
        self._file.truncate(self._data + end)
        self._tensors = dict(tensors)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor at its offset.

        Args:
            name: a name that the header has, not yet written.
            tensor: of the dtype and shape that the header has; on any device.

        Raises:
            ValueError: its dtype or shape is another one.
        """
        if (tensor.dtype, tuple(tensor.shape)) != self._tensors[name]:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {self._tensors[name]}"
            )
        self._file.seek(self._data + self._places.pop(name))
        # numpy has no bfloat16
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)

    def close(self) -> None:
        """Flush to disk."""
        if self._places:
            raise ValueError(f"{self._path}: {min(self._places)} was never written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Self:
        """Return the writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file. After an error, skip the checks."""
        if kind is None:
            self.close()
        else:
            self._file.close()
