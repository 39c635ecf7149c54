"""The key-value cache of generation: what every layer has computed for the tokens seen so far.

Rows may be padded on the left, so that prompts of unequal length end together; positions then count from each row's
first real token, and padded slots are seen by nobody but themselves. Layers decide what they keep: keys and values, or
the latent vector that both come from. In an encoder-decoder the source's keys are kept too, computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.moe import ExpertChoiceConfig
from llmsys.errors import ConfigError
from llmsys.model.encoder_output import EncoderOutput

# B rows, T new positions, S positions so far

Tensors = tuple[Tensor, ...]


class KeyValueCache:
    """Room for `capacity` positions of `rows` sequences; `length` positions are filled.

    `padding_B` is the number of empty slots on the left of each row. Not for training: it is written in place.
    `memory` is the source of an encoder-decoder, taken from the first forward pass that gives one.
    """

    def __init__(self, config: ModelConfig, rows: int, capacity: int, *, padding_B: Tensor | None = None) -> None:
        if config.family == "encoder":
            raise ConfigError("An encoder reads all tokens at once and has no use for a cache. Call it without one.")
        if config.moe is not None and isinstance(config.moe.routing, ExpertChoiceConfig):
            raise ConfigError(
                "model.moe.routing.kind=expert_choice cannot generate: experts choose among all tokens of a sequence, "
                "later ones included, so it is for training and encoders. Use token_choice or capacity."
            )
        self.padding_B = torch.zeros(rows, dtype=torch.int64) if padding_B is None else padding_B.cpu()
        self.capacity = capacity
        self.length = 0
        self.memory: EncoderOutput | None = None
        # Allocated like the first that comes: under mixed precision the dtype is not that of the parameters.
        self._slots: dict[int | str, Tensors] = {}
        self._source: dict[int, Tensors] = {}

    @property
    def is_padded(self) -> bool:
        """Whether any row begins with empty slots."""
        return bool(self.padding_B.any())

    def get_positions(self, first: int, last: int) -> Tensor:
        """Positions of the slots from `first` up to `last`, on the CPU; those in the padding count as position 0.

        Shape (B, T), or (1, T) when no row is padded.
        """
        slots_T = torch.arange(first, last)
        return (slots_T - self.padding_B[:, None]).clamp_min(0) if self.is_padded else slots_T[None]

    def select_rows(self, rows: Sequence[int] | Tensor) -> None:
        """Go on with these rows, given by their place in the batch; a row may be named twice (beam search)."""
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        self.padding_B = self.padding_B[chosen.cpu()]
        self._slots = {key: _select_rows(kept, chosen) for key, kept in self._slots.items()}
        self._source = {key: _select_rows(kept, chosen) for key, kept in self._source.items()}
        if self.memory is not None:
            self.memory = self.memory.select_rows(chosen)

    def require_capacity(self, new: int) -> None:
        """Refuse more positions than there is room for."""
        if self.length + new > self.capacity:
            raise ConfigError(
                f"The key-value cache holds {self.capacity} positions, and {self.length} + {new} were asked for. "
                f"Create it with capacity={self.length + new}."
            )

    def append_layer(self, key: int | str, *new: Tensor) -> Tensors:
        """Store what layer `key` has computed for the new positions, each (B, T, …); return all of it so far."""
        if key not in self._slots:
            self._slots[key] = tuple(x.new_zeros(x.shape[0], self.capacity, *x.shape[2:]) for x in new)
        end = self.length + new[0].shape[1]
        for kept, x in zip(self._slots[key], new, strict=True):
            kept[:, self.length : end] = x
        return tuple(kept[:, :end] for kept in self._slots[key])

    def get_or_compute_source_keys_values(self, layer: int, compute: Callable[[], Tensors]) -> Tensors:
        """What `layer` keeps of the source, computed at the first call."""
        if layer not in self._source:
            self._source[layer] = compute()
        return self._source[layer]

    def count_elements(self) -> int:
        """Numbers kept for all positions that there is room for, and for the source."""
        return sum(x.numel() for kept in (*self._slots.values(), *self._source.values()) for x in kept)

    def reset_and_get_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Forget what was computed, and return the tokens so far, with the new ones behind them, to be read again.

        The tokens must have been stored by `append_layer` under "tokens".
        """
        tokens_BS = self._slots["tokens"][0][:, : self.length + tokens_BT.shape[1]]
        self.length = 0
        return tokens_BS

    def advance(self, new: int) -> None:
        """Count the new positions, after every layer has stored them."""
        self.length += new


def _select_rows(kept: Tensors, rows: Tensor) -> Tensors:
    return tuple(x.index_select(0, rows.to(x.device)) for x in kept)
