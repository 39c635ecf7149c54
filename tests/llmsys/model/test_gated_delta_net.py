"""Linear attention by the gated delta rule equals transformers' layer, document by document, and
the recurrence that defines it, in outputs and gradients.

transformers' torch code takes the lengths of packed documents and ignores them, so its layer runs
on one document at a time. Decays are drawn small enough for a state to live through a row.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from llmsys.config.linear_attention import GatedDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.model.forward_context import ContextBuilder, ForwardContext
from llmsys.model.gated_delta_net import GatedDeltaNet
from llmsys.model.gated_delta_rule import apply_gated_delta_rule, normalize_heads
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.state_chunks import RowStart

HIDDEN, GROUPS, SHARE, KEY, VALUE, ROWS = 48, 2, 3, 8, 12, 2


def build_model_config(chunk_length: int) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "vocab_size": 50,
            "hidden_size": HIDDEN,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            # As transformers' layer has it.
            "norm": {"kind": "rmsnorm", "eps": 1e-6},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_attention": {
                "kind": "gated_delta",
                "num_key_heads": GROUPS,
                "num_value_heads": GROUPS * SHARE,
                "key_head_dim": KEY,
                "value_head_dim": VALUE,
                "chunk_length": chunk_length,
            },
        }
    )


def build_pair(chunk_length: int, *, lives: bool = True) -> tuple[GatedDeltaNet, nn.Module]:
    """Our layer and transformers', with the same weights."""
    torch.manual_seed(0)
    config = build_model_config(chunk_length)
    assert isinstance(config.linear_attention, GatedDeltaConfig)
    ours = GatedDeltaNet(config, config.linear_attention, 0)
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=HIDDEN,
            linear_num_key_heads=GROUPS,
            linear_num_value_heads=GROUPS * SHARE,
            linear_key_head_dim=KEY,
            linear_value_head_dim=VALUE,
            num_hidden_layers=4,
        ),
        0,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        theirs.A_log.uniform_(-9, -5) if lives else theirs.A_log.uniform_(0.01, 16).log_()
        theirs.norm.weight.add_(1.0)
        copy_weights(ours, theirs)
    return ours, theirs


def copy_weights(ours: GatedDeltaNet, theirs: Any) -> None:
    """Each key head has the rows of its query, key, values and gates; then of shares and decays."""
    qkvz, ba = theirs.in_proj_qkvz.weight, theirs.in_proj_ba.weight
    cut = qkvz.view(GROUPS, -1, HIDDEN).split([KEY, KEY, SHARE * VALUE, SHARE * VALUE], 1)
    names = ("q_proj", "k_proj", "v_proj", "g_proj")
    both = ba.view(GROUPS, 2 * SHARE, HIDDEN).split(SHARE, 1)
    for name, part in zip((*names, "b_proj", "a_proj"), (*cut, *both), strict=True):
        getattr(ours, name).weight.copy_(part.reshape(-1, HIDDEN))
    ours.conv_weight.copy_(theirs.conv1d.weight[:, 0])
    ours.A_log.copy_(theirs.A_log)
    ours.dt_bias.copy_(theirs.dt_bias)
    ours.o_norm.weight.copy_(theirs.norm.weight)
    ours.o_proj.weight.copy_(theirs.out_proj.weight)


def build_context(documents_BT: Tensor | None, like: Tensor) -> ForwardContext:
    builder = ContextBuilder(build_model_config(8))
    return builder(like.shape[1], like, documents_BT=documents_BT)


def draw_documents(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(ROWS, length, generator=generator) < 5 / length).long().cumsum(1)


def run_one_by_one(layer: nn.Module, x_BTD: Tensor, documents_BT: Tensor) -> Tensor:
    """Run transformers' layer on each document alone."""
    rows = []
    for x_TD, documents_T in zip(x_BTD, documents_BT, strict=True):
        cuts = (documents_T.diff().nonzero()[:, 0] + 1).tolist()
        parts = [
            layer(x_TD[None, begin:end]) for begin, end in pairwise([0, *cuts, len(documents_T)])
        ]
        rows.append(torch.cat(parts, 1))
    return torch.cat(rows)


def collect(module: nn.Module, x_BTD: Tensor, y_BTD: Tensor) -> dict[str, Tensor]:
    (y_BTD * torch.linspace(-1, 1, y_BTD.numel()).view_as(y_BTD)).sum().backward()
    grads = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    assert x_BTD.grad is not None
    return grads | {"x": x_BTD.grad, "y": y_BTD.detach()}


def compare(ours: GatedDeltaNet, found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference over the largest value, of output, input's and weights' gradients."""
    assert isinstance(ours.sizes, GatedDeltaConfig)
    turned = GatedDeltaNet(build_model_config(8), ours.sizes, 0)
    shell = type("Gradients", (), {})()
    for name, value in expected.items():
        owner = shell
        *path, last = name.split(".")
        for part in path:
            owner = owner.__dict__.setdefault(part, type("Part", (), {})())
        setattr(owner, last, value)
    with torch.no_grad():
        copy_weights(turned, shell)
    wanted = dict(turned.named_parameters()) | {"x": expected["x"], "y": expected["y"]}
    assert set(wanted) == set(found)
    return max(
        float((found[name] - wanted[name]).detach().abs().max() / wanted[name].detach().abs().max())
        for name in found
    )


@pytest.mark.parametrize("chunk_length", [1, 8, 64])
@pytest.mark.parametrize("lives", [True, False], ids=["small decays", "default decays"])
def test_the_layer_equals_that_of_transformers(chunk_length: int, lives: bool) -> None:
    ours, theirs = build_pair(chunk_length, lives=lives)
    x_BTD = torch.randn(ROWS, 75, HIDDEN)
    mine, other = x_BTD.clone().requires_grad_(), x_BTD.clone().requires_grad_()
    found = collect(ours, mine, ours(mine, build_context(None, mine)))
    expected = collect(theirs, other, theirs(other))
    # Logarithms of default decays add up to hundreds in a chunk: float32 keeps five digits of them.
    assert compare(ours, found, expected) < (1e-5 if lives else 1e-4)


@pytest.mark.parametrize("chunk_length", [8, 64])
def test_documents_of_a_row_are_as_each_alone(chunk_length: int) -> None:
    ours, theirs = build_pair(chunk_length)
    x_BTD, documents_BT = torch.randn(ROWS, 150, HIDDEN), draw_documents(150)
    assert int(documents_BT.max()) > 3
    mine, other = x_BTD.clone().requires_grad_(), x_BTD.clone().requires_grad_()
    found = collect(ours, mine, ours(mine, build_context(documents_BT, mine)))
    expected = collect(theirs, other, run_one_by_one(theirs, other, documents_BT))
    assert compare(ours, found, expected) < 1e-5
    forgotten = ours(x_BTD, build_context(None, x_BTD)).detach()
    assert float((forgotten - expected["y"]).abs().max() / expected["y"].abs().max()) > 0.1


def test_a_document_that_goes_on_after_another_begins_anew() -> None:
    ours, _ = build_pair(8)
    x_BTD = torch.randn(ROWS, 30, HIDDEN)
    again_BT, apart_BT = (
        torch.tensor(one).repeat_interleave(10).expand(ROWS, -1) for one in ([0, 1, 0], [0, 1, 2])
    )
    with torch.no_grad():
        assert torch.equal(
            ours(x_BTD, build_context(again_BT, x_BTD)), ours(x_BTD, build_context(apart_BT, x_BTD))
        )


def recur(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
          documents_BT: Tensor) -> Tensor:  # fmt: skip
    """The definition, position by position, with a state for each value head."""
    q, k = (x.repeat_interleave(SHARE, 2) for x in (q, k))
    v, log_decay, beta = (x.flatten(2, 3) for x in (v, log_decay, beta))
    state = torch.zeros(len(q), GROUPS * SHARE, KEY, VALUE, dtype=q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        if t:
            state = state * (documents_BT[:, t] == documents_BT[:, t - 1])[:, None, None, None]
        state = state * log_decay[:, t].exp()[..., None, None]
        held = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        change = beta[:, t, :, None] * (v[:, t] - held)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * KEY**-0.5)
    return torch.stack(outputs, 1).unflatten(2, (GROUPS, SHARE))


@pytest.mark.parametrize("length", [1, 7, 16, 41])
def test_chunks_equal_the_recurrence(length: int) -> None:
    torch.manual_seed(1)
    drawn = [
        torch.randn(ROWS, length, GROUPS, KEY),
        torch.randn(ROWS, length, GROUPS, KEY),
        torch.randn(ROWS, length, GROUPS, SHARE, VALUE),
        -torch.rand(ROWS, length, GROUPS, SHARE) * torch.tensor([0.01, 0.5, 2.0]),
        torch.rand(ROWS, length, GROUPS, SHARE),
    ]
    documents_BT = draw_documents(length)
    results = []
    for runs_chunks in (True, False):
        leaves = [one.double().requires_grad_() for one in drawn]
        heads = [normalize_heads(one) for one in leaves[:2]]
        if runs_chunks:
            y, _ = apply_gated_delta_rule(
                *heads, *leaves[2:], chunk_length=8, segments_BT=documents_BT
            )
        else:
            q, k, v, log_decay, beta = (*heads, *leaves[2:])
            y = recur(q, k, v, log_decay, beta, documents_BT)
        y.sin().sum().backward()
        results.append([y.detach(), *(one.grad for one in leaves)])
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cut", [1, 8, 13])
def test_a_state_continues_where_it_was(cut: int) -> None:
    torch.manual_seed(2)
    rows = [
        normalize_heads(torch.randn(ROWS, 30, GROUPS, KEY).double()),
        normalize_heads(torch.randn(ROWS, 30, GROUPS, KEY).double()),
        torch.randn(ROWS, 30, GROUPS, SHARE, VALUE).double(),
        -torch.rand(ROWS, 30, GROUPS, SHARE).double() * 0.1,
        torch.rand(ROWS, 30, GROUPS, SHARE).double(),
    ]
    segments_BT = torch.tensor([[0] * 30, [0] * cut + [1] * (30 - cut)])
    first, second = ([x[:, :cut] for x in rows], [x[:, cut:] for x in rows])
    whole, last = apply_gated_delta_rule(
        *rows, chunk_length=8, segments_BT=segments_BT, keeps_state=True
    )
    y, state = apply_gated_delta_rule(
        *first, chunk_length=8, segments_BT=segments_BT[:, :cut], keeps_state=True
    )
    assert state is not None
    assert last is not None
    z, end = apply_gated_delta_rule(
        *second,
        chunk_length=8,
        segments_BT=segments_BT[:, cut:],
        start=RowStart(state, segments_BT[:, cut - 1]),
        keeps_state=True,
    )
    assert end is not None
    torch.testing.assert_close(torch.cat([y, z], 1), whole, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(end, last, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pieces", [(20,), (9, 11), (1, 1, 1, 1, 16), (3, 2) * 4], ids=str)
def test_a_cache_with_empty_slots_continues_rows(pieces: tuple[int, ...]) -> None:
    ours, theirs = build_pair(8)
    paddings, x_BTD = (0, 5), torch.randn(ROWS, 20, HIDDEN)
    config = build_model_config(8)
    cache = KeyValueCache(config, ROWS, 20, padding_B=torch.tensor(paddings))
    builder, outputs = ContextBuilder(config), []
    with torch.no_grad():
        for piece in x_BTD.split(pieces, 1):
            context = builder(piece.shape[1], piece, cache=cache)
            outputs.append(ours(piece, context))
            cache.advance(piece.shape[1])
        for row, padding in enumerate(paddings):
            expected = theirs(x_BTD[row : row + 1, padding:])
            found = torch.cat(outputs, 1)[row : row + 1, padding:]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
