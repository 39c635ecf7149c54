"""Laws of encoding by columns: the ids are the library's, for every model and every text,
however texts are batched.
"""

import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
from tokenizers.pre_tokenizers import ByteLevel

from llmsys.data_pipeline.text.ragged_arrays import compute_offsets
from llmsys.data_pipeline.tokenize import column_encoder, cut_points, token_cache
from llmsys.data_pipeline.tokenize.column_encoder import ColumnEncoder, build_column_encoder
from llmsys.data_pipeline.tokenize.encode_documents import check_sample
from llmsys.data_pipeline.tokenize.gigatoken_encoder import GigatokenEncoder
from llmsys.data_pipeline.tokenize.token_cache import RaggedTokens
from llmsys.errors import DataError
from llmsys.vocabulary.hugging_face_tokenizer import HuggingFaceTokenizer
from llmsys.vocabulary.tokenizer import SentencePieceTokenizer, Tokenizer, load_tokenizer
from tests.helpers import json_tokenizers
from tests.helpers.paths import TEST_DATA

VECTORS = TEST_DATA / "tokenizer"
LINES = [
    "The quick brown fox jumps over 13 lazy dogs; it isn't far.",
    "    if value is None:  # nothing was said",
    "Der Hund läuft, während der Vater das Essen kocht.",
    "猫が好きです。犬も好きです。 東京は大きい。",
    "Это небольшой пример текста, который мы любим.",
]
# What has gone wrong elsewhere: both kinds of space, newlines, NUL, marks, scripts without spaces,
# names of controls.
PARTS = [
    *"abcdeTh e  \n\n\t.,'\"()<x>-_=0123456789", "▁", "▁▁", "\0", "猫", "。", "é", "e\u0301",
    "\u3000", "\u00a0",
    "🦊", "\u2028", "ﬁ", "①", "\r\n", "</s>", "<unk>", "<0x0A>", " - ", "a b", "a\nb", "好きです",
    "который", " isn't",
    "    ", "\ufeff", "\x85",
]  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "as it is": ({}, None),
    "unknown characters": ({"byte_fallback": False, "character_coverage": 0.98}, None),
    "nmt_nfkc": (
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True,
            "add_dummy_prefix": True},
        None,
    ),
    "nfkc_cf, no bytes": ({"normalization_rule_name": "nfkc_cf", "byte_fallback": False}, None),
    "prefix": ({"add_dummy_prefix": True}, None),
    "trimmed": ({"remove_extra_whitespaces": True}, None),
    "symbols": ({"user_defined_symbols": ["\n", "\n\n", "\t", "<x>"], "split_digits": True}, None),
    "runs of spaces": ({"add_dummy_prefix": True, "user_defined_symbols": ["▁▁", "▁▁▁"]}, None),
    "newline inside": ({"user_defined_symbols": ["a\nb"], "byte_fallback": False}, None),
    "space inside": ({"user_defined_symbols": ["▁-▁", "a▁b"]}, "pieces with a space after another "
    "character"),
    "over spaces": ({"split_by_whitespace": False}, "pieces with a space after another character"),
    "space after": ({"treat_whitespace_as_suffix": True}, "its spaces are not at the start of "
    "words"),
    "characters": ({"model_type": "char"}, "it is a model of kind char"),
    "unigram": ({"model_type": "unigram", "vocab_size": 300, "byte_fallback": False},
        "sums 32-bit scores"),
}  # fmt: skip


def train(**options: Any) -> SentencePieceTokenizer:
    model = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe", "vocab_size": 420, "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "add_dummy_prefix": False,
        "allow_whitespace_only_pieces": True,
        "hard_vocab_limit": False, "minloglevel": 2, "num_threads": 1,
    }  # fmt: skip
    lines = [line for line in LINES for _ in range(3)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, **settings | options
    )
    return SentencePieceTokenizer(model.getvalue())


def trap_texts(count: int, seed: int = 0) -> list[str]:
    choose = random.Random(seed)
    texts = [
        "",
        " ",
        "   ",
        "\n",
        "▁",
        "\0",
        "",
        "x" * 5_000,
        "猫" * 3_000,
        " " * 500,
        "\n" * 300,
        "a " * 2_000,
    ]
    texts += [
        "".join(choose.choices(PARTS, k=choose.choice([1, 3, 10, 40, 200]))) for _ in range(count)
    ]
    return texts + [
        choose.choice([" ", "\n", "  ", "", "▁", "。"]).join(choose.choices(LINES, k=3))
        for _ in range(count // 4)
    ]


def ids_of(encoder: ColumnEncoder, texts: list[str], batch_rows: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for start in range(0, len(texts), batch_rows):
        found = encoder.encode(pa.array(texts[start : start + batch_rows], pa.large_string()))
        ends = compute_offsets(found.lengths)
        rows += [
            found.values[ends[row] : ends[row + 1]].tolist() for row in range(len(found.lengths))
        ]
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_the_ids_are_the_librarys_from_cold_and_warm_and_in_any_batch(name: str) -> None:
    options, reason = MODELS[name]
    tokenizer = train(**options)
    encoder = build_column_encoder(tokenizer)
    assert encoder.reason == reason or (reason or "nothing") in (encoder.reason or "")
    texts = trap_texts(100)
    expected = [tokenizer.encode(text) for text in texts]
    for batch_rows in (len(texts), 19):
        assert ids_of(encoder, texts, batch_rows) == expected


@pytest.fixture(params=["gigatoken", "words"])
def encoded_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Byte-level tokenizers are encoded by gigatoken, or by words, as without it."""
    if request.param == "words":
        monkeypatch.setattr(column_encoder, "find_gigatoken_problem", lambda values: "off")
    return str(request.param)


@pytest.mark.parametrize("kind", json_tokenizers.KINDS)
def test_the_ids_of_a_tokenizer_json_are_its_librarys(
    kind: str, encoded_by: str, tmp_path: Path
) -> None:
    json_tokenizers.write(kind, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    encoder = build_column_encoder(tokenizer)
    assert (encoder.reason is None) == (
        kind in ("gpt2", "llama3", "qwen2", "bert", "t5", "mistral")
    )
    is_fast = encoded_by == "gigatoken" and kind in ("gpt2", "llama3", "qwen2")
    assert isinstance(encoder, GigatokenEncoder) == is_fast
    texts = trap_texts(150)
    expected = tokenizer.encode_batch(texts)
    assert ids_of(encoder, texts, len(texts)) == ids_of(encoder, texts, 29) == expected


# What the ways to divide words look at: ends of lines, contractions, marks, characters that NFC
# turns into ASCII.
WORD_PARTS = [
    "\n", "\n", "\n\n", " ", "  ", "\t", "\r\n", "'", "'s", "'ve", "(", "((", "\u00a0", "\u3000",
        "a", "word", " The",
    "12", " 7", "é", "e\u0301", "\u0301", "\u212a", "\u037e", "привет", "中文", "。", "한국",
    "\u1100\u1161", "_", "-",
    "--", ".", ",", "!\n", "…", "“", "‖", "\u200b", "\0", "\x1c", "\x85", "<|x|>", "|x", "    ",
    "[SEP]", "\u0600", "İ",
    "ς", "१२", "ने",
]  # fmt: skip


# Pieces of white space and over the edges of words: a cut in a wrong place shows in the ids.
ACROSS = [
    "\n\n", "\n\n\n", " \n", "\t\n", "s.", "'s", "'v", "((", "(a", "1a", "a1", "!\n", ".a", "\na",
        "-a", "\n7", "\n\t",
    "  ",
]  # fmt: skip


def with_pieces(values: dict[str, Any], pieces: list[str]) -> dict[str, Any]:
    """A byte-level BPE with these pieces more, each made from left to right."""
    vocabulary, merges = values["model"]["vocab"], values["model"]["merges"]
    for text in pieces:
        piece, *rest = "".join(
            word for word, _ in ByteLevel(False, use_regex=False).pre_tokenize_str(text)
        )
        for one in rest:
            merges.append([piece, one])
            piece += one
            vocabulary.setdefault(piece, max(vocabulary.values()) + 1)
    return values


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2", "bert"])
def test_words_of_a_tokenizer_json_end_where_its_library_ends_them(
    kind: str, encoded_by: str, tmp_path: Path
) -> None:
    library = json_tokenizers.write(kind, tmp_path)
    if kind != "bert":
        (tmp_path / "tokenizer.json").write_text(
            json.dumps(with_pieces(json.loads(library.to_str()), ACROSS))
        )
    tokenizer = load_tokenizer(tmp_path)
    choose = random.Random(1)
    texts = [
        "".join(choose.choices(WORD_PARTS, k=choose.choice([2, 3, 4, 8]))) for _ in range(3_000)
    ]
    assert ids_of(build_column_encoder(tokenizer), texts, 1_000) == tokenizer.encode_batch(texts)


def published(name: str, tmp_path: Path) -> tuple[Tokenizer, str]:
    if name == "spm_test_model":
        return load_tokenizer(
            VECTORS / "spm_test_model.model"
        ), "vectors_spm_test_model_botchan.jsonl.gz"
    file = tmp_path / "tokenizer.json"
    file.write_bytes(gzip.decompress((VECTORS / "gpt-neox-olmo-tokenizer.json.gz").read_bytes()))
    return load_tokenizer(file, "<|endoftext|>"), "vectors_gpt-neox_multilingual.jsonl.gz"


@pytest.mark.parametrize("name", ["spm_test_model", "gpt-neox"])
def test_published_tokenizers_give_the_published_ids(name: str, tmp_path: Path) -> None:
    tokenizer, file = published(name, tmp_path)
    rows = [
        json.loads(line)
        for line in gzip.decompress((VECTORS / file).read_bytes()).split(b"\n")
        if line
    ]
    assert ids_of(build_column_encoder(tokenizer), [row["text"] for row in rows], 400) == [
        row["ids"] for row in rows
    ]


def test_a_worker_that_starts_reads_a_tokenizer_json_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_tokenizers.write("gpt2", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    read, asked = HuggingFaceTokenizer.to_dict, []
    monkeypatch.setattr(
        HuggingFaceTokenizer, "to_dict", lambda self: asked.append(self) or read(self)
    )
    assert build_column_encoder(tokenizer).reason is None
    assert asked == [tokenizer]


def test_a_word_of_a_unigram_model_depends_on_the_text_before_it_and_so_goes_to_the_library() -> (
    None
):
    tokenizer, before, word = (
        load_tokenizer(VECTORS / "spm_test_model.model"),
        "it " * 500,
        "-wi-a-----",
    )
    alone, behind = (
        tokenizer.encode(word),
        tokenizer.encode(before + word)[len(tokenizer.encode(before)) :],
    )
    assert sorted(alone) == sorted(behind)
    assert (
        alone != behind
    )  # the same pieces in another order: two sums of 32-bit scores that only the start tells apart
    encoder = build_column_encoder(tokenizer)
    assert "sums 32-bit scores over the whole text" in str(encoder.reason)
    assert ids_of(encoder, [before + word, word], 2) == [tokenizer.encode(before + word), alone]


def test_a_memory_that_is_full_begins_anew_and_changes_no_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, texts = train(), trap_texts(100)
    monkeypatch.setattr(column_encoder, "CACHE_BYTES", 5_000)
    encoder = build_column_encoder(tokenizer)
    assert ids_of(encoder, texts, 7) == tokenizer.encode_batch(texts)
    assert len(encoder._words._cache) < 400  # type: ignore[attr-defined]


@pytest.mark.parametrize("slots", [1 << 4, 1 << 12])
def test_short_words_have_numbers_of_their_own_however_they_collide(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "FIRST_SLOTS", slots)
    # nearly all words want one of four slots
    monkeypatch.setattr(token_cache, "_LOW_FACTOR", np.uint64(1 << 62))
    choose = random.Random(2)
    words = sorted({bytes(choose.choices(b"\0\0ab", k=choose.randint(1, 15))) for _ in range(600)})
    table = token_cache.ShortWordTable()
    for start in range(0, len(words), 150):
        part = words[start : start + 150]
        table.insert(keys(part), np.arange(start, start + len(part)))
    assert table.look_up(keys(words)).tolist() == list(range(len(words)))
    strangers = [
        b"\0" * 16,
        b"ab" * 8,
        b"ab" * 20,
        *(word + b"\0" for word in words if word + b"\0" not in words),
    ]
    assert set(table.look_up(keys(strangers)).tolist()) == {-1}


def keys(words: list[bytes]) -> token_cache.WordKeys:
    data, places = token_cache.get_column_buffers(pa.array(words, pa.large_binary()))
    return token_cache.compute_word_keys(data, places[:-1], np.diff(places))


def test_long_parts_are_cut_in_blocks_as_they_are_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, texts = train(), trap_texts(60)
    monkeypatch.setattr(cut_points, "BLOCK", 7)
    assert ids_of(build_column_encoder(tokenizer), texts, 20) == tokenizer.encode_batch(texts)


def test_a_slice_of_a_column_is_encoded_as_that_slice() -> None:
    tokenizer, texts = train(), trap_texts(60)
    column = pa.array(texts, pa.large_string()).slice(11, 30)
    found = build_column_encoder(tokenizer).encode(column)
    assert found.values.tolist() == [
        token for ids in tokenizer.encode_batch(texts[11:41]) for token in ids
    ]
    nothing = build_column_encoder(tokenizer).encode(column.slice(0, 0))
    assert len(nothing.values) == len(nothing.lengths) == 0


def test_the_config_can_ask_for_the_library() -> None:
    encoder = build_column_encoder(train(), "library")
    assert encoder.reason == "the config selects it"
    assert ids_of(encoder, LINES, 2) == [train().encode(line) for line in LINES]


def test_a_wrong_id_in_the_checked_sample_is_named_with_document_and_token() -> None:
    tokenizer = train()
    encoded = tokenizer.encode(LINES[0])
    batch = pa.record_batch({"id": ["ab" * 16], "text": pa.array([LINES[0]], pa.large_string())})
    right = RaggedTokens(np.array(encoded, np.uint16), np.array([len(encoded)]))
    assert check_sample(batch, right, tokenizer) == 1
    wrong = RaggedTokens(right.values.copy(), right.lengths)
    wrong.values[3] += 1
    message = (
        rf"document (ab){{16}} has the id {encoded[3] + 1} as token 3, where the library has "
        rf"{encoded[3]}: .*"
    )
    with pytest.raises(DataError, match=message + r"Set data\.tokens\.encoder=library"):
        check_sample(batch, wrong, tokenizer)
    short = RaggedTokens(right.values[:-1], right.lengths - 1)
    with pytest.raises(
        DataError, match=rf"has {len(encoded) - 1} tokens, and the library gives it {len(encoded)}"
    ):
        check_sample(batch, short, tokenizer)
