"""The loss and its gradient against torch's own, and what an ignored target costs: nothing."""

import pytest
import torch

from llmsys.train import cross_entropy
from llmsys.train.cross_entropy import compute_sequence_losses
from tests.helpers.live_memory import Followed


@pytest.mark.parametrize("length", [1, 7, 64])
def test_losses_and_gradients_equal_the_plain_form(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    logits_BTV = (4 * torch.randn(3, length, 50, generator=generator)).requires_grad_()
    plain_BTV = logits_BTV.detach().clone().requires_grad_()
    targets_BT = torch.randint(0, 50, (3, length), generator=generator)
    targets_BT[1] = -100
    weights_B = torch.tensor([1.0, 2.0, -3.0])
    plain_BT = torch.nn.functional.cross_entropy(
        plain_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none"
    )
    plain_B = plain_BT.view(3, length).sum(1)
    losses_B = compute_sequence_losses(logits_BTV, targets_BT)
    torch.testing.assert_close(losses_B, plain_B)
    assert losses_B[1] == 0
    (losses_B * weights_B).sum().backward()
    (plain_B * weights_B).sum().backward()
    torch.testing.assert_close(logits_BTV.grad, plain_BTV.grad)


def compute_smoothed_loss(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, smoothing: float, z: float
) -> torch.Tensor:
    """The definition, word for word: a distribution to hit, and the squared log-sum-exp."""
    classes = logits_BTV.shape[-1]
    wanted_BTV = torch.full_like(logits_BTV, smoothing / (classes - 1))
    wanted_BTV.scatter_(-1, targets_BT.clamp(min=0)[..., None], 1 - smoothing)
    losses_BT = (
        -(wanted_BTV * logits_BTV.log_softmax(-1)).sum(-1) + z * logits_BTV.logsumexp(-1) ** 2
    )
    return (losses_BT * (targets_BT != -100)).sum(1)


@pytest.mark.parametrize(("smoothing", "z"), [(0.1, 0.0), (0.0, 1e-2), (0.3, 1e-3)])
def test_smoothing_and_z_loss_equal_their_definitions(smoothing: float, z: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits_BTV = (4 * torch.randn(3, 50, 37, generator=generator)).requires_grad_()
    plain_BTV = logits_BTV.detach().clone().requires_grad_()
    targets_BT = torch.randint(0, 37, (3, 50), generator=generator)
    targets_BT[0, 5:] = -100
    losses_B = compute_sequence_losses(logits_BTV, targets_BT, smoothing, z)
    plain_B = compute_smoothed_loss(plain_BTV, targets_BT, smoothing, z)
    torch.testing.assert_close(losses_B, plain_B)
    (losses_B * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    (plain_B * torch.tensor([1.0, -2.0, 3.0])).sum().backward()
    torch.testing.assert_close(logits_BTV.grad, plain_BTV.grad)
    assert (logits_BTV.grad[0, 5:] == 0).all()


def test_a_classifier_counts_as_sequences_of_one() -> None:
    logits_BV, targets_B1 = torch.randn(4, 3), torch.tensor([[0], [2], [-100], [1]])
    expected = torch.nn.functional.cross_entropy(logits_BV, targets_B1[:, 0], reduction="none")
    torch.testing.assert_close(compute_sequence_losses(logits_BV, targets_B1), expected)


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits_BTV = (
        4 * torch.randn(2, 40, 300, generator=torch.Generator().manual_seed(0))
    ).bfloat16()
    targets_BT = torch.arange(80).view(2, 40)
    exact = compute_sequence_losses(logits_BTV.double(), targets_BT)
    torch.testing.assert_close(
        compute_sequence_losses(logits_BTV, targets_BT), exact, rtol=1e-6, atol=1e-4
    )


def test_huge_logits_do_not_overflow() -> None:
    losses = compute_sequence_losses(torch.tensor([[[1e4, -1e4, 0.0]]]), torch.tensor([[1]]))
    assert losses.item() == pytest.approx(2e4)


def test_a_second_backward_is_refused() -> None:
    loss = compute_sequence_losses(
        torch.zeros(1, 2, 3, requires_grad=True), torch.zeros(1, 2, dtype=torch.int64)
    ).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consumed by its first backward"):
        loss.backward()


def test_one_float32_copy_of_rows_exists_at_a_time() -> None:
    logits_NV = torch.zeros(64, 65_536, dtype=torch.bfloat16)
    copy_bytes = cross_entropy.LOGITS_ON_CPU * 4
    with Followed(logits_NV) as followed:
        cross_entropy.compute_token_losses(
            logits_NV, torch.zeros(64, dtype=torch.long), 0.0, 0.0, logits_NV
        )
    assert copy_bytes <= followed.peak_bytes < 1.5 * copy_bytes


def test_the_heads_gradient_is_summed_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, width = 4096, 64
    monkeypatch.setattr(cross_entropy, "LOGITS_BYTES_ON_CPU", 16 * vocabulary * 2)
    # another test may have left a larger one
    monkeypatch.setattr(cross_entropy, "_logits_buffers", {})
    head = torch.nn.Linear(width, vocabulary, bias=False, dtype=torch.bfloat16)
    x_ND = torch.randn(48, width, dtype=torch.bfloat16, requires_grad=True)
    with Followed(x_ND, head.weight) as followed:
        targets_N = torch.zeros(48, dtype=torch.long)
        arguments = head.weight, None, None, targets_N, 0.0, 0.0, None, None
        cross_entropy._LinearCrossEntropy.apply(x_ND, *arguments)
    element = vocabulary * width
    # The sum in float32 and one block's part; the blocks of logits are small.
    assert 6 * element <= followed.peak_bytes < 7.9 * element
