"""What AutoTokenizer loads of an exported folder cuts text as the SentencePiece model does."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from llmsys.convert.tokenizer_files import read_special_token_ids, write_tokenizer

transformers = pytest.importorskip("transformers")

AS_IT_IS: dict[str, Any] = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "12",
    "wizards",
    "box",
    "3.5",
)
TEXTS = [
    "Hello  world",
    "  lead",
    "日本語 mix 123",
    "tab\tx",
    "new\nline\n\n  x ",
    "é ü 🙂",
    "the lazy 12 foxes",
]


def trained(folder: Path, **options: Any) -> Path:
    lines = (" ".join(WORDS[i % 13 :] + WORDS[: i % 11]) for i in range(300))
    model = io.BytesIO()
    settings: dict[str, Any] = {"vocab_size": 360, "model_type": "bpe"} | options
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    (folder / "any.model").write_bytes(model.getvalue())
    return folder / "any.model"


def loaded(folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_and_texts_agree(kind: str, prefix: bool, tmp_path: Path) -> None:
    file = trained(tmp_path, model_type=kind, add_dummy_prefix=prefix, **AS_IT_IS)
    write_tokenizer(tmp_path, file, longest=64)
    ours, theirs = sentencepiece.SentencePieceProcessor(model_file=str(file)), loaded(tmp_path)
    for text in [*TEXTS, *WORDS]:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids, text
        assert theirs.decode(ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (1, 2, 0)
    assert (theirs.model_max_length, len(theirs)) == (64, len(ours))
    assert read_special_token_ids(file) == {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }


def test_a_model_that_changes_text_goes_as_it_is_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = trained(tmp_path, normalization_rule_name="nmt_nfkc")
    write_tokenizer(tmp_path, file, longest=64)
    assert "was not converted to tokenizer.json" in caplog.text
    assert (tmp_path / "tokenizer.model").read_bytes() == file.read_bytes()
    assert not (tmp_path / "tokenizer.json").exists()


def test_without_a_tokenizer_no_id_is_taken_from_another_vocabulary() -> None:
    assert read_special_token_ids(None) == {
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
