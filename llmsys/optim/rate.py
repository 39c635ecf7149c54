"""The learning rate of a step, with what goes along with it, and how an optimizer takes it."""

from collections.abc import Iterable
from typing import Any


class LearningRate(float):
    """A learning rate that says which share of the config's weight decay is in force with it; a plain float means all.

    It is a float, so that whoever cares for the rate alone need not know.
    """

    decay_share: float

    def __new__(cls, value: float, decay_share: float = 1.0) -> "LearningRate":
        """The rate `value`, with a share of weight decay."""
        rate = super().__new__(cls, value)
        rate.decay_share = decay_share
        return rate


def get_weight_decay_share(rate: float) -> float:
    """The share of weight decay that goes with a rate."""
    return rate.decay_share if isinstance(rate, LearningRate) else 1.0


def set_rates(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Put a step's rate into an optimizer's groups, which say their `lr_multiplier` and their whole `weight_decay`."""
    for group in groups:
        group["lr"] = rate * group["rate_scale"]
        whole = group.setdefault("whole_weight_decay", group["weight_decay"])
        group["weight_decay"] = whole * get_weight_decay_share(rate)
