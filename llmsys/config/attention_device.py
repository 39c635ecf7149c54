"""The device and the dtype of attention, by which its kernel and its saved tensors are chosen."""

from dataclasses import dataclass
from typing import Literal

AttentionDtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class AttentionDevice:
    """The properties of a device that the choice of a kernel depends on.

    Attributes:
        kind: `torch.device.type`: cpu, cuda, …; "hip" for AMD's devices, which torch calls cuda
            too.
        capability: CUDA compute capability, such as (9, 0); None elsewhere.
    """

    kind: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return (
            self.kind if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"
        )

    @property
    def has_native_bf16(self) -> bool:
        """True where `train.precision=auto` takes bf16; a CPU counts as one with bf16, which the
        others are not.
        """
        return self.kind == "cpu" or (self.capability is not None and self.capability >= (8, 0))

    @property
    def has_fused_kernels(self) -> bool:
        """True where flash attention and flex_attention run."""
        return self.kind == "cuda" and self.capability is not None and self.capability >= (8, 0)
