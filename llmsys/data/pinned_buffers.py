"""Pinned host memory for batches, allocated once and used in turn by the steps that are read ahead.

Pinning is a call of the driver that waits for the device, so no step may do it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmsys.data.batch import Batch

ALIGNMENT = 64  # bytes, a cache line


class PinnedBuffers:
    """Buffers for several steps. The batches of a step are overwritten `num_steps` steps later."""

    def __init__(self, num_steps: int) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(num_steps)]
        self._turn = 0

    def copy_batches(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the batches of the next step in pinned memory.

        Args:
            batches: Micro-batches of one step, on the CPU.

        Returns:
            Copies, valid until the call `num_steps` later.
        """
        self._turn = (self._turn + 1) % len(self._buffers)
        sizes: list[int] = []

        def measure(tensor: Tensor) -> Tensor:
            sizes.append(_round_up(tensor.nbytes))
            return tensor

        for batch in batches:
            batch.map_tensors(measure)
        parts = iter(self._reserve(sum(sizes)).split(sizes))

        def copy(tensor: Tensor) -> Tensor:
            part: Tensor = next(parts)
            return part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

        return [batch.map_tensors(copy) for batch in batches]

    def _reserve(self, size: int) -> Tensor:
        if self._buffers[self._turn].numel() < size:
            # A quarter more, because the rows of length buckets differ from step to step.
            self._buffers[self._turn] = torch.empty(
                size * 5 // 4, dtype=torch.uint8, pin_memory=True
            )
        return self._buffers[self._turn][:size]


def _round_up(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
