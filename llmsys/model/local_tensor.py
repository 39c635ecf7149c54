"""Local shards of parameters that may be DTensors."""

from torch import Tensor


def get_local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter.

    Args:
        parameter: A DTensor or a plain tensor.

    Returns:
        The local tensor of a DTensor, with gradients; a plain tensor itself.
    """
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
