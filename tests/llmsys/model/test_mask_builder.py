"""Every architecture on a pretended accelerator: the numbers of the CPU's path, and no table of
all pairs.
"""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from llmsys.config.model import ModelConfig
from llmsys.data.batch import Batch
from llmsys.kernels.attention_kernel import choose_attention_kernel
from llmsys.kernels.attention_layers import describe_cross_attention, describe_self_attention
from llmsys.model.document_lengths import DocumentLengths
from llmsys.model.flex_attention import AlibiBias, FlexMask
from llmsys.model.kv_cache import KeyValueCache
from llmsys.model.mask_builder import MaskBuilder
from llmsys.model.transformer import Transformer
from tests.helpers.model_choices import ARCHITECTURES, build_source
from tests.helpers.pretended_accelerator import HOPPER, pretend_accelerator
from tests.helpers.rounding import assert_within_rounding
from tests.helpers.score_table import ScoreTableFinder
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_tokens,
    compute_relative_error,
)

DROPPED = {"dropout": {"attention": 0.1}}
LONG = 2304  # beyond the CPU's chunked attention, which a plain causal mask would take here
# Recurrent layers attend to the source alone, without their own masks.
ATTENDING = [name for name, changes in ARCHITECTURES.items() if "rnn" not in changes]


def _build_config(name: str, **changes: Any) -> ModelConfig:
    """Return a config with heads of 8 channels, as flash attention needs them, where it does not
    set its own.
    """
    choice = ARCHITECTURES[name]
    width = {} if "head_dim" in choice or "latent" in name else {"head_dim": 8}
    return build_tiny_config(**(width | choice | changes))


def _build_batch(config: ModelConfig, length: int) -> Batch:
    """Return two rows of documents with padding; of an encoder-decoder a padded source."""
    tokens_BT = build_tiny_tokens(2, length)
    documents_BT = torch.tensor(
        [[0, 0, 1, 1, 1, 2, 2, 3], [5, 5, 5, 5, 5, 5, 5, -1]]
    ).repeat_interleave(length // 8, 1)
    if config.family != "encoder_decoder":
        return Batch(tokens_BT, tokens_BT, documents_BT).count_documents()
    sources_BS = torch.where(torch.arange(length) < torch.tensor([[length], [length // 2]]), 0, -1)
    batch = Batch(
        tokens_BT,
        tokens_BT,
        source_BS=build_tiny_tokens(2, length, seed=1),
        source_documents_BS=sources_BS,
    )
    return batch.count_documents()


def _compute_outputs(config: ModelConfig, batch: Batch) -> dict[str, Tensor]:
    """Return the output of a model in training, and the gradient of every parameter."""
    model = build_tiny_model(config).train()
    torch.manual_seed(0)
    out = model(**batch.to_model_inputs())
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)))
    return {"out": out.detach()} | {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", ATTENDING)
def test_an_accelerator_computes_what_a_cpu_computes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _build_config(name)
    batch = _build_batch(config, 16)
    wanted = _compute_outputs(config, batch)
    with monkeypatch.context() as patch:
        pretend_accelerator(patch, exact=True)
        ours = _compute_outputs(config, batch)

    # Errors can be planted into the operations of a processor only.
    def compute(errors: AbstractContextManager[Any]) -> dict[str, Tensor]:
        with errors:
            return _compute_outputs(config, batch)

    assert_within_rounding(ours, wanted, compute, computations=2)


def _find_tables(config: ModelConfig, length: int) -> list[str]:
    """Return what a training step on fake tensors makes of length × length elements or more."""
    batch = _build_batch(config, length)
    with FakeTensorMode() as mode:
        # Not converted afterwards: fake parameters cannot be replaced in place.
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Transformer(config).train()
        finally:
            torch.set_default_dtype(torch.float32)

        def convert(value: Tensor | DocumentLengths) -> Tensor | DocumentLengths:
            return (
                value.map_tensors(mode.from_tensor)
                if isinstance(value, DocumentLengths)
                else mode.from_tensor(value)
            )

        inputs = {key: convert(value) for key, value in batch.to_model_inputs().items()}
        with ScoreTableFinder(length) as finder:
            model(**inputs).sum().backward()
    return finder.found


def _is_table_reported(config: ModelConfig) -> bool:
    """Return whether the decision table reports a table of scores for any layer."""
    is_pair = config.family == "encoder_decoder"
    common: dict[str, Any] = {"dtype": "bf16", "length": LONG, "has_documents": True}
    traits = [
        describe_self_attention(stack, stack.get_layer_type(layer), **common)
        for stack in ([config, config.encoder_model] if is_pair else [config])
        for layer in range(stack.num_hidden_layers)
    ]
    traits += [describe_cross_attention(config, **common)] if is_pair else []
    return any(choose_attention_kernel(HOPPER, one).has_table for one in traits)


@pytest.mark.parametrize("name", ATTENDING)
def test_training_makes_no_table_but_those_that_are_reported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_accelerator(monkeypatch)
    config = _build_config(name, max_position_embeddings=LONG)
    found = _find_tables(config, LONG)
    # Segments with a memory have tables of their size.
    expected = config.position.kind == "transformer_xl" and not config.attention.has_own_mask
    assert bool(found) == _is_table_reported(config) == expected, found[:3]


def test_attention_dropout_is_reported_with_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch)
    config = _build_config("llama", max_position_embeddings=LONG, **DROPPED)
    assert _is_table_reported(config)
    assert _find_tables(config, LONG)


def test_a_planted_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch)

    def plant_table(self: MaskBuilder, inputs: Any, *_: Any) -> Any:
        return next(iter(self.build_tables(inputs, self.windows).values()))

    monkeypatch.setattr(MaskBuilder, "_build_chosen_mask", plant_table)
    config = _build_config("llama", max_position_embeddings=LONG)
    assert any("bool" in line for line in _find_tables(config, LONG))


@pytest.mark.parametrize(
    "name", ["llama", "windows, own theta", "alibi", "softcap, windows", "latent", "t5", "original"]
)
@torch.no_grad()
def test_a_cache_on_an_accelerator_gives_the_logits_of_one_pass(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _build_config(name)
    model, tokens, source = (
        build_tiny_model(config).eval(),
        build_tiny_tokens(2, 9),
        build_source(config),
    )
    wanted = model(tokens, **source)
    pretend_accelerator(monkeypatch, exact=True)
    cache = KeyValueCache(config, 2, 9)
    pieces = [
        model(tokens[:, :5], cache=cache, **source),
        *(model(tokens[:, t : t + 1], cache=cache) for t in range(5, 9)),
    ]
    assert compute_relative_error(torch.cat(pieces, dim=1), wanted) < 1e-5


def test_a_rank_gets_the_biases_of_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor and context parallel attend with some of the heads."""
    pretend_accelerator(monkeypatch)
    for name in ("alibi", "relative bias"):
        model = build_tiny_model(_build_config(name))
        like, tables = torch.zeros(2, 6, 16), []
        for heads in (slice(None), slice(2, 3)):
            model.shared.heads = heads
            mask = model.shared(6, like, bias_table=model.relative_bias).masks["full_attention"]
            assert isinstance(mask, FlexMask)
            tables.append(
                mask.bias.slopes_H if isinstance(mask.bias, AlibiBias) else mask.bias.table_HR
            )
        assert torch.equal(tables[0][2:3], tables[1])
