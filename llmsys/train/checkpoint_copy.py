"""A copy of the training state in host memory, taken between two steps and written while training goes on.

The buffers are made at the first copy and used again for every later one: fresh memory costs more to touch than to
fill. On an accelerator they are pinned, so that the copy runs at the speed of the bus.
"""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class HostStateCopy:
    """Room for one copy of a rank's share of the state."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy_from_device(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors as they are now, sharded as they are, on the host. The next call overwrites them."""
        copies = {name: self._copy_tensor(name, tensor.detach()) for name, tensor in tensors.items()}
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy_tensor(self, name: str, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        # Not from_local, which would send the buffer back to the device of the mesh.
        return DTensor(buffer, tensor._spec, requires_grad=False)
