"""The compiled core counts the n-grams that numpy counts."""

import random

import pytest

from llmsys.data_pipeline.core.native import CoreUnavailableError, NativeCore
from llmsys.data_pipeline.rules.datatrove_repetition import (
    measure_repeated_ngrams,
    measure_top_ngrams,
)
from llmsys.data_pipeline.rules.rule import DocumentBatch, WordSplitters
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import WhitespaceTokenizer
from tests.helpers.hostile_texts import list_hostile_texts
from tests.helpers.native_core import needs_compiler, use_core

pytestmark = needs_compiler

WORDS = ["a", "b", "ab", "c", "bc", "abc", "longer", "é", "中文", "x."]


def list_repetitive_texts(seed: int) -> list[str]:
    """Return texts of few words, whose n-grams repeat, with equal joined words, and of few words
    alone.
    """
    source = random.Random(seed)
    sizes = (0, 1, 2, 3, 4, 5, 9, 10, 11, 60, 400)
    texts = [
        " ".join(source.choices(WORDS[: source.choice((1, 2, 4, 10))], k=source.choice(sizes)))
        for _ in range(400)
    ]
    return [*texts, *list_hostile_texts(seed, 100, "en")]


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_ngrams_are_those_of_numpy(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    texts = list_repetitive_texts(seed)
    for splitters in (WordSplitters(), WordSplitters(WordSplitter(WhitespaceTokenizer()))):
        found = []
        for core in (built_core, CoreUnavailableError("off")):
            use_core(monkeypatch, core)
            batch = DocumentBatch(texts, splitters)
            found.append(measure_top_ngrams(batch) | measure_repeated_ngrams(batch))
        assert list(found[0]) == list(found[1])
        for name, shares in found[0].items():
            assert shares.tolist() == found[1][name].tolist(), name
            assert (shares > 0).sum() > 20


def test_no_document_is_no_ngram(built_core: NativeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    use_core(monkeypatch, built_core)
    batch = DocumentBatch([], WordSplitters())
    assert measure_top_ngrams(batch)["top_2gram_share"].tolist() == []
    assert measure_repeated_ngrams(batch)["duplicate_10gram_share"].tolist() == []
