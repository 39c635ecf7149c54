"""Local shards of parameters that may be DTensors."""

from typing import Any

from torch import Tensor


def get_local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter.

    Args:
        parameter: A DTensor or a plain tensor.

    Returns:
        The local tensor of a DTensor, with gradients; a plain tensor itself.
    """
    # The class is asked, because torch.compile does not find the method on a DTensor itself.
    dtensor: Any = parameter
    local: Tensor = dtensor.to_local() if hasattr(type(parameter), "to_local") else parameter
    return local
