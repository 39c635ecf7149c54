"""Dropout keeps the mean, the right share, and its gradient; and outside of training does
nothing.
"""

import pytest
import torch

from llmsys.model.dropout import apply_dropout, draw_dropout_mask


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_share_that_stays_and_its_factor(probability: float, dtype: torch.dtype) -> None:
    factors = draw_dropout_mask(torch.empty(501, 399, dtype=dtype), probability)
    staying = factors != 0
    assert float(staying.float().mean()) == pytest.approx(1 - probability, abs=0.005)
    assert factors[staying].unique().tolist() == pytest.approx([1 / (1 - probability)], rel=5e-3)


def test_every_place_of_a_draw_is_as_likely_and_neighbours_are_independent() -> None:
    staying = (draw_dropout_mask(torch.empty(100_000, 4), 0.5) != 0).float()
    torch.testing.assert_close(staying.mean(0), torch.full((4,), 0.5), rtol=0, atol=0.01)
    torch.testing.assert_close(torch.corrcoef(staying.T), torch.eye(4), rtol=0, atol=0.015)


def test_the_gradient_passes_where_the_value_did() -> None:
    x = torch.ones(1000, requires_grad=True)
    y = apply_dropout(x, 0.3, training=True)
    y.sum().backward()
    torch.testing.assert_close(x.grad, y.detach())


def test_nothing_is_drawn_outside_of_training() -> None:
    x, state = torch.randn(9), torch.get_rng_state()
    assert apply_dropout(x, 0.5, training=False) is x
    assert apply_dropout(x, 0.0, training=True) is x
    assert torch.equal(torch.get_rng_state(), state)
