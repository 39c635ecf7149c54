"""Dropout without chance, so that ranks and the plain process drop the same.

Ranks draw other numbers than one process does. What the array compares is where a run drops, with
which probability, how often, and that no evaluation does; which masks are drawn is a subject of
tests/llmsys/model/test_dropout.py and tests/llmsys/train/test_dropout_seed.py.
"""

import torch.nn.functional as F
from torch import Tensor

from llmsys.model import dropout


def replace_dropout() -> None:
    """Let dropout multiply every element by the share that stays, in this process.

    The mean of what a mask gives would be 1 and hide a dropout that is left out, so elements are
    not scaled up.
    """
    dropout.draw_dropout_mask = _get_staying_share  # type: ignore[assignment]
    F.dropout = _drop_evenly  # type: ignore[assignment]


def _get_staying_share(x: Tensor, probability: float) -> float:
    return 1 - probability


def _drop_evenly(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return x * _get_staying_share(x, p) if training else x
