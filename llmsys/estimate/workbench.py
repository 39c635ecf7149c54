"""What the seconds of a kernel depend on (model, layout, device, software, micro-batch), and how products take them.

A product's time is the sum of its operations at the device's best rate and of its bytes, so that thin matrices are slow
(a roofline without its corner: Williams 2009).
"""

from dataclasses import dataclass

from llmsys.config.layout import Layout
from llmsys.config.model import ModelConfig
from llmsys.estimate.device import Device, Number
from llmsys.estimate.software import Software

ROW_SCALED = 0.7  # what products with a scale for each row keep of the 8-bit rate (DeepGEMM and cuBLASLt tables)


@dataclass(frozen=True)
class Shape:
    """One micro-batch of a rank: sequences of `length` tokens; of encoder-decoders `source` ones at the encoder.

    `bytes` are those of one value.
    """

    sequences: float
    length: int
    source: int
    number: Number

    @property
    def tokens(self) -> float:
        """Tokens of the micro-batch."""
        return self.sequences * self.length

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation."""
        return 4 if self.number == "fp32" else 2


@dataclass(frozen=True)
class Bench:
    """Everything that seconds of a kernel depend on."""

    model: ModelConfig
    layout: Layout
    device: Device
    software: Software
    shape: Shape

    def product(self, rows: float, inner: float, columns: float, *, grouped: bool = False, head: bool = False) -> float:
        """Seconds of a (rows, inner) by (inner, columns) product."""
        device, software = self.device, self.software
        number = software.products if software.products and not head else self.shape.number
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
        operations = 2 * rows * inner * columns / (device.peak(number) * reached)
        return operations + self.memory_seconds(moved + cast) + device.efficiency.launch_seconds

    def memory_seconds(self, moved_bytes: float) -> float:
        """Seconds that so many bytes take through memory."""
        return moved_bytes / (self.device.memory_bandwidth * self.device.efficiency.memory)
