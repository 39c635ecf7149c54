"""The key-value cache of generation: what every layer computed for the tokens so far.

Rows may be padded on the left, so that prompts of unequal length end together. Positions count from
each row's first real token, and a padded slot is visible to itself only. Layers choose the tensors
they cache: keys and values, or the latent vector of MLA. Layers of linear attention keep a state
instead. The source keys and values of an
encoder-decoder are computed once. Cross-attention reads the `EncoderOutput`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.config.moe import ExpertChoiceConfig
from llmsys.errors import ConfigError

# B rows, S source positions, D width


@dataclass(frozen=True)
class EncoderOutput:
    """The encoder's last hidden states and the document number of each position; padding has its
    own number.
    """

    hidden_BSD: Tensor
    documents_BS: Tensor | None = None

    def select_rows(self, rows_B: Tensor) -> EncoderOutput:
        """Return some rows.

        Args:
            rows_B: their indices, in the order that they get; one may be repeated.
        """
        rows_B = rows_B.to(self.hidden_BSD.device)
        documents_BS = None if self.documents_BS is None else self.documents_BS[rows_B]
        return EncoderOutput(self.hidden_BSD[rows_B], documents_BS)


# B rows, T new positions, S positions so far

Tensors = tuple[Tensor, ...]


class KeyValueCache:
    """Storage for `capacity` positions of `rows` sequences, of which `length` are filled.

    Not for training: it is written in place.

    Attributes:
        padding_B: Number of empty slots on the left of each row.
        memory: Encoder output, taken from the first forward pass that has one.
        states: States of recurrent layers after the last position, each (B, …).
        layer_states: States of linear attention after the last position by layer, each (B, …).
    """

    def __init__(
        self, config: ModelConfig, rows: int, capacity: int, *, padding_B: Tensor | None = None
    ) -> None:
        """Prepare an empty cache. Memory is allocated at the first forward pass, in its dtype and
        on its device.

        Args:
            config: The model that fills the cache.
            rows: Number of sequences, B.
            capacity: Positions of a row: prompt with its padding, and all tokens that are
                generated.
            padding_B: Number of empty slots on the left of each row, where prompts have unequal
                lengths. Default: None, no row has any.

        Raises:
            ConfigError: The model is an encoder, or its experts choose their tokens.
        """
        if config.family == "encoder":
            raise ConfigError("An encoder has no use for a key-value cache. Call it without one.")
        if config.moe is not None and isinstance(config.moe.routing, ExpertChoiceConfig):
            raise ConfigError(
                "model.moe.routing.kind=expert_choice cannot generate: experts choose among all "
                "tokens of a sequence, later ones included. Use token_choice or capacity."
            )
        # On the CPU: its values become Python integers, and a GPU would have to wait for each.
        self.padding_B = (
            torch.zeros(rows, dtype=torch.int64) if padding_B is None else padding_B.cpu()
        )
        self.capacity = capacity
        self.length = 0
        self.memory: EncoderOutput | None = None
        self.states: Tensors = ()
        self.layer_states: dict[int, Tensors] = {}
        # Allocated like the first that comes: under mixed precision the dtype is not that of the
        # parameters.
        self._slots: dict[int | str, Tensors] = {}
        self._source: dict[int, Tensors] = {}

    @property
    def is_padded(self) -> bool:
        """True if any row begins with empty slots."""
        return bool(self.padding_B.any())

    def get_positions(self, first: int, last: int) -> Tensor:
        """Return the positions of the slots `first` to `last - 1`, on the CPU, (B, T), or (1, T) if
        no row is padded.

        Padded slots have position 0.
        """
        slots_T = torch.arange(first, last)
        return (slots_T - self.padding_B[:, None]).clamp_min(0) if self.is_padded else slots_T[None]

    def build_documents(self, length: int, device: torch.device) -> Tensor | None:
        """Build document numbers that tell the empty slots on the left from tokens.

        Args:
            length: Slots from the first.
            device: Device of the result.

        Returns:
            -1 in empty slots and 0 elsewhere, (B, T); None if no row has empty slots.
        """
        if not self.is_padded:
            return None
        places_T = torch.arange(length, device=device)
        return torch.where(places_T < self.padding_B.to(device)[:, None], -1, 0)

    def select_rows(self, rows: Sequence[int] | Tensor) -> None:
        """Keep some rows of the batch.

        Args:
            rows: their indices, in the order that they get; one may be repeated, as in beam search.
        """
        chosen = torch.as_tensor(rows, dtype=torch.int64)
        self.padding_B = self.padding_B[chosen.cpu()]
        self._slots = {key: _select_rows(kept, chosen) for key, kept in self._slots.items()}
        self._source = {key: _select_rows(kept, chosen) for key, kept in self._source.items()}
        self.states = _select_rows(self.states, chosen)
        self.layer_states = {
            key: _select_rows(kept, chosen) for key, kept in self.layer_states.items()
        }
        if self.memory is not None:
            self.memory = self.memory.select_rows(chosen)

    def require_capacity(self, new: int) -> None:
        """Raise ConfigError if `new` more positions do not fit."""
        if self.length + new > self.capacity:
            raise ConfigError(
                f"The key-value cache holds {self.capacity} positions, and {self.length} + {new} "
                f"were asked for. Create it with capacity={self.length + new}."
            )

    def append_layer(self, key: int | str, *new: Tensor) -> Tensors:
        """Store the tensors of the new positions under `key`, each (B, T, …).

        Returns:
            The tensors of all positions so far, each (B, S, …).
        """
        if key not in self._slots:
            # All positions at once: to grow by concatenation would copy every earlier token again.
            self._slots[key] = tuple(
                x.new_zeros(x.shape[0], self.capacity, *x.shape[2:]) for x in new
            )
        end = self.length + new[0].shape[1]
        for kept, x in zip(self._slots[key], new, strict=True):
            kept[:, self.length : end] = x
        return tuple(kept[:, :end] for kept in self._slots[key])

    def get_or_compute_source_keys_values(
        self, layer: int, compute: Callable[[], Tensors]
    ) -> Tensors:
        """Return the source tensors of `layer`, computed by the first call."""
        if layer not in self._source:
            self._source[layer] = compute()
        return self._source[layer]

    def reset_and_get_tokens(self, tokens_BT: Tensor) -> Tensor:
        """Discard the cached tensors, and return the tokens so far followed by the new ones, to be
        computed again.

        Requires that tokens were stored by `append_layer` under "tokens".
        """
        tokens_BS = self._slots["tokens"][0][:, : self.length + tokens_BT.shape[1]]
        self.length = 0
        self.layer_states = {}
        return tokens_BS

    def advance(self, new: int) -> None:
        """Count positions as filled, after every layer has stored them.

        Args:
            new: number of the positions.
        """
        self.length += new


def _select_rows(kept: Tensors, rows: Tensor) -> Tensors:
    return tuple(x.index_select(0, rows.to(x.device)) for x in kept)
