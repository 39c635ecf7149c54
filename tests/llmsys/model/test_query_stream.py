"""XLNet's two streams against transformers: logits and gradients of predicted positions, and
what is counted.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.estimate.flops import count_flops
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer
from tests.helpers.counted_flops import use_eager_attention
from tests.helpers.xlnet import build_xlnet, iter_gradients

MODEL: dict[str, Any] = {
    "family": "encoder", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2, "max_position_embeddings": 16, "initializer_range": 0.3,
    "residual": {"kind": "post"},
    "position": {"kind": "transformer_xl", "segments": 2}, "norm": {"kind": "layernorm",
        "eps": 1e-12},
    "tie_word_embeddings": True, "feed_forward": {"kind": "gelu", "bias": True},
    "head": {"kind": "permutation"},
}  # fmt: skip
# In the order of prediction; the second row predicts one token less.
PREDICTED_BP = torch.tensor([[5, 2, 6], [8, 7, -1], [1, 9, 4]])
TYPES_BT = torch.tensor([[0] * 4 + [1] * 6, [0] * 10, [0, 1] * 5])


def build_model(**changes: Any) -> Transformer:
    model = Transformer(ModelConfig.model_validate(MODEL | changes))
    initialize_parameters(model, seed=1)
    return model


def draw_tokens() -> Tensor:
    return torch.randint(0, 40, (3, 10), generator=torch.Generator().manual_seed(0))


def build_their_masks() -> tuple[Tensor, Tensor]:
    """Return what each token must not see, and which tokens are predicted, as the authors' code
    has them.
    """
    hidden_BTT, mapping_BPT = torch.zeros(3, 10, 10), torch.zeros(3, 3, 10)
    for row, places in enumerate(PREDICTED_BP.tolist()):
        order = [place for place in places if place >= 0]
        for number, place in enumerate(order):
            mapping_BPT[row, number, place] = 1
            for t in range(10):
                is_later = t not in order or order.index(t) <= number
                hidden_BTT[row, t, place] = float(is_later)
    return hidden_BTT, mapping_BPT


def test_logits_and_gradients_of_predictions_equal_transformers() -> None:
    pytest.importorskip("transformers")
    ours, tokens_BT = build_model().train(), draw_tokens()
    theirs = build_xlnet(ours).train()
    hidden_BTT, mapping_BPT = build_their_masks()
    found_BPV = ours(tokens_BT, token_types_BT=TYPES_BT, predicted_BP=PREDICTED_BP)
    expected_BPV = theirs(
        tokens_BT,
        token_type_ids=TYPES_BT,
        perm_mask=hidden_BTT,
        target_mapping=mapping_BPT,
        use_mems=False,
    ).logits
    is_real_BP = PREDICTED_BP >= 0
    torch.testing.assert_close(
        found_BPV[is_real_BP], expected_BPV[is_real_BP], atol=1e-5, rtol=1e-5
    )
    weights_NV = torch.randn(8, 40, generator=torch.Generator().manual_seed(2))
    for logits_BPV in (found_BPV, expected_BPV):
        (logits_BPV[is_real_BP] * weights_NV).sum().backward()
    for name, found, expected in iter_gradients(ours, theirs):
        assert (found - expected).norm() < 1e-5 * expected.norm(), name


@torch.no_grad()
def test_a_prediction_sees_what_is_not_predicted_and_what_was_before_it() -> None:
    model, tokens_BT = build_model().eval(), draw_tokens()
    documents_BT = torch.tensor([[0] * 3 + [1] * 7] * 3)
    found_BPV = model(tokens_BT, documents_BT=documents_BT, predicted_BP=PREDICTED_BP)
    for row, places in enumerate(PREDICTED_BP.tolist()):
        for t in range(10):
            changed_BT = tokens_BT.clone()
            changed_BT[row, t] = (changed_BT[row, t] + 1) % 40
            changed_BPV = model(changed_BT, documents_BT=documents_BT, predicted_BP=PREDICTED_BP)
            for number, place in enumerate(places):
                if place < 0:
                    continue
                is_hidden = t in places and places.index(t) >= number
                is_seen = not is_hidden and documents_BT[row, t] == documents_BT[row, place]
                assert (
                    torch.equal(changed_BPV[row, number], found_BPV[row, number]) is not is_seen
                ), (row, t, place)


def test_both_streams_count_what_torch_counts() -> None:
    model = build_model().train()
    with use_eager_attention(), FlopCounterMode(display=False) as counter:
        model(draw_tokens(), predicted_BP=PREDICTED_BP).sum().backward()
    assert (
        count_flops(model.config, 10, 3, "full", target_length=13).forward_backward
        == counter.get_total_flops()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": {"kind": "rope"}}, "position.kind=rope adds positions elsewhere"),
        (
            {"recurrence": {"kind": "fixed"}},
            "recurrence: head.kind=permutation is not proven with it",
        ),
        ({"family": "decoder"}, "permutation is not a head of family=decoder"),
    ],
)
def test_models_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(MODEL | changes)


@pytest.mark.parametrize("axis", ["tensor", "context", "pipeline"])
def test_axes_that_cannot_split_it_are_rejected(axis: str) -> None:
    with pytest.raises(ValueError, match=f"layout.{axis}"):
        RunConfig.model_validate({"model": MODEL, "layout": {axis: 2}})
