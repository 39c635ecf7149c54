"""Translating: beams with a cache equal to whole forward passes, and every source on its own."""

import pytest
import torch

from llmsys.config.model import ModelConfig
from llmsys.generate.text_generation import BeamSearchParams
from llmsys.generate.translation import translate_sequences
from llmsys.model.initialization import initialize_parameters
from llmsys.model.transformer import Transformer

START, END = 0, 1
SOURCES = [[5, 6, 7], [9], [4, 3, 2, 8, 9, 7, 6], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        family="encoder_decoder",
        vocab_size=11,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=24,
        initializer_range=0.4,
        position={"kind": "sinusoidal"},
        residual={"kind": "post"},
        norm={"kind": "layernorm"},
        feed_forward={"kind": "relu", "bias": True},
        attention={"kind": "multi_head", "qkv_bias": True, "output_bias": True},
        tie_word_embeddings=True,
        dropout={"residual": 0.3},
    )
    model = Transformer(config)
    initialize_parameters(model, seed=3)
    return model.train()


@torch.no_grad()
def decode_slowly(model: Transformer, source: list[int], limit: int) -> list[int]:
    target = [START]
    while len(target) <= limit:
        logits = model(torch.tensor([target]), source_BS=torch.tensor([source]))[0, -1]
        target.append(int(logits.argmax()))
        if target[-1] == END:
            return target[1:-1]
    return target[1:]


def translate(
    model: Transformer, sources: list[list[int]], beams: int, **settings: int
) -> list[list[int]]:
    return translate_sequences(
        model,
        sources,
        decoding=BeamSearchParams(beams, 0.6),
        start_token=START,
        end_token=END,
        **settings,
    )


def test_one_beam_is_greedy_and_the_context_is_the_limit(model: Transformer) -> None:
    together = translate(model, SOURCES, 1)
    assert model.training
    model.eval()
    assert together == [decode_slowly(model, source, 23) for source in SOURCES]
    model.train()
    assert max(map(len, together)) == 23


@pytest.mark.parametrize("batch_tokens", [1, 8, 1000])
def test_a_source_is_translated_the_same_in_any_company(
    model: Transformer, batch_tokens: int
) -> None:
    alone = [translate(model, [source], 3)[0] for source in SOURCES]
    assert translate(model, SOURCES, 3, batch_tokens=batch_tokens) == alone
    assert translate(model, SOURCES[::-1], 3) == alone[::-1]


def test_rows_beyond_the_tokenizer_are_never_chosen(model: Transformer) -> None:
    free = translate(model, SOURCES, 3)
    last = max(token for text in free for token in text)
    assert last > END
    assert all(
        token < last for text in translate(model, SOURCES, 3, vocab_size=last) for token in text
    )


def test_no_sources_give_no_translations(model: Transformer) -> None:
    assert translate(model, [], 3) == []
