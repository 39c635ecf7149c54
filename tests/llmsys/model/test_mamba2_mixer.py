"""Mamba-2's mixer equals transformers' layer (Bamba's, whose norm is by group), document by
document, and the recurrence that defines it, in outputs and gradients.

transformers' torch code takes the lengths of packed documents and ignores them, so its layer runs
on one document at a time. Steps are small enough for a state to live through a row.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.bamba.configuration_bamba import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaMixer

from llmsys.config.linear_attention import Mamba2Config
from llmsys.config.model import ModelConfig
from llmsys.model.forward_context import ContextBuilder, ForwardContext
from llmsys.model.initialization import initialize_parameters
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.mamba2_mixer import Mamba2Mixer
from llmsys.model.state_space_dual import apply_state_space_dual
from llmsys.model.transformer import Transformer
from tests.llmsys.model.test_gated_delta_net import collect, draw_documents, run_one_by_one

HIDDEN, GROUPS, SHARE, KEY, VALUE, ROWS = 24, 2, 3, 10, 8, 2
HEADS = GROUPS * SHARE


def build_model_config(chunk_length: int) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "vocab_size": 50,
            "hidden_size": HIDDEN,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_attention": {
                "kind": "mamba2",
                "num_key_heads": GROUPS,
                "num_value_heads": HEADS,
                "key_head_dim": KEY,
                "value_head_dim": VALUE,
                "chunk_length": chunk_length,
            },
            "norm": {"kind": "rmsnorm", "eps": 1e-5},
        }
    )


def build_pair(chunk_length: int) -> tuple[Mamba2Mixer, nn.Module]:
    """Our layer and transformers', with the same weights."""
    torch.manual_seed(0)
    config = build_model_config(chunk_length)
    assert isinstance(config.linear_attention, Mamba2Config)
    ours = Mamba2Mixer(config, config.linear_attention, 0)
    theirs = BambaMixer(
        BambaConfig(
            hidden_size=HIDDEN,
            mamba_n_heads=HEADS,
            mamba_d_head=VALUE,
            mamba_n_groups=GROUPS,
            mamba_d_state=KEY,
            mamba_chunk_size=16,
            num_hidden_layers=1,
        ),
        0,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        theirs.A_log.uniform_(-5, 0)
        theirs.dt_bias.uniform_(-4, 0)
        theirs.norm.weight.add_(1.0)
        copy_weights(ours, theirs)
    return ours, theirs


def turn_channels(x: Tensor) -> Tensor:
    """Values, keys and queries of theirs as queries, keys and values."""
    keys = GROUPS * KEY
    values, key, query = x.split([HEADS * VALUE, keys, keys])
    return torch.cat([query, key, values])


def copy_weights(ours: Mamba2Mixer, theirs: Any) -> None:
    keys, values = GROUPS * KEY, HEADS * VALUE
    parts = theirs.in_proj.weight.split([values, values, keys, keys, HEADS])
    for name, part in zip(("g_proj", "v_proj", "k_proj", "q_proj", "a_proj"), parts, strict=True):
        getattr(ours, name).weight.copy_(part)
    assert ours.conv_bias is not None
    ours.conv_weight.copy_(turn_channels(theirs.conv1d.weight[:, 0]))
    ours.conv_bias.copy_(turn_channels(theirs.conv1d.bias))
    for name in ("A_log", "dt_bias", "D"):
        getattr(ours, name).copy_(getattr(theirs, name))
    ours.o_norm.weight.copy_(theirs.norm.weight)
    ours.o_proj.weight.copy_(theirs.out_proj.weight)


def build_context(documents_BT: Tensor | None, like: Tensor) -> ForwardContext:
    builder = ContextBuilder(build_model_config(8))
    return builder(like.shape[1], like, documents_BT=documents_BT)


def compare(ours: Mamba2Mixer, found: dict[str, Tensor], theirs: nn.Module,
            expected: dict[str, Tensor]) -> float:  # fmt: skip
    """The largest difference over the largest value, of output, input's and weights' gradients."""
    turned, _ = build_pair(8)
    with torch.no_grad():
        for parameter in theirs.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
        copy_weights(turned, theirs)
    wanted = dict(turned.named_parameters()) | {"x": expected["x"], "y": expected["y"]}
    assert set(wanted) == set(found)
    return max(
        float((found[name] - wanted[name]).detach().abs().max() / wanted[name].detach().abs().max())
        for name in found
    )


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("chunk_length", [1, 8, 64])
def test_the_layer_equals_that_of_transformers(chunk_length: int, packed: bool) -> None:
    ours, theirs = build_pair(chunk_length)
    x_BTD = torch.randn(ROWS, 75, HIDDEN)
    documents_BT = draw_documents(75) if packed else None
    mine, other = x_BTD.clone().requires_grad_(), x_BTD.clone().requires_grad_()
    found = collect(ours, mine, ours(mine, build_context(documents_BT, mine)))
    y_BTD = theirs(other) if documents_BT is None else run_one_by_one(theirs, other, documents_BT)
    expected = collect(theirs, other, y_BTD)
    if documents_BT is not None:
        forgotten = ours(x_BTD, build_context(None, x_BTD)).detach()
        assert float((forgotten - expected["y"]).abs().max() / expected["y"].abs().max()) > 0.05
    assert compare(ours, found, theirs, expected) < 1e-5


def recur(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, documents_BT: Tensor) -> Tensor:
    """The definition, position by position, with a state for each value head."""
    q, k = (x.repeat_interleave(SHARE, 2) for x in (q, k))
    v, log_decay = (x.flatten(2, 3) for x in (v, log_decay))
    state = torch.zeros(len(q), HEADS, KEY, VALUE, dtype=q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        if t:
            state = state * (documents_BT[:, t] == documents_BT[:, t - 1])[:, None, None, None]
        state = state * log_decay[:, t].exp()[..., None, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1).unflatten(2, (GROUPS, SHARE))


@pytest.mark.parametrize("length", [1, 7, 16, 41])
def test_chunks_equal_the_recurrence(length: int) -> None:
    torch.manual_seed(1)
    drawn = [
        torch.randn(ROWS, length, GROUPS, KEY),
        torch.randn(ROWS, length, GROUPS, KEY),
        torch.randn(ROWS, length, GROUPS, SHARE, VALUE),
        -torch.rand(ROWS, length, GROUPS, SHARE) * torch.tensor([0.01, 0.5, 2.0]),
    ]
    documents_BT = draw_documents(length)
    results = []
    for runs_chunks in (True, False):
        leaves = [one.double().requires_grad_() for one in drawn]
        if runs_chunks:
            y, _ = apply_state_space_dual(*leaves, chunk_length=8, segments_BT=documents_BT)
        else:
            q, k, v, log_decay = leaves
            y = recur(q, k, v, log_decay, documents_BT)
        y.sin().sum().backward()
        results.append([y.detach(), *(one.grad for one in leaves)])
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("pieces", [(20,), (9, 11), (1, 1, 1, 1, 16), (3, 2) * 4], ids=str)
def test_a_cache_with_empty_slots_continues_rows(pieces: tuple[int, ...]) -> None:
    ours, theirs = build_pair(8)
    paddings, x_BTD = (0, 5), torch.randn(ROWS, 20, HIDDEN)
    config = build_model_config(8)
    cache = KeyValueCache(config, ROWS, 20, padding_B=torch.tensor(paddings))
    builder, outputs = ContextBuilder(config), []
    with torch.no_grad():
        for piece in x_BTD.split(pieces, 1):
            outputs.append(ours(piece, builder(piece.shape[1], piece, cache=cache)))
            cache.advance(piece.shape[1])
        for row, padding in enumerate(paddings):
            expected = theirs(x_BTD[row : row + 1, padding:])
            found = torch.cat(outputs, 1)[row : row + 1, padding:]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_initial_steps_and_rates_are_within_their_ranges() -> None:
    model = Transformer(build_model_config(8))
    initialize_parameters(model, 0)
    mixer = model.get_submodule("blocks.0.attention")
    steps_H = F.softplus(mixer.get_parameter("dt_bias").detach())
    rates_H = mixer.get_parameter("A_log").detach().exp()
    assert bool(((steps_H > 0.0009) & (steps_H < 0.101)).all())
    assert bool(((rates_H > 0) & (rates_H <= 16)).all())
    assert len(steps_H.unique()) == len(rates_H.unique()) == HEADS
    assert bool((mixer.get_parameter("D") == 1).all())
    assert not bool(mixer.get_parameter("conv_bias").any())
