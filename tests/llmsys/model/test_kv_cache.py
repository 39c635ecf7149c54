"""Generation with a key-value cache gives the logits of one forward pass, also for rows padded
on the left.
"""

import pytest
import torch

from llmsys.errors import ConfigError
from llmsys.model.attention_mask import build_self_attention_mask
from llmsys.model.kv_cache import KeyValueCache
from tests.helpers.model_choices import (
    DECODERS,
    ENCODER_DECODERS,
    LATENT,
    build_choice_config,
    build_source,
)
from tests.helpers.tiny_model import (
    build_tiny_config,
    build_tiny_model,
    build_tiny_moe_config,
    build_tiny_tokens,
    compute_relative_error,
)

# Their waves depend on the length, so a cache must not hold rotated keys.
STRETCHED = {
    "ntk": {"kind": "ntk", "factor": 4.0, "original_max_position_embeddings": 4},
    "longrope": {
        "kind": "longrope",
        "original_max_position_embeddings": 5,
        "short_factor": [1.0, 1.2],
        "long_factor": [2.0, 9.0],
    },
    "yarn": {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
}
CONFIGS = {
    name: build_choice_config(name)
    for name in DECODERS | ENCODER_DECODERS
    if not name.startswith("feed-forward")
}
CONFIGS |= {
    f"rope, {name}": build_tiny_config(position={"kind": "rope", "scaling": s})
    for name, s in STRETCHED.items()
}
CONFIGS["latent, ntk"] = build_tiny_config(
    attention=LATENT, num_key_value_heads=4, position={"kind": "rope", "scaling": STRETCHED["ntk"]}
)
CONFIGS["experts"] = build_tiny_moe_config({"num_shared_experts": 1})


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3], [9]], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_cached_logits_equal_uncached_ones(name: str, pieces: list[int]) -> None:
    config = CONFIGS[name]
    model, tokens, source = (
        build_tiny_model(config).eval(),
        build_tiny_tokens(2, 9),
        build_source(config),
    )
    cache = KeyValueCache(config, 2, 9)
    logits, given = [], source
    for piece in tokens.split(pieces, dim=1):
        logits.append(model(piece, cache=cache, **given))
        given = {}
    ends = (
        torch.tensor(pieces).cumsum(0).tolist()
        if name in ("rope, ntk", "rope, longrope", "latent, ntk")
        else [9]
    )
    # Where waves depend on the length, a token's logits are those of the sequence as long as it was
    # then.
    whole = {end: model(tokens[:, :end], **source) for end in ends}
    expected = [
        whole[next(end for end in ends if end >= last)][:, last - size : last]
        for size, last in zip(pieces, torch.tensor(pieces).cumsum(0).tolist(), strict=True)
    ]
    assert compute_relative_error(torch.cat(logits, dim=1), torch.cat(expected, dim=1)) < 1e-5


@torch.no_grad()
def test_a_recurrent_decoder_rejects_padded_rows() -> None:
    model = build_tiny_model(CONFIGS["lstm"]).eval()
    cache = KeyValueCache(CONFIGS["lstm"], 2, 9, padding_B=torch.tensor([0, 3]))
    with pytest.raises(
        ConfigError, match=r"would read the padding of a row. Give prompts of equal length"
    ):
        model(build_tiny_tokens(2, 5), cache=cache, **build_source(CONFIGS["lstm"]))


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config.rnn is None])
@torch.no_grad()
def test_a_padded_row_reads_as_if_it_were_alone(name: str) -> None:
    config = CONFIGS[name]
    model, tokens, source = (
        build_tiny_model(config).eval(),
        build_tiny_tokens(3, 9),
        build_source(config),
    )
    source = {key: value[[0, 1, 0]] for key, value in source.items()}
    padding = torch.tensor([0, 3, 7])
    pieces = [8, 1]
    for rubbish in (0, 11):
        padded = torch.where(torch.arange(9) < padding[:, None], rubbish, tokens)
        cache = KeyValueCache(config, 3, 9, padding_B=padding)
        first, second = padded.split(pieces, dim=1)
        logits = torch.cat([model(first, cache=cache, **source), model(second, cache=cache)], dim=1)
        assert logits.isfinite().all()
        for row, skip in enumerate(padding.tolist()):
            own = {key: value[row : row + 1] for key, value in source.items()}
            for last, places in ((8, slice(skip, 8)), (9, slice(8, 9))):
                alone = model(tokens[row : row + 1, skip:last], **own)[
                    :, -(places.stop - places.start) :
                ]
                assert compute_relative_error(logits[row : row + 1, places], alone) < 1e-5


@pytest.mark.parametrize("name", ["llama", "latent", "transformer_xl", "t5", "original", "experts"])
@torch.no_grad()
def test_rows_may_leave_and_come_twice(name: str) -> None:
    config = CONFIGS[name]
    model, tokens, source = (
        build_tiny_model(config).eval(),
        build_tiny_tokens(2, 9),
        build_source(config),
    )
    cache = KeyValueCache(config, 2, 9)
    model(tokens[:, :6], cache=cache, **source)
    cache.select_rows([1, 0, 1])
    rows = [1, 0, 1]
    rest = tokens[rows, 6:8]
    rest[2] += 1
    branched = model(rest, cache=cache)
    cache.select_rows(torch.tensor([2]))
    last = model(tokens[:1, 8:], cache=cache)
    again = {key: value[rows] for key, value in source.items()}
    whole = torch.cat([tokens[rows, :6], rest, tokens[[0, 0, 0], 8:]], dim=1)
    expected = model(whole, **again)
    assert compute_relative_error(branched, expected[:, 6:8]) < 1e-5
    assert compute_relative_error(last, expected[2:, 8:]) < 1e-5


@pytest.mark.parametrize("name", ["llama", "learned, offset"])
@torch.no_grad()
def test_padding_goes_with_its_row(name: str) -> None:
    model, tokens = build_tiny_model(CONFIGS[name]).eval(), build_tiny_tokens(2, 9)
    cache = KeyValueCache(model.config, 2, 9, padding_B=torch.tensor([4, 0]))
    model(tokens[:, :6], cache=cache)
    cache.select_rows([1, 0])
    last = model(tokens[[1, 0], 6:], cache=cache)
    for place, alone in enumerate((tokens[1:], tokens[:1, 4:])):
        assert compute_relative_error(last[place : place + 1], model(alone)[:, -3:]) < 1e-5


@torch.no_grad()
def test_latent_attention_keeps_the_latent_and_nothing_of_the_heads() -> None:
    config = build_choice_config("latent")
    cache = KeyValueCache(config, 2, 9)
    build_tiny_model(config).eval()(build_tiny_tokens(2, 7), cache=cache)
    kept = LATENT["kv_lora_rank"] + LATENT["qk_rope_head_dim"]
    allocated = sum(x.numel() for layer in cache._slots.values() for x in layer)
    assert allocated == config.num_hidden_layers * 2 * 9 * kept


@torch.no_grad()
def test_the_source_is_encoded_once_and_its_keys_are_computed_once() -> None:
    config = build_choice_config("original")
    model, source = build_tiny_model(config).eval(), build_source(config)
    memory = model.encode_source(source["source_BS"], source["source_documents_BS"])
    expected = model(build_tiny_tokens(2, 7), **source)
    assert torch.equal(model(build_tiny_tokens(2, 7), memory=memory), expected)
    cache = KeyValueCache(config, 2, 9)
    model(build_tiny_tokens(2, 7)[:, :3], memory=memory, cache=cache)
    for block in model.blocks:
        block.cross_attention.k_proj.weight.fill_(torch.nan)
    assert (
        compute_relative_error(model(build_tiny_tokens(2, 7)[:, 3:], cache=cache), expected[:, 3:])
        < 1e-5
    )


@torch.no_grad()
def test_the_cache_takes_the_dtype_of_the_keys() -> None:
    model, tokens = build_tiny_model(build_tiny_config()).bfloat16().eval(), build_tiny_tokens(2, 6)
    cache = KeyValueCache(model.config, 2, 6)
    logits = torch.cat([model(piece, cache=cache) for piece in tokens.split([5, 1], dim=1)], dim=1)
    assert logits.dtype == torch.bfloat16
    assert compute_relative_error(logits, model(tokens)) < 0.03


def test_a_full_cache_and_a_full_context_are_refused() -> None:
    model = build_tiny_model(build_tiny_config())
    with pytest.raises(
        ConfigError, match=r"cache holds 4 positions, and 0 \+ 5 were asked for\. .*capacity=5"
    ):
        model(build_tiny_tokens(1, 5), cache=KeyValueCache(model.config, 1, 4))
    with pytest.raises(ConfigError, match=r"65 tokens exceeds model\.max_position_embeddings=64"):
        model(build_tiny_tokens(1, 65), cache=KeyValueCache(model.config, 1, 99))
    with pytest.raises(ConfigError, match="Documents and a key-value cache cannot be combined"):
        model(
            build_tiny_tokens(1, 5),
            documents_BT=build_tiny_tokens(1, 5),
            cache=KeyValueCache(model.config, 1, 9),
        )
    with pytest.raises(ConfigError, match="An encoder has no use for a key-value cache"):
        KeyValueCache(build_choice_config("bert"), 1, 9)


def test_a_source_is_given_once_to_those_who_read_it() -> None:
    config = build_choice_config("original")
    model, tokens, source = build_tiny_model(config), build_tiny_tokens(), build_source(config)
    with pytest.raises(ConfigError, match=r"family=encoder_decoder is missing\. Give source_BS"):
        model(tokens)
    with pytest.raises(ConfigError, match="Both a source and its encoder output were given"):
        model(
            tokens,
            memory=model.encode_source(source["source_BS"], source["source_documents_BS"]),
            **source,
        )
    with pytest.raises(ConfigError, match=r"model\.family=decoder has no encoder\. Omit it"):
        build_tiny_model(build_tiny_config())(tokens, **source)
    cache = KeyValueCache(config, 2, 9)
    model(tokens[:, :2], cache=cache, **source)
    with pytest.raises(ConfigError, match="The cache already has a source"):
        model(tokens[:, 2:], cache=cache, **source)


def test_every_slot_sees_a_key_and_real_ones_see_no_padding() -> None:
    # A slot that sees nothing is 0/0 in some kernels, and its NaN spreads through the values of the
    # next layer.
    padding = torch.tensor([0, 2, 5])
    visible = build_self_attention_mask(4, causal=True, start=1, padding_B=padding).visible_B1TS
    assert visible is not None
    mask = visible[:, 0]
    assert mask.any(-1).all()
    for row, skip in enumerate(padding.tolist()):
        for query in range(4):
            expected = {slot for slot in range(5) if skip <= slot <= query + 1} | {query + 1}
            assert set(mask[row, query].nonzero().flatten().tolist()) == expected
