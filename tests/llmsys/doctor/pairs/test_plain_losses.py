"""Plain losses of a micro-batch are sums over its sequences, whatever their number."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.doctor.pairs.plain_losses import RouterWatch
from llmsys.model.transformer import Transformer
from tests.helpers.tiny_model import build_tiny_moe_config

TOKENS_BT = torch.arange(48).view(4, 12) * 7 % 29
DOCUMENTS_BT = torch.tensor([0] * 5 + [1] * 7).expand(4, 12)


def watch(model: Transformer, tokens_BT: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and tokens of every expert of the first layer with experts."""
    watched = RouterWatch(model)
    model(tokens_BT, documents_BT=documents_BT)
    [load, *_] = next(iter(watched.loads.values()))
    return load.loss.detach(), load.tokens_E


@pytest.mark.parametrize(
    "moe",
    [
        {"balance": {"kind": "auxiliary_loss", "weight": 0.5, "scope": "sequence"}},
        {"balance": {"kind": "bias", "rate": 0.01, "sequence_weight": 0.5}},
        {"routing": {"kind": "expert_choice", "factor": 1.5}, "balance": {"kind": "none"}},
        {
            "routing": {"kind": "expert_choice", "factor": 1.5, "scope": "document"},
            "balance": {"kind": "none"},
        },
    ],
    ids=str,
)
def test_sequences_of_one_micro_batch_have_the_losses_that_they_have_alone(
    moe: dict[str, Any],
) -> None:
    torch.manual_seed(0)
    model = Transformer(build_tiny_moe_config(moe)).train()
    together, tokens_E = watch(model, TOKENS_BT, DOCUMENTS_BT)
    alone = [
        watch(model, TOKENS_BT[row : row + 1], DOCUMENTS_BT[row : row + 1])
        for row in range(len(TOKENS_BT))
    ]
    torch.testing.assert_close(together, torch.stack([loss for loss, _ in alone]).sum())
    assert tokens_E.tolist() == torch.stack([tokens for _, tokens in alone]).sum(0).tolist()
    if "routing" not in moe:
        # Rows differ, so a mean over all of them is another number.
        assert len({tuple(tokens.tolist()) for _, tokens in alone}) > 1
