"""Continuing prompts: equal to the slow way, repeatable, and each prompt on its own."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llmsys.errors import ConfigError, DataError
from llmsys.generate.prompt_completion import TextStreamer
from llmsys.generate.text_generation import BeamSearchParams, generate_texts
from llmsys.generate.token_sampling import SamplingParams
from llmsys.model.transformer import Transformer
from tests.helpers.tiny_model import build_tiny_model, build_tiny_moe_config

ALPHABET = " abcdefghijklmnopqrstuvwxyzäöüßéàè!?"


class Letters:
    """One token per letter; token 0 ends a document."""

    vocab_size, bos_id, eos_id, fingerprint = 37, 0, 0, "letters"

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(letter) + 1 for letter in text]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        # Like SentencePiece: a leading space disappears.
        return "".join(ALPHABET[token - 1] for token in ids if token).removeprefix(" ")


CHOICE = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
PROMPTS = ["the cat", "a", "zebra zebra zebra zebra zebra"]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return build_tiny_model(build_tiny_moe_config({"num_shared_experts": 1}))


def sample(model: Transformer, prompts: list[str], **settings: Any) -> list[str]:
    chosen = {key: settings.pop(key) for key in CHOICE & settings.keys()}
    how = SamplingParams(**{"temperature": 0.8, **chosen})
    defaults: dict[str, Any] = {
        "max_new_tokens": 12,
        "decoding": how,
        "stop_at_eos": False,
        "seed": 5,
    }
    return generate_texts(model, Letters(), prompts, **(defaults | settings))  # type: ignore[arg-type]


@torch.no_grad()
def decode_slowly(model: Transformer, prompt: str, new: int) -> str:
    ids = [Letters().eos_id, *Letters().encode(prompt)]
    for _ in range(new):
        ids.append(int(model.eval()(torch.tensor([ids]))[0, -1].argmax()))
    return Letters().decode(ids[1:])[len(prompt) :]


def test_greedy_equals_one_whole_forward_pass_per_token(model: Transformer) -> None:
    assert sample(model, PROMPTS, temperature=0) == [
        decode_slowly(model, prompt, 12) for prompt in PROMPTS
    ]


@pytest.mark.parametrize(
    "how",
    [SamplingParams(temperature=3.0), SamplingParams(temperature=0), BeamSearchParams(3)],
    ids=str,
)
def test_rows_beyond_the_tokenizer_are_never_chosen(how: SamplingParams | BeamSearchParams) -> None:
    padded = build_tiny_model(build_tiny_moe_config(vocab_size=1000))
    texts = generate_texts(
        padded,
        Letters(),  # type: ignore[arg-type]
        PROMPTS,
        max_new_tokens=12,
        decoding=how,
        stop_at_eos=False,
    )
    # Letters knows 37 ids, and no text for any other
    assert all(set(text) <= set(ALPHABET) for text in texts)


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0}], ids=str
)
def test_a_prompt_continues_the_same_alone_and_in_any_company(
    model: Transformer, settings: dict[str, Any]
) -> None:
    together = sample(model, PROMPTS, **settings)
    assert sample(model, PROMPTS[::-1], **settings) == together[::-1]
    assert [sample(model, [prompt], **settings)[0] for prompt in PROMPTS] == together


def test_same_seed_same_text_and_equal_prompts_differ(model: Transformer) -> None:
    first = sample(model, ["the cat", "the cat"])
    assert sample(model, ["the cat", "the cat"]) == first
    assert first[0] != first[1]
    assert sample(model, ["the cat"], seed=6)[0] != first[0]


def test_a_global_seed_or_training_mode_changes_nothing(model: Transformer) -> None:
    expected = sample(model, PROMPTS)
    torch.manual_seed(123)
    model.train()
    counts = model.list_moe_layers()[0].expert_tokens_E.clone()
    assert sample(model, PROMPTS) == expected
    assert model.training
    assert torch.equal(model.list_moe_layers()[0].expert_tokens_E, counts)


def test_a_text_ends_at_the_end_of_document_and_the_others_go_on(model: Transformer) -> None:
    prompts = [letter * 3 for letter in "abcdefghij"]
    endless = sample(model, prompts, max_new_tokens=30)
    ended = sample(model, prompts, max_new_tokens=30, stop_at_eos=True)
    # Decoding drops the end token, so a text that met one is shorter; what comes before it is the
    # same.
    assert any(len(short) < len(long) for short, long in zip(ended, endless, strict=True))
    assert all(long.startswith(short) for short, long in zip(ended, endless, strict=True))


def test_the_context_ends_a_text_with_a_warning_and_only_that_text(
    model: Transformer, caplog: pytest.LogCaptureFixture
) -> None:
    long = "ab" * 30
    with caplog.at_level(logging.WARNING, logger="llmsys"):
        texts = sample(model, [long, "a"], temperature=0, max_new_tokens=20)
    assert texts == [decode_slowly(model, long, 3), decode_slowly(model, "a", 20)]
    assert "continues for 3 tokens instead of 20: the context ends at 63" in caplog.text
    assert len(caplog.records) == 1


def test_prompts_that_cannot_be_continued_are_refused_by_name(model: Transformer) -> None:
    message = (
        r"prompt 'a{40}…' has 63 tokens and leaves no space .* Shorten it to 62 tokens or less"
    )
    with pytest.raises(DataError, match=message):
        sample(model, ["a", "a" * 63])
    assert sample(model, []) == []


def test_an_empty_prompt_begins_a_document(model: Transformer) -> None:
    assert sample(model, [""], temperature=0) == [decode_slowly(model, "", 12)]


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("max_new_tokens", 0, "at least 1"),
        ("temperature", -1.0, r"0 \(greedy\) or positive"),
        ("top_k", -3, r"0 \(all tokens\) or more"),
        ("top_p", 0.0, "above 0 and at most 1"),
    ],
)
def test_settings_out_of_range_are_refused(
    model: Transformer, setting: str, value: float, rule: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"generation\.{setting}={value} is out of range: it must be {rule}"
    ):
        sample(model, ["a"], **{setting: value})


@torch.no_grad()
def find_likeliest_pair(model: Transformer, prompt: str) -> str:
    ids = [0, *Letters().encode(prompt)]
    first = model.eval()(torch.tensor([ids]))[0, -1].log_softmax(-1)
    second = model(torch.tensor([[*ids, token] for token in range(37)]))[:, -1].log_softmax(-1)
    best = int((first[:, None] + second).argmax())
    return Letters().decode([*ids, best // 37, best % 37])[len(prompt) :]


def test_beams_find_the_likeliest_text_for_every_prompt_on_its_own(model: Transformer) -> None:
    found = sample(model, PROMPTS, decoding=BeamSearchParams(37, 0.0), max_new_tokens=2)
    assert found == [find_likeliest_pair(model, prompt) for prompt in PROMPTS]
    narrow = sample(model, PROMPTS, decoding=BeamSearchParams(3, 0.6))
    assert [
        sample(model, [prompt], decoding=BeamSearchParams(3, 0.6))[0] for prompt in PROMPTS
    ] == narrow
    assert sample(model, PROMPTS, decoding=BeamSearchParams(1, 0.0)) == sample(
        model, PROMPTS, temperature=0
    )


def test_a_listener_hears_every_token_in_order(model: Transformer) -> None:
    heard: list[tuple[int, int]] = []
    texts = sample(model, PROMPTS, on_token=lambda row, token: heard.append((row, token)))
    for number, text in enumerate(texts):
        tokens = [token for row, token in heard if row == number]
        assert text in Letters().decode(tokens) or Letters().decode(tokens) in text


def test_a_stream_says_the_text_piece_by_piece_and_holds_back_half_characters() -> None:
    class Bytes(Letters):
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def decode(self, ids: Sequence[int]) -> str:
            return bytes(ids).decode(errors="replace")

    pieces: list[str] = []
    stream = TextStreamer(Bytes(), ["a"], lambda _, piece: pieces.append(piece))  # type: ignore[arg-type]
    for byte in "bäß".encode():
        stream(0, byte)
    stream.flush(["bäß"])
    assert pieces == ["b", "ä", "ß"]


def test_repetition_penalty_reads_prompt_and_text(model: Transformer) -> None:
    free = sample(model, ["aaaa"], temperature=0, max_new_tokens=30)[0]
    penalised = sample(model, ["aaaa"], temperature=0, max_new_tokens=30, repetition_penalty=100.0)[
        0
    ]
    assert len(set(penalised)) > len(set(free))
    assert len(set(penalised)) == len(penalised) or len(penalised) > 30
