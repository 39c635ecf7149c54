"""The loss without logits equals the loss of whole logits, gradients of everything included."""

from typing import Any

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.config.objective import LossConfig
from llmsys.model.output_head import LmHead, MlmHead, build_head
from llmsys.train import cross_entropy as room
from llmsys.train.cross_entropy import (
    build_training_loss,
    compute_linear_cross_entropy,
    compute_sequence_losses,
)

HEADS: dict[str, dict[str, Any]] = {
    "plain": {"kind": "lm"},
    "scaled and capped": {"kind": "lm", "softcap": 2.0, "scale": "inverse_sqrt_hidden_size"},
    "bias": {"kind": "lm", "bias": "trained"},
    "fixed bias": {"kind": "lm", "bias": "fixed", "softcap": 3.0},
    "masked": {"kind": "mlm"},
}


def build_tiny_head(head: dict[str, Any]) -> LmHead | MlmHead:
    config = ModelConfig(
        family="encoder" if head["kind"] == "mlm" else "decoder",
        vocab_size=37,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        head=head,
    )
    module = build_head(config)
    assert isinstance(module, LmHead | MlmHead)
    with torch.no_grad():
        for value in [*module.parameters(), *module.buffers()]:
            value.copy_(
                torch.randn(value.shape, generator=torch.Generator().manual_seed(value.numel()))
            )
    return module


@pytest.mark.parametrize("is_on_host", [True, False], ids=["rows selected", "rows masked"])
@pytest.mark.parametrize(("smoothing", "z"), [(0.0, 0.0), (0.1, 1e-2)])
@pytest.mark.parametrize("kind", HEADS)
def test_loss_and_gradients_equal_those_of_whole_logits(
    kind: str, smoothing: float, z: float, is_on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "is_on_host", lambda x: is_on_host)
    monkeypatch.setattr(room, "LOGITS_BYTES_ON_CPU", 16 * 37 * 4)  # several blocks
    head = build_tiny_head(HEADS[kind])
    generator = torch.Generator().manual_seed(1)
    x_BTD = torch.randn(3, 20, 16, generator=generator, requires_grad=True)
    targets_BT = torch.randint(0, 37, (3, 20), generator=generator)
    targets_BT[1, 4:] = -100
    inputs = [x_BTD, *head.parameters()]
    whole = compute_sequence_losses(head(x_BTD), targets_BT, smoothing, z).sum()
    expected = [whole, *torch.autograd.grad(whole * 0.3, inputs)]
    loss = compute_linear_cross_entropy(head, x_BTD, targets_BT, smoothing, z)
    for value, true in zip([loss, *torch.autograd.grad(loss * 0.3, inputs)], expected, strict=True):
        torch.testing.assert_close(value, true)


def test_nothing_to_learn_costs_nothing_and_leaves_zero_gradients() -> None:
    head, x_BTD = build_tiny_head(HEADS["plain"]), torch.randn(2, 3, 16, requires_grad=True)
    loss = compute_linear_cross_entropy(head, x_BTD, torch.full((2, 3), -100))
    loss.backward()
    assert loss == 0
    assert (x_BTD.grad == 0).all()
    assert (head.weight.grad == 0).all()


def test_bfloat16_gradients_of_the_weight_are_summed_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(room, "LOGITS_BYTES_ON_CPU", 16 * 37 * 2)
    # All blocks pull alike: a sum in bfloat16 stops growing where a block is less than half of its
    # last digit.
    head, x_BTD = (
        build_tiny_head(HEADS["plain"]),
        torch.rand(1, 1 << 14, 16, generator=torch.Generator().manual_seed(2)),
    )
    targets_BT = torch.full((1, 1 << 14), 3)
    exact = torch.autograd.grad(compute_linear_cross_entropy(head, x_BTD, targets_BT), head.weight)[
        0
    ]
    rounded = torch.autograd.grad(
        compute_linear_cross_entropy(head.bfloat16(), x_BTD.bfloat16(), targets_BT), head.weight
    )[0]
    assert float((rounded - exact).norm() / exact.norm()) < 0.02


def test_a_second_backward_is_refused() -> None:
    loss = compute_linear_cross_entropy(
        build_tiny_head(HEADS["plain"]),
        torch.randn(1, 2, 16, requires_grad=True),
        torch.tensor([[1, 2]]),
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consumed by its first backward"):
        loss.backward()


def test_the_training_loss_is_shaped_with_and_without_a_head() -> None:
    head, x_BTD, targets_BT = (
        build_tiny_head(HEADS["plain"]),
        torch.randn(2, 3, 16),
        torch.tensor([[0, 1, 2], [3, 4, 0]]),
    )
    loss = build_training_loss(LossConfig(label_smoothing=0.1, z_loss=1e-3))
    expected = compute_sequence_losses(head(x_BTD), targets_BT, 0.1, 1e-3).sum()
    torch.testing.assert_close(loss(head, x_BTD, targets_BT), expected)
    torch.testing.assert_close(loss(None, head(x_BTD), targets_BT), expected)
