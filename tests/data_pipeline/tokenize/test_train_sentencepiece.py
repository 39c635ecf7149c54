"""Laws of what a tokenizer is trained on: languages have their shares, hashes choose, nothing
held back is learnt.
"""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from llmsys.config.combinations import find_refused_combinations
from llmsys.config.data import CrawlConfig, HeldoutSplitConfig, PairsConfig
from llmsys.config.tokenizer import SentencePieceConfig
from llmsys.data_pipeline.core.document_schema import (
    build_document_schema,
    hash_positions,
    is_heldout,
)
from llmsys.data_pipeline.tokenize.train_sentencepiece import (
    draw_sample,
    fit_sentencepiece,
    train_document_tokenizer,
)
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches
from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import Tokenizer, load_tokenizer

SPLIT = HeldoutSplitConfig(heldout_fraction=0.2)
LINES = [
    "the quick brown fox jumps over 1234 lazy dogs",
    "a fox, a dog and the box",
    "    if fox: return dog",
] * 30


def write(path: Path, seed: int) -> Path:
    """Many English documents, fewer German ones, a few Swahili ones."""
    choose = random.Random(seed)
    codes = ["en"] * 60 + ["de"] * 30 + ["sw"] * 4
    rows = [
        {
            "id": f"{choose.getrandbits(128):032x}",
            "language": code,
            "text": code * choose.randrange(50, 150),
        }
        for code in codes
    ]
    with ArrowFileWriter(path, build_document_schema([]), "zstd") as writer:
        for start in range(0, len(rows), 40):
            writer.write(
                pa.RecordBatch.from_pylist(rows[start : start + 40], build_document_schema([]))
            )
    return path


def chosen(sources: list[Path], config: SentencePieceConfig) -> list[dict[str, Any]]:
    sample = draw_sample(sources, config, SPLIT)
    batches = [batch for source in sources for batch in read_batches(source)]
    return [
        batch.slice(row, 1).to_pylist()[0] for batch in batches for row in sample.select_rows(batch)
    ]


def test_languages_have_their_shares_as_far_as_their_documents_allow(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{seed}.arrow", seed) for seed in (1, 2)]
    config = SentencePieceConfig(sample_bytes=6_000, language_weights={"de": 2, "sw": 1, "fr": 1})
    rows = chosen(sources, config)
    sizes = {
        code: sum(len(row["text"]) for row in rows if row["language"] == code)
        for code in ("en", "de", "sw")
    }
    everything = [
        row for source in sources for batch in read_batches(source) for row in batch.to_pylist()
    ]
    held = is_heldout([row["id"] for row in everything], SPLIT.heldout_fraction, SPLIT.seed)
    train = [row for row, flag in zip(everything, held.tolist(), strict=True) if not flag]
    all_swahili = sum(len(row["text"]) for row in train if row["language"] == "sw")
    assert sizes["en"] == 0
    assert 3_000 <= sizes["de"] < 3_300  # the last document may reach over the share
    assert sizes["sw"] == all_swahili > 0
    assert draw_sample(sources, config, SPLIT).facts["languages"]["de"]["bytes"] == sizes["de"]
    german = sorted((row for row in train if row["language"] == "de"), key=place)
    assert sorted(row["id"] for row in rows if row["language"] == "de") == sorted(
        row["id"] for row in german[: sum(row["language"] == "de" for row in rows)]
    )


def place(row: dict[str, Any]) -> int:
    return int(hash_positions([row["id"]], "tokenizer", 0)[0])


def test_the_sample_does_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    sources = [write(tmp_path / f"{seed}.arrow", seed) for seed in (1, 2)]
    for weights in ({}, {"en": 1.0, "de": 3.0}):
        config = SentencePieceConfig(sample_bytes=5_000, language_weights=weights)
        there, back = (
            sorted(row["id"] for row in chosen(order, config)) for order in (sources, sources[::-1])
        )
        assert there == back


def test_languages_that_no_document_has_are_named(tmp_path: Path) -> None:
    source = write(tmp_path / "documents.arrow", 1)
    config = SentencePieceConfig(language_weights={"fr": 1})
    with pytest.raises(DataError, match=r"no document in fr outside of the held-out ones is left"):
        train_document_tokenizer(
            _silent, sources=[source], folder=tmp_path, config=config, split=SPLIT
        )


def _silent(amount: float, dropped: int) -> None:
    pass


def trained(folder: Path, **options: Any) -> Tokenizer:
    config = SentencePieceConfig(vocab_size=330, **options)
    fit_sentencepiece(
        iter(LINES), folder=folder, config=config, sample={"documents": 90, "bytes": 1}
    )
    return load_tokenizer(folder)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    names = tokenizer.get_text_pieces()
    return [names.get(token, "byte") for token in tokenizer.encode(text)]


def test_digits_newlines_tabs_and_symbols_are_pieces_where_the_config_says_so(
    tmp_path: Path,
) -> None:
    symbols = ("<|user|>", "a, b", '"q"')
    options = {
        "split_digits": True,
        "whitespace_symbols": "pieces",
        "user_defined_symbols": symbols,
    }
    tokenizer = trained(tmp_path / "own", **options)
    text = 'x<|user|>a, b\n\n\n\t12"q"'
    assert [one for one in pieces(tokenizer, text) if one != "byte"] == [
        *["x", "<|user|>", "a, b", "\n\n", "\n", "\t", "1", "2", '"q"']
    ]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    plain = trained(tmp_path / "plain")
    assert not {"\n", "\t", "<|user|>"} & set(plain.get_text_pieces().values())


def test_whitespace_and_normalisation_are_as_the_config_says(tmp_path: Path) -> None:
    trimmed = trained(tmp_path / "trimmed", remove_extra_whitespaces=True, add_dummy_prefix=True)
    assert trimmed.encode("  the   fox ") == trimmed.encode("the fox")
    assert pieces(trimmed, "the")[0].startswith(" ")
    assert not any(
        one.isspace()
        for one in pieces(trained(tmp_path / "nfkc", normalization="nmt_nfkc"), "fox\tdog")
    )
    single = trained(tmp_path / "single", allow_whitespace_only_pieces=False)
    assert not {one for one in single.get_text_pieces().values() if len(one) > 1 and one.isspace()}


OPTIONS: dict[str, dict[str, Any]] = {
    "bpe": {"language_weights": {"en": 2, "de": 1}},
    "unigram": {"vocab_size": 300},
    "unigram without bytes": {"vocab_size": 300, "byte_fallback": False, "add_dummy_prefix": True},
}


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="only Linux says which cores a process may use"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_has_the_same_bytes_on_any_number_of_cores(name: str, tmp_path: Path) -> None:
    choose = random.Random(3)
    words = [
        "".join(choose.choices("abcdefghijklmnopqrstuvwxyzäöü猫犬", k=choose.randint(1, 9)))
        for _ in range(400)
    ]
    rows = [
        {
            "id": f"{choose.getrandbits(128):032x}",
            "language": code,
            "text": " ".join(choose.choices(words, k=60)),
        }
        for code in ["en", "de"] * 40
    ]
    source = tmp_path / "documents.arrow"
    with ArrowFileWriter(source, build_document_schema([]), "zstd") as writer:
        writer.write(pa.RecordBatch.from_pylist(rows, build_document_schema([])))
    config = SentencePieceConfig(
        model_type=name.split()[0], **({"vocab_size": 330} | OPTIONS[name])
    )
    cores, models = os.sched_getaffinity(0), []
    for allowed in (cores, {min(cores)}):
        os.sched_setaffinity(0, allowed)
        try:
            train_document_tokenizer(
                _silent, sources=[source], folder=tmp_path, config=config, split=SPLIT
            )
        finally:
            os.sched_setaffinity(0, cores)
        models.append((tmp_path / "tokenizer.model").read_bytes())
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        (
            {"control_symbols": ("<s>",)},
            r"control_symbols: <s> is already a piece of every model\. Leave it out",
        ),
        ({"user_defined_symbols": ("▁",)}, r"U\+2581 represents spaces\. Write a space"),
        ({"control_symbols": ("<x>",), "user_defined_symbols": ("<x>",)}, r"'<x>' is given twice"),
    ],
)
def test_symbols_that_cannot_be_are_refused(symbols: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SentencePieceConfig(**symbols)


def test_weights_of_languages_are_refused_where_texts_have_no_language() -> None:
    tokenizer = SentencePieceConfig(language_weights={"en": 1})
    pairs = SimpleNamespace(tokenizer=tokenizer, data=PairsConfig())
    (problem,) = find_refused_combinations(pairs)
    assert problem.key == "tokenizer.language_weights"
    assert "data.kind=pairs has no languages" in problem.message
    crawl = SimpleNamespace(tokenizer=tokenizer, data=CrawlConfig())
    assert not list(find_refused_combinations(crawl))
