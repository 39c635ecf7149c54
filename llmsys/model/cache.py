"""The key-value cache of generation: what every layer has computed for the tokens seen so far.

Rows may be padded on the left, so that prompts of unequal length end together; positions then count from each row's
first real token, and padded slots are seen by nobody but themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError
from llmsys.model.mask import cached_mask

# B rows, T new positions, S positions so far, G key-value heads, K width of a head


class KeyValueCache:
    """Room for `capacity` positions of `rows` sequences in every layer; `length` positions are filled.

    `padding_B` is the number of empty slots on the left of each row. Not for training: it is written in place.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        *,
        padding_B: Tensor | None = None,
    ) -> None:
        self.shape = (config.num_hidden_layers, rows, capacity, config.num_key_value_heads, config.head_dim)
        self.padding_B = torch.zeros(rows, dtype=torch.int64) if padding_B is None else padding_B.cpu()
        self.capacity = capacity
        self.length = 0
        # Allocated like the first keys: under mixed precision their dtype is not that of the parameters.
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def positions(self, new: int) -> Tensor:
        """Positions of the next `new` slots, shape (B, T), on the CPU; padded slots count as position 0."""
        slots_T = torch.arange(self.length, self.length + new)
        return (slots_T - self.padding_B[:, None]).clamp_min(0)

    def mask(self, new: int) -> Tensor:
        """What the next `new` slots may see, shape (B, 1, T, S + T), on the CPU."""
        return cached_mask(self.padding_B, self.length, new)

    def keep(self, rows: list[int]) -> None:
        """Go on with some of the rows only, given by their place in the batch."""
        self.padding_B = self.padding_B[rows]
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[:, rows], self._values[:, rows]

    def check(self, new: int) -> None:
        """Refuse more positions than there is room for."""
        if self.length + new > self.capacity:
            raise ConfigError(
                f"The key-value cache holds {self.capacity} positions, and {self.length} + {new} were asked for. "
                f"Create it with capacity={self.length + new}."
            )

    def extend(self, layer: int, keys_BTGK: Tensor, values_BTGK: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer; return all of its keys and values so far."""
        if self._keys is None or self._values is None:
            self._keys, self._values = keys_BTGK.new_zeros(self.shape), values_BTGK.new_zeros(self.shape)
        end = self.length + keys_BTGK.shape[1]
        self._keys[layer, :, self.length : end] = keys_BTGK
        self._values[layer, :, self.length : end] = values_BTGK
        return self._keys[layer, :, :end], self._values[layer, :, :end]

    def advance(self, new: int) -> None:
        """Count the new positions, after every layer has stored them."""
        self.length += new
