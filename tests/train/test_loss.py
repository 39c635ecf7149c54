"""The loss and its gradient against torch's own, and what an ignored target costs: nothing."""

import pytest
import torch

from llmsys.train.loss import ROWS_ON_CPU, sequence_losses


@pytest.mark.parametrize("length", [1, 7, ROWS_ON_CPU])
def test_losses_and_gradients_equal_the_plain_form(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    logits_BTV = (4 * torch.randn(3, length, 50, generator=generator)).requires_grad_()
    plain_BTV = logits_BTV.detach().clone().requires_grad_()
    targets_BT = torch.randint(0, 50, (3, length), generator=generator)
    targets_BT[1] = -100
    weights_B = torch.tensor([1.0, 2.0, -3.0])
    plain_BT = torch.nn.functional.cross_entropy(plain_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    plain_B = plain_BT.view(3, length).sum(1)
    losses_B = sequence_losses(logits_BTV, targets_BT)
    torch.testing.assert_close(losses_B, plain_B)
    assert losses_B[1] == 0
    (losses_B * weights_B).sum().backward()
    (plain_B * weights_B).sum().backward()
    torch.testing.assert_close(logits_BTV.grad, plain_BTV.grad)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits_BTV = (4 * torch.randn(2, 40, 300, generator=torch.Generator().manual_seed(0))).bfloat16()
    targets_BT = torch.arange(80).view(2, 40)
    exact = sequence_losses(logits_BTV.double(), targets_BT)
    torch.testing.assert_close(sequence_losses(logits_BTV, targets_BT), exact, rtol=1e-6, atol=1e-4)


def test_huge_logits_do_not_overflow() -> None:
    losses = sequence_losses(torch.tensor([[[1e4, -1e4, 0.0]]]), torch.tensor([[1]]))
    assert losses.item() == pytest.approx(2e4)


def test_a_second_backward_is_refused() -> None:
    loss = sequence_losses(torch.zeros(1, 2, 3, requires_grad=True), torch.zeros(1, 2, dtype=torch.int64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up by its first backward"):
        loss.backward()
