"""Kimi delta attention equals transformers' layer, document by document, and the recurrence that
defines it, in outputs and gradients.

transformers' torch code takes the lengths of packed documents and ignores them, so its layer runs
on one document at a time.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from llmsys.config.linear_attention import KimiDeltaConfig
from llmsys.config.model import ModelConfig
from llmsys.model.forward_context import ContextBuilder, ForwardContext
from llmsys.model.gated_delta_rule import normalize_heads
from llmsys.model.initialization import initialize_parameters
from llmsys.model.kimi_delta_net import KimiDeltaNet
from llmsys.model.kimi_delta_rule import apply_kimi_delta_rule
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.state_chunks import RowStart
from llmsys.model.transformer import Transformer
from tests.llmsys.model.test_gated_delta_net import collect, draw_documents, run_one_by_one

HIDDEN, HEADS, WIDTH, ROWS = 48, 4, 8, 2
GROUPS, SHARE, KEY, VALUE = 2, 3, 8, 12


def build_model_config(chunk_length: int) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "vocab_size": 50,
            "hidden_size": HIDDEN,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            # As transformers' layer has it.
            "norm": {"kind": "rmsnorm", "eps": 1e-5},
            "layer_types": ["linear_attention", "full_attention"],
            "linear_attention": {
                "kind": "kimi_delta",
                "num_key_heads": HEADS,
                "num_value_heads": HEADS,
                "key_head_dim": WIDTH,
                "value_head_dim": WIDTH,
                "decay_rank": WIDTH,
                "gate_rank": WIDTH,
                "chunk_length": chunk_length,
            },
        }
    )


def build_pair(chunk_length: int, *, lives: bool = True) -> tuple[KimiDeltaNet, nn.Module]:
    """Our layer and transformers', with the same weights."""
    torch.manual_seed(0)
    config = build_model_config(chunk_length)
    assert isinstance(config.linear_attention, KimiDeltaConfig)
    ours = KimiDeltaNet(config, config.linear_attention, 0)
    theirs = KimiLinearDeltaAttention(
        KimiLinearConfig(
            hidden_size=HIDDEN,
            linear_num_heads=HEADS,
            linear_head_dim=WIDTH,
            num_hidden_layers=4,
        ),
        0,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        rates = theirs.forget_gate.A_log
        rates.uniform_(-6, -2) if lives else rates.uniform_(1, 16).log_()
        theirs.o_norm.weight.add_(1.0)
        for name, value in ours.named_parameters():
            value.copy_(rename(dict(theirs.named_parameters()), ours)[name])
    return ours, theirs


def rename(theirs: dict[str, Tensor], ours: KimiDeltaNet) -> dict[str, Tensor]:
    """Their tensors by our names, in our shapes."""
    shapes = {name: one.shape for name, one in ours.named_parameters()}
    renamed = {}
    for name, value in theirs.items():
        own = name.replace("forget_gate.", "").replace("conv1d.weight", "conv_weight")
        renamed[own] = value.reshape(shapes.get(own, value.shape))
    return renamed


def build_context(documents_BT: Tensor | None, like: Tensor) -> ForwardContext:
    builder = ContextBuilder(build_model_config(8))
    return builder(like.shape[1], like, documents_BT=documents_BT)


def compare(ours: KimiDeltaNet, found: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference over the largest value, of output, input's and weights' gradients."""
    wanted = rename(theirs, ours)
    assert set(wanted) == set(found)
    return max(
        float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in found
    )


@pytest.mark.parametrize("chunk_length", [1, 8, 64])
@pytest.mark.parametrize("lives", [True, False], ids=["small decays", "large decays"])
def test_the_layer_equals_that_of_transformers(chunk_length: int, lives: bool) -> None:
    ours, theirs = build_pair(chunk_length, lives=lives)
    x_BTD = torch.randn(ROWS, 75, HIDDEN)
    mine, other = x_BTD.clone().requires_grad_(), x_BTD.clone().requires_grad_()
    found = collect(ours, mine, ours(mine, build_context(None, mine)))
    expected = collect(theirs, other, theirs(other))
    # Their logarithms of large decays add up to hundreds in a chunk, where float32 keeps four
    # digits of a gradient; ours add up between two positions, and are within 1e-5 of float64.
    assert compare(ours, found, expected) < (1e-5 if lives else 1e-3)
    exact, third = copy.deepcopy(ours).double(), x_BTD.double().requires_grad_()
    exact.zero_grad()
    wanted = collect(exact, third, exact(third, build_context(None, third)))
    assert compare(ours, found, {name: one.float() for name, one in wanted.items()}) < 2e-5


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


def recur(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
          documents_BT: Tensor) -> Tensor:  # fmt: skip
    """The definition, position by position, with a state for each value head."""
    state = torch.zeros(ROWS, GROUPS, SHARE, KEY, VALUE, dtype=q.dtype)
    outputs = []
    for t in range(q.shape[1]):
        if t:
            is_same_B = documents_BT[:, t] == documents_BT[:, t - 1]
            state = state * is_same_B[:, None, None, None, None]
        state = state * log_decay[:, t].exp()[..., None]
        held = torch.einsum("bgskv,bgk->bgsv", state, k[:, t])
        change = beta[:, t, ..., None] * (v[:, t] - held)
        state = state + torch.einsum("bgk,bgsv->bgskv", k[:, t], change)
        outputs.append(torch.einsum("bgskv,bgk->bgsv", state, q[:, t]) * KEY**-0.5)
    return torch.stack(outputs, 1)


def draw_rows(length: int) -> list[Tensor]:
    torch.manual_seed(1)
    # Of three heads, and of a channel that forgets all at once.
    rates = torch.tensor([0.01, 0.5, 2.0])[:, None] * torch.linspace(0.2, 1, KEY)
    rates[1, 3] = 200.0
    return [
        torch.randn(ROWS, length, GROUPS, KEY),
        torch.randn(ROWS, length, GROUPS, KEY),
        torch.randn(ROWS, length, GROUPS, SHARE, VALUE),
        -torch.rand(ROWS, length, GROUPS, SHARE, KEY) * rates,
        torch.rand(ROWS, length, GROUPS, SHARE),
    ]


@pytest.mark.parametrize("length", [1, 7, 16, 41])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_chunks_equal_the_recurrence(length: int, dtype: torch.dtype) -> None:
    """In float32 too, where a quotient of decays from the begin of a chunk would overflow."""
    drawn, documents_BT = draw_rows(length), draw_documents(length)
    results = []
    for runs_chunks in (True, False):
        own = dtype if runs_chunks else torch.float64
        leaves = [one.detach().clone().to(own).requires_grad_() for one in drawn]
        heads = [normalize_heads(one) for one in leaves[:2]]
        if runs_chunks:
            y, _ = apply_kimi_delta_rule(
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
        bound = 1e-10 if dtype == torch.float64 else 1e-5
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("cut", [1, 8, 13])
def test_a_state_continues_where_it_was(cut: int) -> None:
    q, k, *rest = (one.double() for one in draw_rows(30))
    rows = [normalize_heads(q), normalize_heads(k), *rest]
    segments_BT = torch.tensor([[0] * 30, [0] * cut + [1] * (30 - cut)])
    first, second = ([x[:, :cut] for x in rows], [x[:, cut:] for x in rows])
    whole, last = apply_kimi_delta_rule(
        *rows, chunk_length=8, segments_BT=segments_BT, keeps_state=True
    )
    y, state = apply_kimi_delta_rule(
        *first, chunk_length=8, segments_BT=segments_BT[:, :cut], keeps_state=True
    )
    assert state is not None
    assert last is not None
    z, end = apply_kimi_delta_rule(
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


def test_initial_steps_and_rates_are_within_their_ranges() -> None:
    model = Transformer(build_model_config(8))
    initialize_parameters(model, 0)
    mixer = model.get_submodule("blocks.0.attention")
    steps = F.softplus(mixer.get_parameter("dt_bias").detach())
    rates_H = mixer.get_parameter("A_log").detach().exp()
    assert bool(((steps > 0.0009) & (steps < 0.101)).all())
    assert bool(((rates_H > 1) & (rates_H <= 16)).all())
    assert len(steps.unique()) == HEADS * WIDTH
    assert len(rates_H.unique()) == HEADS
