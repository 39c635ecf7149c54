"""Read safetensors folders whose weights are stored in FP8 or MXFP4 with scales, as dequantized
tensors.

- FP8 (DeepSeek-V3): X in float8 with X_scale_inv, one scale for each block of `weight_block_size`
  or for the tensor.
- MXFP4 (gpt-oss): X_blocks, two FP4 values (E2M1) a byte in groups of 32, with X_scales, an
  exponent of two per group. The experts' matrices are stored transposed.

Invariants:
- Tensors have the names, shapes and values that transformers gives them with `dequantize=True`.
- Values are multiplied in float32 and rounded once.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmsys.convert.conversion_plan import Shape
from llmsys.convert.safetensors_folder import SafetensorsFolder, StoredTensor
from llmsys.errors import CheckpointError

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE, BLOCKS, SCALES = "_scale_inv", "_blocks", "_scales"
# The values of E2M1 by their four bits: sign, two bits of exponent, one of mantissa.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class QuantizedFolder(SafetensorsFolder):
    """A folder whose quantized tensors are listed and read dequantized; the others are read as they
    are.

    Attributes:
        is_quantized: whether it has any.
    """

    def __init__(self, folder: Path, values: dict[str, Any]) -> None:
        """Read the headers; `values` is config.json, with the size of blocks and the dtype of
        weights.

        Raises CheckpointError for scales that do not fit their weights.
        """
        super().__init__(folder)
        settings = values.get("quantization_config")
        self._block = settings.get("weight_block_size") if isinstance(settings, dict) else None
        self._dtype = DTYPES.get(
            str(values.get("dtype") or values.get("torch_dtype")), torch.bfloat16
        )
        self._stored = self.tensors
        self.tensors = dict(self._list_tensors())
        self.is_quantized = self.tensors.keys() != self._stored.keys()

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
        if name in self._stored and name + SCALE not in self._stored:
            return self._read_stored(name, self._stored[name])
        if name in self._stored:
            weight, scale = (
                self._read_stored(one, self._stored[one]) for one in (name, name + SCALE)
            )
            return dequantize_fp8(weight, scale, self._block).to(self._dtype)
        blocks, scales = (
            self._read_stored(one, self._stored[one]) for one in (name + BLOCKS, name + SCALES)
        )
        return dequantize_mxfp4(blocks, scales).to(self._dtype)

    def _list_tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        for name, stored in self._stored.items():
            if name.endswith(SCALE) and name.removesuffix(SCALE) in self._stored:
                continue
            base = name.removesuffix(BLOCKS)
            if name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in self._stored:
                continue
            if name.endswith(BLOCKS) and base + SCALES in self._stored:
                yield base, StoredTensor(stored.file, self._get_mxfp4_shape(base), self._dtype)
            elif stored.dtype in FLOAT8 and name + SCALE in self._stored:
                self._check_fp8(name, stored.shape, self._stored[name + SCALE].shape)
                yield name, StoredTensor(stored.file, stored.shape, self._dtype)
            else:
                yield name, stored

    def _check_fp8(self, name: str, shape: Shape, scale: Shape) -> None:
        wanted: Shape = (
            (*shape[:-2], *(-(-shape[-2 + i] // self._block[i]) for i in range(2)))
            if self._block
            else ()
        )
        if scale != wanted and (self._block or any(size != 1 for size in scale)):
            raise CheckpointError(
                f"{self.folder}: {name} {shape} has scales {scale}, and blocks of {self._block} "
                f"need {wanted}. Correct weight_block_size in config.json, or download the files "
                "again."
            )

    def _get_mxfp4_shape(self, base: str) -> Shape:
        blocks, scales = self._stored[base + BLOCKS].shape, self._stored[base + SCALES].shape
        if len(blocks) != 4 or blocks[:-1] != scales or blocks[-1] != 16:
            raise CheckpointError(
                f"{self.folder}: {base}{BLOCKS} {blocks} and {base}{SCALES} {scales} are not "
                "groups of 32 values with a scale each. Download the files again."
            )
        experts, rows, groups, _ = blocks
        return experts, 32 * groups, rows


def dequantize_fp8(weight: Tensor, scale: Tensor, block: list[int] | None) -> Tensor:
    """Return weights in float32.

    Args:
        weight: (…, out, in) in float8.
        scale: (…, out / block, in / block), rounded up; or one value.
        block: size of a block in both dims; None for one scale.

    Returns:
        (…, out, in) float32.
    """
    wide = scale.to(torch.float32)
    if block is not None:
        rows, columns = weight.shape[-2:]
        wide = wide.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[
            ..., :columns
        ]
    return weight.to(torch.float32) * wide


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the experts' matrices in float32.

    Args:
        blocks: (E, out, G, 16) uint8; the low half of a byte comes first.
        scales: (E, out, G) uint8, the exponent of two plus 127.

    Returns:
        (E, 32 G, out) float32.
    """
    table = torch.tensor(FP4)
    values = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1).flatten(-2)
    exact = torch.ldexp(values, scales.to(torch.int32).unsqueeze(-1) - 127)
    return exact.flatten(-2).transpose(1, 2).contiguous()
