"""Masked language modelling: the choice of masked tokens, and their replacements.

BERT (Devlin 2018, arXiv:1810.04805, 3.1 and A.1): of the chosen 15 %, 80 % become the mask token, 10 % a random one,
and 10 % stay.

Invariants:
- Masks are a function of (data, seed, number of the window over all epochs): each epoch masks anew, and a resumed run
  masks as the uninterrupted one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llmsys.config.objective import MaskedLmConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.shuffle import derive_order_key, hash_splitmix64

# T positions


@dataclass(frozen=True)
class TokenMasker:
    """The masking of windows. `protected_token`, which closes documents, is never chosen."""

    config: MaskedLmConfig
    mask_token: int
    protected_token: int
    vocab_size: int
    key: tuple[str | int, ...]

    def mask_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Return the batch with some tokens hidden and those as targets.

        `numbers` are the numbers of its windows. Positions without a target are padding and are not chosen.
        """
        tokens_BT, valid_BT = batch.tokens_BT.numpy(), (batch.targets_BT != IGNORED).numpy()
        hidden_BT, targets_BT = tokens_BT.copy(), np.full_like(tokens_BT, IGNORED)
        for row, number in enumerate(numbers):
            chosen, seen = self.choose_masked_positions(tokens_BT[row], number, valid_BT[row])
            targets_BT[row, chosen] = tokens_BT[row, chosen]
            hidden_BT[row, chosen] = seen
        hidden, targets = torch.from_numpy(hidden_BT), torch.from_numpy(targets_BT)
        return Batch(hidden, targets, batch.documents_BT, real_BT=batch.real_BT)

    def choose_masked_positions(
        self, tokens_T: NDArray[np.int64], number: int, valid_T: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the chosen positions of window `number`, and the tokens that the model sees there."""
        random_3T = _draw_random_bits(derive_order_key("mask", *self.key, number), 3, len(tokens_T))
        eligible = np.flatnonzero(valid_T & (tokens_T != self.protected_token))
        count = round(len(eligible) * self.config.mlm_probability)
        chosen = np.sort(eligible[np.argsort(random_3T[0, eligible], kind="stable")[:count]])
        share = random_3T[1, chosen] / 2.0**64
        any_token = (random_3T[2, chosen] % np.uint64(self.vocab_size)).astype(np.int64)
        masked = share < self.config.mask_replace_prob
        replaced = ~masked & (share < self.config.mask_replace_prob + self.config.random_replace_prob)
        seen = np.where(masked, self.mask_token, np.where(replaced, any_token, tokens_T[chosen]))
        return chosen, seen


def _draw_random_bits(key: int, rows: int, columns: int) -> NDArray[np.uint64]:
    """Return pseudo-random 64-bit numbers, (rows, columns): a bijective hash of the index, seeded by the key."""
    indices = np.arange(rows * columns, dtype=np.uint64).reshape(rows, columns)
    with np.errstate(over="ignore"):
        return hash_splitmix64(indices * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))
