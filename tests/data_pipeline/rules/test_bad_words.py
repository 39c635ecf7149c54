"""Laws of lists of words: C4's borders, counted shares, lines taken out, the lists of the
document's own language.
"""

import random
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import ValidationError

from llmsys.config.custom_rules import BadWordsConfig, WordListConfig
from llmsys.data_pipeline.core.funnel import format_reason
from llmsys.data_pipeline.rules.bad_words import BadWordsRule
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.rules.rule import DocumentBatch, RuleOutcome, WordSplitters
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import WhitespaceTokenizer
from tests.reference.filters import find_bad_words

PLAIN = WordSplitters(WordSplitter(WhitespaceTokenizer()))  # the rule asks for no words
WORDS = ("ass", "assess", "bad word", "2 girls", "c.r.a.p", "ümlaut", "ab", "abc", "x", "a_b")


def config(*words: str, language: str = "any", **options: object) -> BadWordsConfig:
    return BadWordsConfig.model_validate(
        {"word_lists": [{"entries": words, "language": language}], **options}
    )


def apply(rule: BadWordsConfig, texts: list[str], language: str = "any") -> RuleOutcome:
    return RuleChain([rule], PLAIN, language).apply(pa.array(texts, pa.large_string()))[0]


@pytest.mark.parametrize("language", ["en", "ja"])
def test_counts_equal_their_plain_twin(language: str) -> None:
    choose = random.Random(0)
    parts = [*WORDS, "a", "b", "c", " ", " ", "_", "-", "\n", "é", ".", "AB", "Ass"]
    texts = ["".join(choose.choices(parts, k=choose.randint(1, 7))) for _ in range(2_000)]
    rule = BadWordsRule(config(*WORDS, language=language), language)
    counts = rule.apply(DocumentBatch(texts, PLAIN)).statistics["count"].tolist()
    assert counts == [len(find_bad_words(text, WORDS, language == "ja")) for text in texts]
    assert 0 in counts
    assert max(counts) > 1


def test_a_share_above_the_limit_drops_the_page_and_an_equal_one_stays() -> None:
    outcome = apply(config("ass", max_share=0.25), ["one ass of four", "one ass of", "an assessor"])
    assert outcome.keep.to_pylist() == [True, False, True]
    assert (outcome.test[1].as_py(), outcome.threshold[1].as_py()) == (
        "share of listed words",
        0.25,
    )
    assert outcome.value[1].as_py() == pytest.approx(1 / 3)
    assert outcome.match.to_pylist() == [None, "ass", None]


def test_a_drop_names_the_words_that_were_found() -> None:
    words = ["ass", "damn", "one", "two", "three", "four"]
    texts = ["Damn, what an ASS. damn", "clean", "ass damn one two three four"]
    assert apply(config(*words), texts).match.to_pylist() == [
        "damn × 2, ass",
        None,
        "ass, damn, one, two, three, 1 more",
    ]
    lines = apply(config(*words, action="drop_line"), ["an ass\nDamn", "one\nclean"])
    assert lines.match.to_pylist() == ["ass, damn", None]
    assert format_reason("bad_words", "no line left", None, None, lines.match[0].as_py()) == (
        "bad_words: no line left (ass, damn)"
    )


def test_lines_with_listed_words_go_and_are_counted() -> None:
    texts = ["Good line.\nBad ASS line.\nGood end.", "ass", "", "clean"]
    outcome = apply(config("ass", action="drop_line"), texts)
    assert outcome.texts.to_pylist() == ["Good line.\nGood end.", "", "clean"]
    assert outcome.test.to_pylist() == [None, "no line left", None, None]
    assert outcome.changes == {"line taken out: listed word": 1}


def test_lists_are_asked_of_documents_in_their_language(tmp_path: Path) -> None:
    path = tmp_path / "ja.txt"
    path.write_text("# words\nばか\n\n", encoding="utf-8")
    rule = BadWordsConfig(
        word_lists=(
            WordListConfig(files=(path,), language="ja"),
            WordListConfig(entries=("damn",), language="en"),
        )
    )
    texts = ["あなたはばかです", "damn it"]
    found = {code: apply(rule, texts, code).keep.to_pylist() for code in ("ja", "en", "de")}
    assert found == {"ja": [False, True], "en": [True, False], "de": [True, True]}


def test_pages_kept_all_the_same_follow_from_their_text_and_the_seed() -> None:
    texts = [f"damn number {number}" for number in range(400)]
    kept = apply(config("damn", keep_fraction=0.25), texts).keep.to_pylist()
    assert 60 < sum(kept) < 140
    assert kept[::-1] == apply(config("damn", keep_fraction=0.25), texts[::-1]).keep.to_pylist()
    assert kept != apply(config("damn", keep_fraction=0.25, seed=1), texts).keep.to_pylist()


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(
        ValidationError,
        match=r"the list is empty\. Name a file, such as word_lists: \[\{files: \[words",
    ):
        BadWordsConfig(word_lists=(WordListConfig(),))
