"""Laws of masking: 15 % chosen, 80/10/10 of them, anew in each epoch, and the same in every run."""

import numpy as np
import pytest
import torch

from llmsys.config.objective import MaskedLmConfig
from llmsys.data.batch import Batch
from llmsys.data.masking import TokenMasker

MASK, END, VOCABULARY, LENGTH = 3, 2, 5000, 128


def masking(seed: int = 0) -> TokenMasker:
    return TokenMasker(MaskedLmConfig(), MASK, END, VOCABULARY, ("f00d", seed))


def windows(count: int) -> Batch:
    tokens_BT = torch.randint(10, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens_BT[:, ::16] = END
    return Batch(tokens_BT, tokens_BT.roll(-1, 1))


def test_shares_are_those_of_bert() -> None:
    batch = windows(400)
    masked = masking().mask_batch(batch, range(400))
    chosen = masked.targets_BT != -100
    assert (chosen.sum(1) == round(0.15 * (LENGTH - 8))).all()
    assert not chosen[batch.tokens_BT == END].any()
    assert torch.equal(masked.targets_BT[chosen], batch.tokens_BT[chosen])
    assert torch.equal(masked.tokens_BT[~chosen], batch.tokens_BT[~chosen])
    seen, true = masked.tokens_BT[chosen], batch.tokens_BT[chosen]
    assert float((seen == MASK).float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float((seen == true).float().mean()) == pytest.approx(0.1, abs=0.02)
    other = seen[(seen != MASK) & (seen != true)]
    assert len(other) / len(seen) == pytest.approx(0.1, abs=0.02)
    assert len(other.unique()) > 0.8 * len(other)  # any token of the vocabulary
    places = np.flatnonzero(chosen.sum(0).numpy())
    assert len(places) == LENGTH - 8  # no place is spared


def test_a_mask_is_a_function_of_seed_and_window_alone() -> None:
    batch = windows(8)
    whole = masking().mask_batch(batch, range(8))
    alone = masking().mask_batch(Batch(batch.tokens_BT[5:6], batch.targets_BT[5:6]), [5])
    assert torch.equal(alone.tokens_BT[0], whole.tokens_BT[5])
    assert not torch.equal(masking().mask_batch(batch, range(8, 16)).targets_BT, whole.targets_BT)
    assert not torch.equal(masking(seed=1).mask_batch(batch, range(8)).targets_BT, whole.targets_BT)


def test_padding_is_never_chosen() -> None:
    batch = windows(4)
    batch.targets_BT[:, 40:] = -100
    masked = masking().mask_batch(batch, range(4))
    assert not (masked.targets_BT[:, 40:] != -100).any()
    assert (masked.targets_BT != -100).any()
