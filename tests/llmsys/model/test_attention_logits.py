"""The largest attention logits of each head, over the pairs of a row and over the forward passes
of a step.
"""

import torch

from llmsys.model.attention_logits import LogitRecorder, compute_max_logits


def test_the_maximum_is_that_of_all_pairs_of_a_row() -> None:
    torch.manual_seed(0)
    q_BTHK, k_BSGK = torch.randn(2, 5, 4, 3), torch.randn(2, 5, 2, 3)
    scores = torch.einsum("bthk,bshk->bhts", q_BTHK, k_BSGK.repeat_interleave(2, dim=2)) * 0.7
    torch.testing.assert_close(compute_max_logits(q_BTHK, k_BSGK, 0.7), scores.amax((0, 2, 3)))


def test_a_rank_records_its_own_heads_at_their_places_in_the_layer() -> None:
    torch.manual_seed(0)
    recorder, passes = (
        LogitRecorder(6),
        [(torch.randn(2, 5, 2, 3), torch.randn(2, 5, 1, 3)) for _ in range(2)],
    )
    for q_BTHK, k_BSGK in passes:
        recorder.record(q_BTHK, k_BSGK, 1.0, slice(2, 4))
    found_H = recorder.take_maxima(torch.device("cpu"))
    largest = torch.stack([compute_max_logits(*one, 1.0) for one in passes]).amax(0)
    torch.testing.assert_close(found_H[2:4], largest)
    assert (found_H[[0, 1, 4, 5]] == -torch.inf).all()
    assert (recorder.take_maxima(torch.device("cpu")) == -torch.inf).all()
