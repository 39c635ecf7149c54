"""Dropout of training: other masks on every rank and in every step, and the same again after a
resume.
"""

import pytest
import torch

from llmsys.train import dropout_seed


def test_every_rank_and_step_draws_its_own_masks_and_draws_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def draw_masks() -> dict[tuple[int, int, int], tuple[float, ...]]:
        found = {}
        for seed, step, rank in [
            (seed, step, rank) for seed in range(2) for step in range(3) for rank in range(4)
        ]:
            monkeypatch.setattr(dropout_seed, "get_rank", lambda rank=rank: rank)
            dropout_seed.seed_dropout(seed, step)
            found[seed, step, rank] = tuple(torch.rand(4).tolist())
        return found

    masks = draw_masks()
    assert len(set(masks.values())) == len(masks)
    assert draw_masks() == masks
