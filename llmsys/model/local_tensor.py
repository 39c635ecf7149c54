"""Local shards of parameters that may be DTensors."""

from torch import Tensor, nn


def get_local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter.

    Args:
        parameter: A DTensor or a plain tensor.

    Returns:
        The local tensor of a DTensor, with gradients; a plain tensor itself.
    """
    if type(parameter) in (Tensor, nn.Parameter):
        return parameter
    # isinstance, because torch.compile sees no `to_local` on a DTensor; here, because the import takes two seconds.
    from torch.distributed.tensor import DTensor

    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
