"""Parameters that may be spread over processes; what this process holds of them."""

from torch import Tensor


def get_local_tensor(parameter: Tensor) -> Tensor:
    """This process's part of a parameter: of a DTensor its local tensor, with gradients; a plain tensor is whole."""
    to_local = getattr(parameter, "to_local", None)
    return parameter if to_local is None else to_local()
