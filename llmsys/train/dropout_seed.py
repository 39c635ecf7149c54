"""The seed of dropout: a function of the run's seed, the step and the rank."""

import torch

from llmsys.data.shuffle import derive_order_key
from llmsys.parallel.process_group import get_rank


def seed_dropout(seed: int, step: int) -> None:
    """Seed this rank's dropout for one step, so that a resumed run draws the same masks.

    Args:
        seed: `run.seed`.
        step: index of the step, counted from 0.
    """
    # torch takes 63 bits
    torch.manual_seed(derive_order_key("dropout", seed, step, get_rank()) >> 1)
