"""The balancing bias after a step: moved by its load, and left alone where the step was skipped."""

import pytest
import torch

from llmsys.train.expert_load import update_expert_balance
from tests.helpers.tiny_model import build_tiny_model, build_tiny_moe_config, build_tiny_tokens


@pytest.mark.parametrize("applied", [True, False])
def test_a_skipped_step_moves_no_bias_and_its_load_does_not_count_in_the_next(
    applied: bool,
) -> None:
    model = build_tiny_model(build_tiny_moe_config({"balance": {"kind": "bias", "rate": 0.25}}))
    layers = model.list_moe_layers()
    before = [layer.balance_bias_E.clone() for layer in layers]
    model(build_tiny_tokens(3, 7))
    report = update_expert_balance(model, applied).read_report()
    for layer, bias_E, load in zip(layers, before, report.load, strict=True):
        step_E = 0.25 * torch.sign(1 / len(load) - torch.tensor(load))
        assert step_E.any()
        torch.testing.assert_close(layer.balance_bias_E, bias_E + step_E if applied else bias_E)
        assert not any(counter.any() for counter in layer.get_step_counters())


def test_a_step_without_tokens_leaves_the_shares_of_the_step_before() -> None:
    model = build_tiny_model(
        build_tiny_moe_config({"balance": {"kind": "auxiliary_loss", "weight": 0.5}})
    )
    model(build_tiny_tokens(3, 7))
    update_expert_balance(model)
    shares = [
        layer.expert_share_E.clone()
        for layer in model.list_moe_layers()
        if layer.expert_share_E is not None
    ]
    assert shares
    assert all(share.sum() == 1 for share in shares)
    update_expert_balance(model)
    for layer, share_E in zip(model.list_moe_layers(), shares, strict=True):
        torch.testing.assert_close(layer.expert_share_E, share_E)
