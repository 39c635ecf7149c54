"""Ids of gigatoken are the library's, for every text that it is given."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmsys.data_pipeline.tokenize import gigatoken_encoder
from llmsys.data_pipeline.tokenize.column_encoder import build_column_encoder
from llmsys.data_pipeline.tokenize.gigatoken_encoder import (
    GigatokenEncoder,
    find_gigatoken_problem,
)
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens
from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers import json_tokenizers


class OtherEncoder:
    """The other encoder: the library, with a list of what it was asked."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self.tokenizer = tokenizer
        self.asked: list[str] = []

    def encode(self, texts: pa.Array) -> RaggedTokens:
        self.asked += texts.to_pylist()
        rows = self.tokenizer.encode_batch(texts.to_pylist())
        values = np.array([token for row in rows for token in row], np.uint16)
        return RaggedTokens(values, np.array([len(row) for row in rows]))


def load(folder: Path, kind: str = "gpt2") -> HuggingFaceTokenizer:
    json_tokenizers.write(kind, folder)
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    return tokenizer


def build(tokenizer: HuggingFaceTokenizer) -> tuple[GigatokenEncoder, OtherEncoder]:
    other = OtherEncoder(tokenizer)
    return GigatokenEncoder(tokenizer.to_dict(), tokenizer, other), other


def encode(encoder: GigatokenEncoder, texts: list[str]) -> list[list[int]]:
    found = encoder.encode(pa.array(texts, pa.large_string()))
    ends = np.cumsum(found.lengths)[:-1]
    return [part.tolist() for part in np.split(found.values, ends)]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2"])
def test_names_of_special_tokens_in_a_text_are_text(kind: str, tmp_path: Path) -> None:
    tokenizer = load(tmp_path, kind)
    encoder, other = build(tokenizer)
    special = [each["content"] for each in tokenizer.to_dict()["added_tokens"] if each["special"]]
    assert special
    named = [f"The end {name} of it." for name in special]
    texts = ["A text.", *named, "", "Another text,\nwith lines."]
    assert encode(encoder, texts) == tokenizer.encode_batch(texts)
    assert other.asked == named


def test_long_texts_go_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(tmp_path)
    encoder, other = build(tokenizer)
    monkeypatch.setattr(gigatoken_encoder, "LONGEST_BYTES", 20)
    texts = ["x" * 20, "é" * 11, "short"]
    assert encode(encoder, texts) == tokenizer.encode_batch(texts)
    assert other.asked == ["é" * 11]


def test_the_memory_of_words_begins_anew_and_changes_no_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(tmp_path)
    encoder, _ = build(tokenizer)
    monkeypatch.setattr(gigatoken_encoder, "FEWEST_BYTES", 100)
    monkeypatch.setattr(gigatoken_encoder, "MAX_GROWTH_BYTES", -(1 << 40))
    before = encoder._backend
    texts = [f"Text number {number}, with some words." for number in range(40)]
    assert encode(encoder, texts) == tokenizer.encode_batch(texts)
    assert encoder._backend is not before
    monkeypatch.setattr(gigatoken_encoder, "MAX_GROWTH_BYTES", 1 << 40)
    before = encoder._backend
    encode(encoder, texts)
    assert encoder._backend is before


def test_a_tokenizer_with_other_ids_is_encoded_by_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(tmp_path)
    values = tokenizer.to_dict()
    values["model"]["merges"] = values["model"]["merges"][:5]
    with pytest.raises(ValueError, match="gigatoken has other ids for"):
        GigatokenEncoder(values, tokenizer, OtherEncoder(tokenizer))
    monkeypatch.setattr(HuggingFaceTokenizer, "to_dict", lambda self: values)
    assert type(build_column_encoder(tokenizer)).__name__ == "JsonColumnEncoder"


def change(values: dict[str, Any], token: dict[str, Any]) -> dict[str, Any]:
    return {**json.loads(json.dumps(values)), "added_tokens": [token]}


def test_a_tokenizer_that_it_is_not_given_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = load(tmp_path).to_dict()
    token = {"id": 9, "content": "<x>", "special": False, "normalized": False}
    token |= {"lstrip": False, "rstrip": False, "single_word": False}
    assert find_gigatoken_problem(change(values, token)) is None
    for name in ("lstrip", "rstrip", "single_word"):
        assert find_gigatoken_problem(change(values, token | {name: True})) == (
            "its added token '<x>' depends on the surrounding text"
        )
    random = {**values, "model": {**values["model"], "dropout": 0.1}}
    assert find_gigatoken_problem(random) == "it is no byte-level BPE"
    json_tokenizers.write("bert", tmp_path / "bert")
    bert = json.loads((tmp_path / "bert" / "tokenizer.json").read_text())
    assert find_gigatoken_problem(bert) == "it is no byte-level BPE"

    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(gigatoken_encoder, "import_module", refuse)
    assert find_gigatoken_problem(values) == "gigatoken is not installed"
