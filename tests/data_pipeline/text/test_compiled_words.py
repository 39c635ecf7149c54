"""The compiled core finds the words and line counts that the Python splitter finds."""

import gc
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from llmsys.config.cleaning import ArticleExtractorConfig, ReadConfig
from llmsys.data_pipeline.core.native import CoreUnavailableError, NativeCore
from llmsys.data_pipeline.extract.extractor import extract_text
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.text import compiled_words
from llmsys.data_pipeline.text.compiled_words import (
    find_changed_characters,
    list_changed_characters,
)
from llmsys.data_pipeline.text.spacy_tokenizer import LONGEST_CHUNK, SpacyTokenizer
from llmsys.data_pipeline.text.splitting_rules import FOLDER, SHARED, SplittingRules
from llmsys.data_pipeline.text.word_cache import WordTokenizer
from llmsys.data_pipeline.text.word_columns import LineColumns, WordColumns, WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import CharacterTokenizer, WhitespaceTokenizer
from tests.helpers.hostile_texts import list_hostile_texts
from tests.helpers.native_core import needs_compiler, use_core
from tests.helpers.paths import SAMPLE_CRAWL

pytestmark = needs_compiler

LANGUAGES = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != SHARED)
COLUMNS = ("lengths", "sizes", "hashes", "powers", "flags")


class Pair:
    """A splitter with the core, and one without it."""

    def __init__(
        self, core: NativeCore, tokenizer: WordTokenizer, patch: pytest.MonkeyPatch, **limits: int
    ) -> None:
        use_core(patch, core)
        self.compiled = WordSplitter(tokenizer, **limits)
        assert self.compiled._compiled is not None
        use_core(patch, CoreUnavailableError("off"))
        self.plain = WordSplitter(tokenizer, **limits)
        assert self.plain._compiled is None

    def check_equal(self, texts: Sequence[str]) -> None:
        """Compare words with all their columns, and the counts of lines."""
        words = [each.split_words(texts) for each in (self.compiled, self.plain)]
        assert list_words(words[0]) == list_words(words[1])
        for name in COLUMNS:
            columns = [getattr(each.vocabulary, name)[each.ids_W] for each in words]
            assert columns[0].dtype == columns[1].dtype
            assert columns[0].tolist() == columns[1].tolist(), name
        lines = [text.splitlines() for text in texts]
        counts = [each.compute_line_columns(texts, lines) for each in (self.compiled, self.plain)]
        assert list_counts(counts[0]) == list_counts(counts[1])


def list_words(columns: WordColumns) -> list[list[str]]:
    words = [columns.vocabulary.get_word(number) for number in columns.ids_W.tolist()]
    return [words[start:end] for start, end in pairwise(columns.offsets.tolist())]


def list_counts(columns: LineColumns) -> list[list[int]]:
    return [getattr(columns, name).tolist() for name in LineColumns.__dataclass_fields__]


def list_shipped_texts() -> list[str]:
    """Return the texts of all pages of the sample crawl."""
    config = ArticleExtractorConfig()
    texts: list[str | None] = []
    for shard in sorted(SAMPLE_CRAWL.glob("*.warc.gz")):
        limit = config.max_page_bytes
        for batch in read_pages(str(shard), max_page_bytes=limit, config=ReadConfig()):
            texts += extract_text(batch.pages, config).to_pylist()
    return [text for text in texts if text]


def test_shipped_pages_have_the_words_and_lines_of_python(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = list_shipped_texts()
    assert len(texts) > 700
    for rules, step in (("en", 1), ("xx", 4), ("fr", 4)):
        pair = Pair(built_core, SpacyTokenizer(rules), monkeypatch)
        for start in range(0, len(texts), 128):
            pair.check_equal(texts[start : start + 128 : step])


@pytest.mark.parametrize("rules", LANGUAGES)
def test_hostile_texts_have_the_words_and_lines_of_python(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch, rules: str
) -> None:
    pair = Pair(built_core, SpacyTokenizer(rules), monkeypatch)
    texts = list_hostile_texts(7, 120, rules)
    pair.check_equal(texts)
    pair.check_equal(texts[::-1])


def test_white_space_splits_words_as_in_python(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Pair(built_core, WhitespaceTokenizer(), monkeypatch).check_equal(
        list_hostile_texts(8, 200, "en")
    )


def test_white_space_that_is_a_word_starts_a_sentence(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(built_core, SpacyTokenizer(), monkeypatch)
    texts = ["so. )", "so.\t)", "so.\u3000)", "so.  )", "so.\r\n)", "so. b", "so.)\t) b"]
    pair.check_equal(texts)
    counted = pair.compiled.compute_line_columns(texts, [text.splitlines() for text in texts])
    assert counted.sentences_L.tolist() == [1, 2, 2, 2, 1, 1, 2, 2]


def test_columns_outlive_a_table_that_was_cleared(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(built_core, SpacyTokenizer(), monkeypatch, memo_chunks=3)
    early = pair.compiled.split_words(["some early words"])
    for number in range(20):
        pair.check_equal([f"text{number} with (other) words{number}, and more"])
    gc.collect()
    assert list_words(early) == [["some", "early", "words"]]
    assert early.vocabulary.find_word("early") is not None
    assert early.vocabulary.find_word("text3") is None
    by_size = Pair(built_core, SpacyTokenizer(), monkeypatch, memo_characters=5)
    by_size.compiled.split_words(["something", "long"])
    by_size.compiled.split_words(["a"])
    assert len(by_size.compiled._compiled or ()) == 2  # white space, and the last text


def count_left_chunks(
    core: NativeCore, texts: Sequence[str], patch: pytest.MonkeyPatch
) -> list[str]:
    """Return the chunks that Python is asked for."""
    asked: list[str] = []

    class Tokenizer(SpacyTokenizer):
        def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
            asked.extend(chunks)
            return super().split_words(chunks)

    use_core(patch, core)
    WordSplitter(Tokenizer()).split_words(texts)
    return asked


def test_python_splits_what_the_core_does_not_know(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "y" * (LONGEST_CHUNK + 1)
    texts = ["plain words (here), don't", f"x\u0378 {long}", long[1:] + " x\u0378"]
    assert count_left_chunks(built_core, texts, monkeypatch) == ["x\u0378", long]
    monkeypatch.setattr(compiled_words, "list_changed_characters", lambda core: "q")
    assert count_left_chunks(built_core, ["a quark", "quarks"], monkeypatch) == ["quark", "quarks"]


def test_characters_that_python_knows_otherwise_are_found(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(find_changed_characters(built_core)) >= set(list_changed_characters(built_core))
    real = unicodedata.category

    def tell_otherwise(character: str) -> str:
        return "Po" if character in "xあ" else real(character)

    before = find_changed_characters(built_core)
    monkeypatch.setattr(unicodedata, "category", tell_otherwise)
    assert set(find_changed_characters(built_core)) - set(before) == {"x", "あ"}


@pytest.mark.parametrize(
    "expression",
    [
        "a*?",
        "a++",
        "(?P<n>a)",
        "(?<=a+)b",
        r"\ba",
        r"(a)\1",
        "(a?)*",
        "(a",
        "[a",
        "a)",
        "[z-a]",
        "*a",
    ],
)
def test_rules_with_an_unknown_expression_are_left_to_python(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch, expression: str
) -> None:
    use_core(monkeypatch, built_core)
    assert WordSplitter()._compiled is not None
    real = SplittingRules.get_expression

    def get_expression(rules: SplittingRules, name: str) -> str:
        return expression if name == "infix" else real(rules, name)

    monkeypatch.setattr(SplittingRules, "get_expression", get_expression)
    assert WordSplitter()._compiled is None


def test_other_tokenizers_and_a_missing_core_are_left_to_python(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_core(monkeypatch, built_core)
    assert WordSplitter(CharacterTokenizer())._compiled is None
    assert WordSplitter(SpacyTokenizer("vi"))._compiled is None  # no rules of ours
    use_core(monkeypatch, CoreUnavailableError("off"))
    assert WordSplitter()._compiled is None


def test_a_failed_split_leaves_no_numbers_behind(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer(SpacyTokenizer):
        fails = True

        def split_words(self, chunks: Sequence[str]) -> list[list[str]]:
            if self.fails:
                raise RuntimeError("no")
            return super().split_words(chunks)

    use_core(monkeypatch, built_core)
    tokenizer = Tokenizer()
    splitter = WordSplitter(tokenizer)
    with pytest.raises(RuntimeError, match="no"):
        splitter.split_words(["good x\u0378, x"])
    tokenizer.fails = False
    assert list_words(splitter.split_words(["good x\u0378, x"])) == [["good", "x\u0378", ",", "x"]]


def test_lone_surrogates_are_refused_as_by_python(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(built_core, SpacyTokenizer(), monkeypatch)
    for splitter in (pair.compiled, pair.plain):
        with pytest.raises(UnicodeEncodeError):
            splitter.split_words(["a\ud800b"])


def test_more_lines_than_were_given_are_refused(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_core(monkeypatch, built_core)
    with pytest.raises(ValueError, match="1 texts have more lines than the 1 that were given"):
        WordSplitter().compute_line_columns(["a\nb"], [["a"]])


def test_words_are_found_by_their_bytes(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short and long words in many slots: every one is found, and no other."""
    use_core(monkeypatch, built_core)
    source = np.random.default_rng(3)
    words: list[Any] = ["".join(map(chr, source.integers(97, 122, size))) for size in
                        source.integers(1, 30, 20_000)]  # fmt: skip
    columns = WordSplitter(WhitespaceTokenizer()).split_words([" ".join(words)])
    assert list_words(columns) == [words]
    assert len(columns.vocabulary) == len(set(words)) + 1
    assert columns.vocabulary.find_word(words[5]) == columns.ids_W[5]
    assert columns.vocabulary.find_word("never met") is None
