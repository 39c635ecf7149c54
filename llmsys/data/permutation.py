"""Windows whose tokens are predicted in a random order (XLNet, Yang 2019, arXiv:1906.08237, 2.3 and
3.1).

Invariants:
- Positions and order are a function of (data, seed, number of the window over all epochs), as masks
  are.
- The first token of a document is never predicted: every prediction sees a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llmsys.config.objective import PermutationConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.masking import draw_random_bits
from llmsys.data.shuffle import derive_order_key

# T positions, P predicted positions


@dataclass(frozen=True)
class PermutationSampler:
    """The choice of predicted positions and their order. `protected_token`, which closes
    documents, is never chosen.
    """

    config: PermutationConfig
    protected_token: int
    key: tuple[str | int, ...]

    def mask_batch(self, batch: Batch, numbers: Sequence[int]) -> Batch:
        """Return the windows with the chosen positions and their tokens, in the order of
        prediction.

        Args:
            batch: windows. Positions without a target are padding and are not chosen.
            numbers: numbers of the windows in the run, by which the choice is drawn.
        """
        tokens_BT = batch.tokens_BT.numpy()
        valid_BT = (batch.targets_BT != IGNORED).numpy()
        may_be_chosen_BT = valid_BT & (tokens_BT != self.protected_token)
        may_be_chosen_BT[:, 0] = False
        if batch.documents_BT is not None:
            documents_BT = batch.documents_BT.numpy()
            may_be_chosen_BT[:, 1:] &= documents_BT[:, 1:] == documents_BT[:, :-1]
        shape = len(tokens_BT), self.config.count_predicted(tokens_BT.shape[1])
        predicted_BP = np.full(shape, -1)
        targets_BP = np.full(shape, IGNORED)
        for row, number in enumerate(numbers):
            chosen = self.choose_positions(may_be_chosen_BT[row], number)
            predicted_BP[row, : len(chosen)] = chosen
            targets_BP[row, : len(chosen)] = tokens_BT[row, chosen]
        predicted = torch.from_numpy(predicted_BP)
        targets = torch.from_numpy(targets_BP)
        return Batch(
            batch.tokens_BT,
            targets,
            batch.documents_BT,
            predicted_BP=predicted,
            real_BT=batch.real_BT,
        )

    def choose_positions(
        self, may_be_chosen_T: NDArray[np.bool_], number: int
    ) -> NDArray[np.int64]:
        """Return the predicted positions of window `number` in their order.

        A span of 1 to `max_span_length` tokens is somewhere in each stretch of `context_factor`
        times its length.
        """
        length = len(may_be_chosen_T)
        factor = self.config.context_factor
        bits_3T = draw_random_bits(derive_order_key("permutation", *self.key, number), 3, length)
        chosen_T = np.zeros(length, bool)
        begin = 0
        draw = 0
        while begin < length:
            span = 1 + int(bits_3T[0, draw] % np.uint64(self.config.max_span_length))
            left = begin + int(bits_3T[1, draw] % np.uint64(span * (factor - 1) + 1))
            chosen_T[left : left + span] = True
            begin = begin + span * factor
            draw = draw + 1
        chosen = np.flatnonzero(chosen_T & may_be_chosen_T)[: self.config.count_predicted(length)]
        return chosen[np.argsort(bits_3T[2, chosen], kind="stable")]
