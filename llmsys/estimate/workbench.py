"""What the seconds of a kernel depend on (model, layout, device, software, micro-batch), and how products take them.

A product's time is the sum of its operations at the device's best rate and of its bytes, so that thin matrices are slow
(a roofline without its corner: Williams 2009).
"""

from dataclasses import dataclass

from llmsys.config.layout import ParallelLayout
from llmsys.config.model import ModelConfig
from llmsys.estimate.device import DeviceProfile, Number
from llmsys.estimate.software import SoftwareProfile

ROW_SCALED = 0.7  # what products with a scale for each row keep of the 8-bit rate (DeepGEMM and cuBLASLt tables)


@dataclass(frozen=True)
class MicroBatchShape:
    """One micro-batch of a rank: sequences of `length` tokens; of encoder-decoders `source` ones at the encoder.

    `bytes` are those of one value.
    """

    sequences: float
    length: int
    source: int
    dtype: Number

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

    def estimate_matmul_seconds(self, rows: float, inner: float, columns: float, *, grouped: bool = False, head: bool = False) -> float:
        """Seconds of a (rows, inner) by (inner, columns) product."""
        device, software = self.device, self.software
        number = software.matmul_dtype if software.matmul_dtype and not head else self.shape.dtype
        reached = device.efficiency.grouped if grouped else device.efficiency.products
        size: float = self.shape.value_bytes
        cast = 0.0
        if number == "fp8":
            reached *= device.efficiency.products_fp8 / device.efficiency.products
            reached *= ROW_SCALED if software.scales == "row" else 1
            cast = (
                3 * (1 + (software.scales == "row")) * (rows * inner + inner * columns)
            )  # both operands are read in 16 bits and written in 8
            size = 1.5
        moved = size * (rows * inner + inner * columns + rows * columns)
        operations = 2 * rows * inner * columns / (device.get_peak_flops(number) * reached)
        return operations + self.estimate_memory_seconds(moved + cast) + device.efficiency.launch_seconds

    def estimate_memory_seconds(self, moved_bytes: float) -> float:
        """Seconds that so many bytes take through memory."""
        return moved_bytes / (self.device.memory_bandwidth * self.device.efficiency.memory)
