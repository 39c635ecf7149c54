"""Generation with a key-value cache gives the logits of one forward pass, also for rows padded on the left."""

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.errors import ConfigError
from llmsys.model.cache import KeyValueCache
from llmsys.model.mask import self_mask
from tests.helpers.tiny_model import relative_error, tiny_config, tiny_model, tiny_moe_config, tiny_tokens

CONFIGS = [tiny_config(), tiny_moe_config({"num_shared_experts": 1}), tiny_config(position={"kind": "none"})]


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3], [9]], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=["dense", "experts", "no position"])
@torch.no_grad()
def test_cached_logits_equal_uncached_ones(config: ModelConfig, pieces: list[int]) -> None:
    model, tokens = tiny_model(config).eval(), tiny_tokens(2, 9)
    cache = KeyValueCache(config, 2, 9)
    logits = [model(piece, cache=cache) for piece in tokens.split(pieces, dim=1)]
    assert relative_error(torch.cat(logits, dim=1), model(tokens)) < 1e-5


@pytest.mark.parametrize("config", CONFIGS, ids=["dense", "experts", "no position"])
@torch.no_grad()
def test_a_padded_row_reads_as_if_it_were_alone(config: ModelConfig) -> None:
    model, tokens = tiny_model(config).eval(), tiny_tokens(3, 9)
    padding = torch.tensor([0, 3, 8])
    alone = [model(row[None, skip:]) for row, skip in zip(tokens, padding.tolist(), strict=True)]
    for rubbish in (0, 11):
        padded = torch.where(torch.arange(9) < padding[:, None], rubbish, tokens)
        cache = KeyValueCache(config, 3, 9, padding_B=padding)
        logits = torch.cat([model(piece, cache=cache) for piece in padded.split([7, 1, 1], dim=1)], dim=1)
        assert logits.isfinite().all()
        for row, skip in enumerate(padding.tolist()):
            assert relative_error(logits[row : row + 1, skip:], alone[row]) < 1e-5


@torch.no_grad()
def test_rows_that_leave_do_not_change_those_that_stay() -> None:
    model, tokens = tiny_model(tiny_moe_config()).eval(), tiny_tokens(3, 8)
    cache = KeyValueCache(model.config, 3, 8)
    model(tokens[:, :6], cache=cache)
    cache.select([2, 0])
    rest = model(tokens[[2, 0], 6:], cache=cache)
    assert relative_error(rest, model(tokens[[2, 0]])[:, 6:]) < 1e-5


@torch.no_grad()
def test_the_cache_takes_the_dtype_of_the_keys() -> None:
    model, tokens = tiny_model(tiny_config()).bfloat16().eval(), tiny_tokens(2, 6)
    cache = KeyValueCache(model.config, 2, 6)
    logits = torch.cat([model(piece, cache=cache) for piece in tokens.split([5, 1], dim=1)], dim=1)
    assert logits.dtype == torch.bfloat16
    assert relative_error(logits, model(tokens)) < 0.03


def test_a_full_cache_and_a_full_context_are_refused() -> None:
    model = tiny_model(tiny_config())
    with pytest.raises(ConfigError, match=r"cache holds 4 positions, and 0 \+ 5 were asked for\. .*capacity=5"):
        model(tiny_tokens(1, 5), cache=KeyValueCache(model.config, 1, 4))
    with pytest.raises(ConfigError, match=r"65 tokens is longer than model\.max_position_embeddings=64"):
        model(tiny_tokens(1, 65), cache=KeyValueCache(model.config, 1, 99))
    with pytest.raises(ConfigError, match="Documents and a key-value cache cannot be combined"):
        model(tiny_tokens(1, 5), documents_BT=tiny_tokens(1, 5), cache=KeyValueCache(model.config, 1, 9))


def test_every_slot_sees_a_key_and_real_ones_see_no_padding() -> None:
    # A slot that sees nothing is 0/0 in some kernels, and its NaN spreads through the values of the next layer.
    padding = torch.tensor([0, 2, 5])
    visible = self_mask(4, causal=True, start=1, padding_B=padding).visible_B1TS
    assert visible is not None
    mask = visible[:, 0]
    assert mask.any(-1).all()
    for row, skip in enumerate(padding.tolist()):
        for query in range(4):
            expected = {slot for slot in range(5) if skip <= slot <= query + 1} | {query + 1}
            assert set(mask[row, query].nonzero().flatten().tolist()) == expected
