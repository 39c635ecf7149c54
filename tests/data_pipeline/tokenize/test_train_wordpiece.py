"""WordPiece: equal texts give equal bytes, in whatever order; transformers reads the files and
finds the same ids.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.tokenizer import WORDPIECE_SYMBOLS, WordPieceConfig
from llmsys.data_pipeline.tokenize.train_sentencepiece import fit_tokenizer
from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import Tokenizer, load_tokenizer

WORDS = [
    "lower",
    "lowest",
    "newer",
    "Newest",
    "wider",
    "Café",
    "unhappily",
    "happy",
    "tokens,",
    "über",
]
LINES = [" ".join(random.Random(seed).choices(WORDS, k=12)) for seed in range(60)]


def train(folder: Path, lines: list[str] = LINES, **options: Any) -> Tokenizer:
    config = WordPieceConfig.model_validate({"vocab_size": 70, "min_frequency": 1} | options)
    fit_tokenizer(iter(lines), folder, config, {"documents": 60, "bytes": 1})
    return load_tokenizer(folder)


def test_the_vocabulary_is_a_function_of_the_words(tmp_path: Path) -> None:
    tokenizer, shuffled = train(tmp_path / "a"), train(tmp_path / "b", LINES[::-1])
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (
        tmp_path / "b" / "tokenizer.json"
    ).read_bytes()
    assert tokenizer.fingerprint == shuffled.fingerprint
    assert [tokenizer.find_piece_id(symbol) for symbol in WORDPIECE_SYMBOLS] == [0, 1, 2, 3, 4]
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (70, 3)


def test_pieces_inside_of_words_are_marked_and_letters_are_lowered_as_in_bert(
    tmp_path: Path,
) -> None:
    tokenizer, cased = train(tmp_path / "uncased"), train(tmp_path / "cased", lowercase=False)
    assert tokenizer.encode("CAFE Uber") == tokenizer.encode("café über")
    assert cased.encode("Newest") != cased.encode("newest")
    names = tokenizer.get_text_pieces()
    pieces = [names[one] for one in tokenizer.encode("happily")]
    assert "".join(piece.removeprefix("##") for piece in pieces) == "happily"
    assert not pieces[0].startswith("##")
    assert all(piece.startswith("##") for piece in pieces[1:])
    assert tokenizer.encode("日") == [1], "a character that no word had is unknown"
    assert tokenizer.decode(tokenizer.encode("Newest, happy")) == "newest, happy"


def test_transformers_finds_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = train(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    text = "The newest café, unhappily!"
    assert theirs(text)["input_ids"] == [2, *tokenizer.encode(text), 3]
    assert (theirs.mask_token, theirs.sep_token, theirs.pad_token) == ("[MASK]", "[SEP]", "[PAD]")


def test_a_vocabulary_that_the_text_cannot_fill_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"vocab_size=300 cannot be trained .* Use tokenizer.vocab_size=76, a smaller",
    ):
        train(tmp_path, vocab_size=300)
    symbols = tuple(f"[unused{number}]" for number in range(50))
    with pytest.raises(
        DataError, match=r"vocab_size=70 has no room for \d+ special tokens and characters"
    ):
        train(tmp_path, special_tokens=symbols)
