"""Laws of the tokenizer: text survives, ids are the library's own, and what is missing says what
to run.
"""

import io
from pathlib import Path

import pytest
import sentencepiece

from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import Tokenizer, load_tokenizer

LINES = ["the quick brown fox jumps over the lazy dog", "a dog and a fox", "the lazy fox"] * 20


@pytest.fixture(scope="module")
def model() -> bytes:
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=stream,
        model_type="bpe",
        vocab_size=320,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    return stream.getvalue()


@pytest.fixture
def tokenizer(model: bytes, tmp_path: Path) -> Tokenizer:
    (tmp_path / "tokenizer.model").write_bytes(model)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "text", ["the fox", "", " two  spaces ", "line\nline\n\n\tend", "Straße 猫 🦊\0", "</s><s>"]
)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(ids)


def test_batches_give_the_ids_of_single_texts(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(LINES) == [tokenizer.encode(line) for line in LINES]


def test_end_ids_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("a fox"), tokenizer.eos_id]) == "a fox"


def test_the_fingerprint_follows_the_model(
    model: bytes, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    same, other = tmp_path / "same.model", tmp_path / "other.model"
    same.write_bytes(model)
    piece = "▁the".encode()
    assert piece in model
    other.write_bytes(model.replace(piece, "▁tha".encode()))
    assert load_tokenizer(same).fingerprint == tokenizer.fingerprint
    assert load_tokenizer(other).fingerprint != tokenizer.fingerprint


def test_a_missing_model_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"x\.model cannot be read \(No such file .* llmsys tokenizer CONFIG"
    ):
        load_tokenizer(tmp_path / "x.model")
    with pytest.raises(DataError, match=r"tokenizer\.model cannot be read"):
        load_tokenizer(tmp_path)


def test_a_damaged_model_says_what_to_run(model: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(model[: len(model) // 2])
    with pytest.raises(
        DataError, match=r"tokenizer\.model is not a SentencePiece model .* llmsys tokenizer CONFIG"
    ):
        load_tokenizer(tmp_path)
