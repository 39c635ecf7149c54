"""Predicted positions: how many, where not, in which order, and the same whoever asks."""

import numpy as np
import torch

from llmsys.config.objective import PermutationConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.data.permutation import PermutationSampler

ROWS, LENGTH, END = 400, 120, 7
SAMPLER = PermutationSampler(PermutationConfig(), protected_token=END, key=("test", 1))


def build_windows() -> Batch:
    """Two documents in each row, the first closed by END, and padding at the end of the last
    row.
    """
    tokens_BT = torch.randint(8, 50, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens_BT[:, 40] = END
    targets_BT = tokens_BT.roll(-1, 1)
    targets_BT[-1, 60:] = IGNORED
    return Batch(tokens_BT, targets_BT, torch.tensor([[0] * 41 + [1] * (LENGTH - 41)] * ROWS))


def test_one_of_six_tokens_is_predicted_in_spans_of_up_to_five() -> None:
    made = SAMPLER.mask_batch(build_windows(), range(ROWS))
    assert made.predicted_BP is not None
    assert made.targets_BT.shape == made.predicted_BP.shape == (ROWS, LENGTH // 6)
    # the rest of the last stretch may be cut off
    assert (made.predicted_BP >= 0).float().mean() > 0.9
    assert torch.equal(made.predicted_BP >= 0, made.targets_BT != IGNORED)
    spans = []
    for row in made.predicted_BP.tolist():
        places = sorted(place for place in row if place >= 0)
        assert len(places) == len(set(places))
        gaps = np.flatnonzero(np.diff([-9, *places, 999]) > 1)
        spans += np.diff(gaps).tolist()
    assert max(spans) <= 10  # two spans may touch
    assert 2.5 < float(np.mean(spans)) < 3.5


def test_targets_are_the_tokens_and_openings_ends_and_padding_are_never_among_them() -> None:
    windows = build_windows()
    made = SAMPLER.mask_batch(windows, range(ROWS))
    assert made.predicted_BP is not None
    assert torch.equal(made.tokens_BT, windows.tokens_BT)
    for row, (places, targets) in enumerate(
        zip(made.predicted_BP.tolist(), made.targets_BT.tolist(), strict=True)
    ):
        chosen = [place for place in places if place >= 0]
        assert not {0, 40, 41} & set(chosen)
        assert row < ROWS - 1 or max(chosen) < 60
        assert targets[: len(chosen)] == windows.tokens_BT[row, chosen].tolist()


def test_order_is_random_and_a_function_of_the_number() -> None:
    windows = build_windows()
    made, again = (SAMPLER.mask_batch(windows, range(ROWS)) for _ in range(2))
    assert made.predicted_BP is not None
    assert again.predicted_BP is not None
    assert torch.equal(made.predicted_BP, again.predicted_BP)
    first_B = made.predicted_BP[:, 0]
    # Neither the first nor the last of the positions comes first more often than chance.
    assert 0.4 < float((first_B < made.predicted_BP[:, 1]).float().mean()) < 0.6
    later = SAMPLER.mask_batch(windows, range(ROWS, 2 * ROWS)).predicted_BP
    assert later is not None
    assert not torch.equal(made.predicted_BP, later)
