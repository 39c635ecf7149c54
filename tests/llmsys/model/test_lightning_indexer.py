"""Sparse attention equals its formulas, and its indexer learns from its own loss alone.

Logits, gradients and texts of whole models are compared with transformers in
test_matches_transformers.py.
"""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError
from llmsys.model.attention_mask import build_self_attention_mask
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.lightning_indexer import LightningIndexer, expand_visible_keys
from llmsys.model.transformer import Transformer
from llmsys.parallel.activation_checkpoint import apply_activation_checkpoint
from llmsys.train.expert_load import measure_indexer_loss
from tests.helpers.model_choices import LATENT
from tests.helpers.rounding import assert_within_rounding
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_tokens,
    compute_relative_error,
)
from tests.reference.sparse_attention import compute_sparse_attention

LENGTH = 12
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1], [5] * 12])
INDEX = {"index_topk": 3, "index_n_heads": 2, "index_head_dim": 6, "loss_weight": 0.5}


def build_config(layers: int = 2, rotated: str = "neighbours", **changes: Any) -> ModelConfig:
    return build_tiny_config(
        num_hidden_layers=layers,
        num_key_value_heads=4,
        attention=LATENT | {"sparse": INDEX | changes},
        position={"kind": "rope", "pairing": rotated},
    )


def find_attention(model: Transformer) -> Any:
    return model.get_submodule("blocks.0.attention")


@pytest.mark.parametrize(
    ("phase", "rotated", "pairing"),
    [
        ("sparse", "neighbours", "halves"),
        ("sparse", "halves", "neighbours"),
        ("warm_up", "neighbours", "neighbours"),
    ],
)
def test_outputs_and_all_gradients_equal_the_formulas(
    phase: str, rotated: str, pairing: str
) -> None:
    config = build_config(1, rotated, phase=phase, pairing=pairing)
    model = build_tiny_model(config).train()
    attention = find_attention(model)
    x_BTD = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(3))
    weights = torch.randn(x_BTD.shape, generator=torch.Generator().manual_seed(4))
    context = model.shared(LENGTH, x_BTD, documents_BT=DOCUMENTS, training=True)
    named = dict(attention.named_parameters())

    def compute(errors: AbstractContextManager[Any]) -> dict[str, Tensor]:
        with errors:
            output = attention(x_BTD, context)
            loss = attention.indexer.sum_auxiliary_losses()
            gradients = torch.autograd.grad((output * weights).sum() + loss, list(named.values()))
        found = {"output": output.detach(), "loss": loss.detach()}
        return found | dict(zip(named, gradients, strict=True))

    found = compute(contextlib.nullcontext())
    twin = {name: p.detach().double().requires_grad_() for name, p in named.items()}
    total, outputs = torch.zeros((), dtype=torch.float64), []
    for row, documents in zip(x_BTD.double(), DOCUMENTS.tolist(), strict=True):
        mixed, loss, chosen = compute_sparse_attention(config, twin, list(row), documents)
        outputs.append(torch.stack(mixed))
        total = total + INDEX["loss_weight"] * loss
        assert max(map(len, chosen)) == (
            3 if phase == "sparse" else max(documents.count(one) for one in documents)
        )
    output = torch.stack(outputs)
    ((output * weights).sum() + total).backward()
    expected = {"output": output.detach(), "loss": total.detach()}
    gradients = {name: p.grad for name, p in twin.items() if p.grad is not None}
    for names in (["output"], ["loss"], list(named)):
        parts = {name: (expected | gradients)[name] for name in names}
        assert_within_rounding({name: found[name] for name in names}, parts, compute)
    assert all(float(gradients[name].norm()) > 1e-3 for name in named)


@pytest.mark.parametrize("changes", [{"index_topk": LENGTH}, {"phase": "warm_up"}], ids=str)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "packed"])
def test_all_keys_are_those_of_dense_attention(
    changes: dict[str, Any], documents: Tensor | None
) -> None:
    """Also where all scores are equal, and so nothing but their order could choose."""
    model, tokens = build_tiny_model(build_config(**changes)), build_tiny_tokens(2, LENGTH)
    plain = model.config.model_copy(
        update={"attention": model.config.attention.model_copy(update={"sparse": None})}
    )
    dense = Transformer(plain)
    dense.load_state_dict(model.state_dict(), strict=False)
    expected = dense(tokens, documents_BT=documents)
    for is_tied in (False, True):
        if is_tied:
            for indexer in model.list_indexers():
                torch.nn.init.zeros_(indexer.weights_proj.weight)
        assert compute_relative_error(model(tokens, documents_BT=documents), expected) < 1e-5


def test_of_equal_scores_the_earlier_keys_of_a_document_are_chosen() -> None:
    indexer = build_tiny_model(build_config()).list_indexers()[0]
    scores = torch.zeros(2, LENGTH, LENGTH)
    scores[1, 11, 8] = 1.0
    mask = build_self_attention_mask(LENGTH, causal=True, documents_BT=DOCUMENTS)
    chosen = indexer.select_keys(scores, expand_visible_keys(mask, scores))
    keys = [[row.nonzero().flatten().tolist() for row in rows] for rows in chosen]
    assert keys[0][6:] == [[0, 1, 2], [7], [7, 8], [7, 8, 9], [7, 8, 9], [11]]
    assert keys[1][1] == [0, 1]
    assert keys[1][11] == [0, 1, 8]


@torch.no_grad()
def test_a_document_reads_the_same_alone_packed_and_from_a_cache() -> None:
    model, tokens = build_tiny_model(build_config()).eval(), build_tiny_tokens(2, LENGTH)
    # Many scores of 0, which are equal.
    for indexer in model.list_indexers():
        indexer.weights_proj.weight.abs_()
    packed = model(tokens, documents_BT=DOCUMENTS)
    for row, first, last in ((0, 0, 7), (0, 7, 11), (1, 0, 12)):
        alone = tokens[row : row + 1, first:last]
        expected = packed[row : row + 1, first:last]
        assert compute_relative_error(model(alone), expected) < 1e-5
        cache = KeyValueCache(model.config, 1, last - first)
        parts = [model(alone[:, :3], cache=cache)]
        parts += [model(one, cache=cache) for one in alone[:, 3:].split(1, dim=1)]
        assert compute_relative_error(torch.cat(parts, dim=1), expected) < 1e-5


def compute_gradients(model: Transformer, *, of_indexers: bool) -> dict[str, Tensor | None]:
    model.zero_grad()
    logits = model(build_tiny_tokens(2, LENGTH), documents_BT=DOCUMENTS)
    (model.compute_auxiliary_loss() if of_indexers else logits.square().mean()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_each_loss_reaches_its_own_parameters_only() -> None:
    model = build_tiny_model(build_config()).train()
    for of_indexers in (True, False):
        for name, gradient in compute_gradients(model, of_indexers=of_indexers).items():
            is_reached = gradient is not None and bool(gradient.any())
            assert is_reached is (of_indexers == (".indexer." in name)), name


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointing_repeats_the_loss_and_counts_it_once(mode: Any) -> None:
    plain, repeated = (build_tiny_model(build_config()).train() for _ in range(2))
    apply_activation_checkpoint(repeated, mode)
    expected = compute_gradients(plain, of_indexers=True)
    found = compute_gradients(repeated, of_indexers=True)
    for name in expected:
        one, other = found[name], expected[name]
        assert (one is None and other is None) or torch.equal(one, other), name  # type: ignore[arg-type]
    measured, once = (measure_indexer_loss(model) for model in (repeated, plain))
    assert measured == once
    # A mean over layers and tokens, without its weight; 23 tokens are real.
    total = INDEX["loss_weight"] * 2 * float(measured["indexer_loss"])
    assert total == pytest.approx(float(plain.compute_auxiliary_loss().detach()))
    assert float(measure_indexer_loss(plain)["indexer_loss"]) == 0, "counts are reset"


def test_training_on_its_loss_an_indexer_finds_the_keys_that_attention_weighs() -> None:
    model = build_tiny_model(build_config(phase="warm_up", index_n_heads=8)).train()
    tokens = build_tiny_tokens(2, LENGTH)
    indexers = [p for one in model.list_indexers() for p in one.parameters()]
    optimizer = torch.optim.Adam(indexers, lr=3e-2)
    losses = []
    for _ in range(60):
        model(tokens)
        loss = model.compute_auxiliary_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": {"q_lora_rank": None}}, "null has no query latent"),
        ({"attention": {"qk_rope_head_dim": 8}}, "no room for the qk_rope_head_dim=8 rotated"),
        ({"family": "encoder", "head": {"kind": "mlm"}}, "family=encoder has queries that see"),
        (
            {"sliding_window": 4, "layer_types": ["sliding_attention"]},
            "sliding_attention is not proven with attention.sparse",
        ),
        ({"recurrence": {"kind": "fixed"}}, "fixed is not proven with attention.sparse"),
        ({"residual": {"kind": "reversible"}}, "reversible is not proven with attention.sparse"),
        ({"parametrization": {"kind": "unit_scaled"}}, "unit_scaled is not proven with attention"),
    ],
    ids=str,
)
def test_what_an_indexer_cannot_do_is_refused(changes: dict[str, Any], message: str) -> None:
    attention = LATENT | {"sparse": INDEX} | changes.get("attention", {})
    with pytest.raises((ConfigError, ValueError), match=message):
        build_tiny_config(num_key_value_heads=4, **changes | {"attention": attention})


def test_an_indexer_is_built_by_the_name_that_its_parameters_have() -> None:
    model = Transformer(build_config(1))
    assert isinstance(model.get_submodule("blocks.0.attention.indexer"), LightningIndexer)
