"""Segments with memory against transformers' recurrence over segments; what they count, generate
and reject.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from llmsys.config.model import ModelConfig
from llmsys.config.run import RunConfig
from llmsys.config.segment_memory import SegmentMemoryAttentionConfig
from llmsys.estimate.flops import count_flops
from llmsys.model.initialization import initialize_parameters
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.transformer import Transformer
from tests.helpers.counted_flops import use_eager_attention
from tests.helpers.xlnet import build_xlnet, iter_gradients

SEGMENT, MEMORY = 4, 6
MODEL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32, "initializer_range": 0.3, "position": {"kind": "transformer_xl"},
    "attention": {"kind": "segment_memory", "segment_length": SEGMENT, "memory_length": MEMORY},
    "residual": {"kind": "post"}, "norm": {"kind": "layernorm", "eps": 1e-12},
    "tie_word_embeddings": True,
    "feed_forward": {"kind": "gelu", "bias": True}, "head": {"kind": "lm", "bias": "trained"},
}  # fmt: skip


def build_model(**changes: Any) -> Transformer:
    model = Transformer(ModelConfig.model_validate(MODEL | changes))
    initialize_parameters(model, seed=1)
    return model


def draw_tokens(length: int) -> Tensor:
    return torch.randint(0, 40, (3, length), generator=torch.Generator().manual_seed(0))


def test_one_pass_equals_transformers_recurrence_over_segments() -> None:
    """Theirs runs a segment at a time and keeps the hidden states of every layer without their
    gradient.
    """
    pytest.importorskip("transformers")
    ours, tokens_BT = build_model().train(), draw_tokens(18)
    theirs = build_xlnet(ours, attn_type="uni", mem_len=MEMORY, use_mems_train=True).train()
    pieces, memories = [], None
    for segment_BT in tokens_BT.split(SEGMENT, dim=1):
        output = theirs(segment_BT, mems=memories, use_mems=True)
        pieces.append(output.logits)
        memories = output.mems
    expected_BTV, found_BTV = torch.cat(pieces, dim=1), ours(tokens_BT)
    torch.testing.assert_close(found_BTV, expected_BTV, atol=1e-5, rtol=1e-5)
    weights_BTV = torch.randn(found_BTV.shape, generator=torch.Generator().manual_seed(2))
    for logits_BTV in (found_BTV, expected_BTV):
        (logits_BTV * weights_BTV).sum().backward()
    for name, found, expected in iter_gradients(ours, theirs):
        assert (found - expected).norm() < 1e-5 * expected.norm(), name


def test_a_longer_memory_reaches_further_back() -> None:
    """One layer, so that what a position sees is what reaches it."""
    tokens_BT = draw_tokens(16)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 3] = (changed_BT[:, 3] + 1) % 40
    for memory in (0, 4, 9):
        attention = {"kind": "segment_memory", "segment_length": SEGMENT, "memory_length": memory}
        model = build_model(num_hidden_layers=1, attention=attention).eval()
        differs_T = (model(tokens_BT) - model(changed_BT)).abs().amax((0, 2)) > 1e-6
        # Position 3 is the last of its segment; a memory shows it to the segments that begin up to
        # 3 + memory.
        last = 3 + memory - (3 + memory) % SEGMENT + SEGMENT if memory else SEGMENT
        assert differs_T.tolist() == [3 <= place < last for place in range(16)]


@torch.no_grad()
def test_a_cache_of_padded_rows_gives_the_logits_of_each_row_alone() -> None:
    model, tokens_BT = build_model().eval(), draw_tokens(13)
    padding_B = torch.tensor([0, 2, 5])
    cache = KeyValueCache(model.config, 3, 13, padding_B=padding_B)
    found = [model(tokens_BT[:, :7], cache=cache)]
    found += [model(tokens_BT[:, place : place + 1], cache=cache) for place in range(7, 13)]
    for row, padding in enumerate(padding_B.tolist()):
        expected = model(tokens_BT[row : row + 1, padding:])
        torch.testing.assert_close(
            torch.cat(found, 1)[row : row + 1, padding:], expected, atol=1e-5, rtol=1e-5
        )


def test_forward_and_backward_count_what_torch_counts() -> None:
    """The memory's keys and values have no gradient to the layer below."""
    model = build_model().train()
    with use_eager_attention(), FlopCounterMode(display=False) as counter:
        model(draw_tokens(19)).sum().backward()
    assert count_flops(model.config, 19, 3, "full").forward_backward == counter.get_total_flops()


@pytest.mark.parametrize("documents", [[19], [3, 7, 9], [4, 4, 11]])
def test_visible_pairs_are_those_of_the_rule(documents: list[int]) -> None:
    attention = SegmentMemoryAttentionConfig(segment_length=SEGMENT, memory_length=MEMORY)
    numbers = [number for number, size in enumerate(documents) for _ in range(size)]
    pairs = [
        (t, s)
        for t in range(19)
        for s in range(t + 1)
        if numbers[s] == numbers[t] and s >= t - t % SEGMENT - MEMORY
    ]
    assert attention.count_pairs(19, documents) == len(pairs)
    assert attention.count_pairs(19, None) == 20 * (SEGMENT + MEMORY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"family": "encoder", "head": {"kind": "features"}},
            "so family=encoder cannot use it. Use multi_head",
        ),
        (
            {"position": {"kind": "rope"}},
            "rope is not relative to a memory. attention.kind=segment_memory needs",
        ),
        ({"sliding_window": 8}, "attention.kind=segment_memory limits keys by its memory"),
    ],
)
def test_models_that_do_not_fit_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.model_validate(MODEL | changes)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor": 2}, "needs full sequences on each rank"),
        ({"context": 2}, "needs full sequences on each rank"),
        ({"pipeline": 3}, "model.attention.kind=segment_memory does not run in stages"),
    ],
)
def test_axes_that_cannot_split_it_are_rejected(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig.model_validate({"model": MODEL, "layout": layout})
