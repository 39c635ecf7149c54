"""The dtype of converted weights: as stored, or another one that they are rounded to.

Invariants:
- Where another dtype is asked for, the correction biases of routers are float32, as published
  models have them: bfloat16 would change the choice of experts.
"""

import torch
from torch import Tensor

from llmsys.errors import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What weights can be stored as: the numbers themselves.
WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
KEPT = ("balance_bias_E",)


def choose_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that one of our tensors is written in.

    Args:
        name: Its name.
        dtype: The dtype of the weights.

    Returns:
        `dtype`, or float32 for a tensor that needs it.
    """
    return torch.float32 if name.endswith(KEPT) else dtype


def cast_weight(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one of our tensors in the dtype that it is written in.

    Args:
        name: Its name.
        tensor: Its values.
        dtype: The dtype to write.

    Returns:
        The rounded tensor.

    Raises:
        CheckpointError: A finite value is beyond the range of the dtype.
    """
    cast = tensor.to(dtype)
    if cast.dtype == torch.float16 and bool((cast.isinf() & tensor.isfinite()).any()):
        largest = float(tensor[tensor.isfinite()].abs().max())
        raise CheckpointError(
            f"{name} has the value {largest:.4g}, and float16 ends at 65504. Use --dtype bfloat16 "
            "or float32."
        )
    return cast
