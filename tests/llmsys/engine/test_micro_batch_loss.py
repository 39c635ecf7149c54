"""The share of one micro-batch in the loss of a step: each sum divided by its own count."""

import pytest
import torch

from llmsys.config.objective import LossConfig
from llmsys.data.batch import IGNORED, Batch
from llmsys.engine.engine import reduce_token_counts
from llmsys.engine.micro_batch_loss import (
    compute_loss_share,
    compute_stage_output,
    select_valid_positions,
)
from llmsys.train.cross_entropy import build_training_loss
from tests.helpers.model_choices import LATENT
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
)

SPARSE = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 6}


def test_nats_are_divided_by_targets_and_auxiliary_losses_by_real_tokens() -> None:
    model = build_tiny_model(
        build_tiny_moe_config(
            {"balance": {"kind": "auxiliary_loss", "weight": 0.5}, "z_loss_weight": 0.1}
        )
    )
    tokens_BT = build_tiny_tokens(2, 7)
    targets_BT, real_BT = tokens_BT.roll(-1, dims=1), torch.ones(2, 7, dtype=torch.bool)
    targets_BT[:, :4] = IGNORED  # tokens without a target, as those of a prompt
    targets_BT[1, 5:], real_BT[1, 5:] = IGNORED, False
    batch = Batch(tokens_BT, targets_BT, real_BT=real_BT)
    counts = reduce_token_counts([batch], torch.device("cpu"))
    share, nats = compute_loss_share(model, model, batch, build_training_loss(LossConfig()), counts)
    auxiliary = torch.stack(
        [layer.sum_auxiliary_losses() for layer in model.list_moe_layers()]
    ).sum()
    assert auxiliary.item() > 0
    torch.testing.assert_close(share, nats / 4 + auxiliary / 12)


def test_a_stage_begins_the_backward_pass_of_its_own_indexers() -> None:
    config = build_tiny_config(num_key_value_heads=4, attention=LATENT | {"sparse": SPARSE})
    first, whole = build_tiny_model(config).train(), build_tiny_model(config).train()
    tokens_BT = build_tiny_tokens(2, 7)
    batch = Batch(tokens_BT, tokens_BT.roll(-1, dims=1))
    counts = reduce_token_counts([batch], torch.device("cpu"))
    stage = {"layers": range(1), "hidden_BTD": None}
    (compute_stage_output(first, first, batch, counts, 3.0, **stage) * 0).sum().backward()
    whole(tokens_BT)
    (3 * whole.list_indexers()[0].sum_auxiliary_losses() / 14).backward()
    expected = dict(whole.named_parameters())
    for name, parameter in first.named_parameters():
        if parameter.grad is None or not parameter.grad.any():
            assert expected[name].grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, expected[name].grad)


@pytest.mark.parametrize("num_valid", [0, 1, 5, 15, 16, 31, 32])
def test_the_positions_that_are_selected_are_those_with_a_target_once_and_in_order(
    num_valid: int,
) -> None:
    torch.manual_seed(0)
    x_BTD, targets_BT = torch.randn(2, 16, 3), torch.full((32,), IGNORED)
    # The first position too, which stands in for those that are missing.
    places = (
        torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(31)])[:num_valid]
        .sort()
        .values
    )
    targets_BT[places] = torch.arange(num_valid) + 100
    for more in (0, 3):  # the count of targets may be an upper bound
        x_1ND, targets_1N = select_valid_positions(
            x_BTD, targets_BT.view(2, 16), min(32, num_valid + more)
        )
        is_valid = targets_1N != IGNORED
        assert targets_1N[is_valid].tolist() == list(range(100, 100 + num_valid))
        assert torch.equal(x_1ND[is_valid], x_BTD.view(32, 3)[places])
