"""The inputs of a kernel's seconds: model, layout, device, program, micro-batch and number types.

A product's time is the sum of its operations at the device's best rate and of its bytes, so that
thin matrices are slow (a roofline without its corner: Williams 2009). Products of experts, which
one kernel computes together, take the longer of the two.
"""

from dataclasses import dataclass
from typing import Literal

from llmsys.config.model import ModelConfig
from llmsys.config.parallel_layout import ParallelLayout
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError
from llmsys.estimate.device_profile import DeviceProfile, Number
from llmsys.estimate.software_profile import SoftwareProfile

# compute: that of activations. fp8: scales by row, as train.matmul_dtype; fp8_tensor: one scale for
# each tensor.
MatmulDtype = Literal["compute", "fp8", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class MatmulFormat:
    """A narrow number type of matmuls.

    Attributes:
        number: type whose peak counts.
        rate: share of the device's 8-bit efficiency that its kernels keep.
        cast_bytes: bytes per element of the activations for casts; weights are cast once a step.
        value_bytes: mean bytes per element that the matmul reads and writes.
        capability: first CUDA compute capability with such kernels.
    """

    number: Number
    rate: float
    cast_bytes: float
    value_bytes: float
    capability: tuple[int, int]


FORMATS = {
    # DeepGEMM's and cuBLASLt's tables; casts read every operand twice, for its scales and for its
    # values.
    "fp8": MatmulFormat("fp8", 0.7, 6, 1.5, (8, 9)),
    "fp8_tensor": MatmulFormat("fp8", 1.0, 3, 1.5, (8, 9)),
    # Partial sums are added in fp32 outside of tensor cores (DeepSeek-V3, section 3.3.2; DeepGEMM's
    # tables).
    "fp8_block": MatmulFormat("fp8", 0.85, 6, 1.5, (9, 0)),
    # Scales of 32 neighbours are applied by the tensor core; values are written along rows and
    # along columns.
    "mxfp8": MatmulFormat("fp8", 1.0, 5, 1.5, (10, 0)),
    "nvfp4": MatmulFormat("nvfp4", 0.8, 6, 1.25, (10, 0)),
}


def require_matmul_dtype(dtype: MatmulDtype, device: DeviceProfile) -> None:
    """Raise ConfigError where a device has no matmuls of a type.

    Args:
        dtype: type of the inputs of matmuls in blocks.
        device: profile of the accelerator.

    Raises:
        ConfigError: its kernels need a newer device, or the profile has no peak for them.
    """
    if (found := FORMATS.get(dtype)) is None:
        return
    device.get_peak_flops(found.number)
    if device.compute_capability is not None and device.compute_capability < found.capability:
        have, need = (
            ".".join(map(str, one)) for one in (device.compute_capability, found.capability)
        )
        raise ConfigError(
            f"{dtype} matmuls need compute capability {need}, and {device.name} has {have}. Use "
            "another device, or another matmul dtype, such as compute."
        )


def select_matmul_dtypes(config: RunConfig) -> tuple[MatmulDtype, MatmulDtype]:
    """Return the types of matmuls with dense weights and with experts that a config trains in."""
    return config.train.matmul_dtype, config.train.expert_matmul_dtype


@dataclass(frozen=True)
class MicroBatchShape:
    """One micro-batch of a rank: sequences of `length` tokens; of encoder-decoders `source` ones at
    the encoder.

    `documents` are lengths that repeat until a sequence is full (empty: it is one document);
    `has_documents` tells whether kernels have to keep documents apart.
    """

    sequences: float
    length: int
    source: int
    dtype: Number
    has_documents: bool = False
    documents: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> float:
        """Tokens of the micro-batch."""
        return self.sequences * self.length

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.dtype == "fp32" else 2


@dataclass(frozen=True)
class KernelContext:
    """Everything that seconds of a kernel depend on."""

    model: ModelConfig
    layout: ParallelLayout
    device: DeviceProfile
    software: SoftwareProfile
    shape: MicroBatchShape
    matmul_dtype: MatmulDtype = "compute"
    expert_matmul_dtype: MatmulDtype = "compute"
    expert_load: float = 1.0  # tokens of the fullest rank of experts over the mean

    def estimate_matmul_seconds(
        self,
        rows: float,
        inner: float,
        columns: float,
        *,
        grouped: bool = False,
        head: bool = False,
    ) -> float:
        """Seconds of a (rows, inner) by (inner, columns) product."""
        device = self.device
        number, size, cast = self.shape.dtype, float(self.shape.value_bytes), 0.0
        reached = device.efficiency.grouped if grouped else device.efficiency.products
        dtype = "compute" if head else self.expert_matmul_dtype if grouped else self.matmul_dtype
        if (narrow := FORMATS.get(dtype)) is not None:
            number, size = narrow.number, narrow.value_bytes
            reached *= narrow.rate * device.efficiency.products_fp8 / device.efficiency.products
            cast = narrow.cast_bytes * rows * inner
        moved = size * (rows * inner + inner * columns + rows * columns)
        operations = 2 * rows * inner * columns / (device.get_peak_flops(number) * reached)
        read = self.estimate_memory_seconds(moved)
        # Rates of grouped kernels were measured on matrices of this size, with their bytes.
        busy = max(operations, read) if grouped else operations + read
        return busy + self.estimate_memory_seconds(cast) + device.efficiency.launch_seconds

    def estimate_memory_seconds(self, moved_bytes: float) -> float:
        """Seconds that so many bytes take through memory."""
        return moved_bytes / (self.device.memory_bandwidth * self.device.efficiency.memory)
