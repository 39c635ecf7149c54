"""The fast rules decide as their plain twins do, on texts made to be hard and on pages of the
sample crawl.
"""

import random
from functools import lru_cache

import pyarrow as pa
import pytest

from llmsys.config.cleaning import ResiliparseExtractorConfig
from llmsys.config.line_rules import C4Config, C4DatatroveConfig
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RuleConfig,
)
from llmsys.data_pipeline.extract.extractor import extract_text
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.rules.rule import RuleOutcome
from tests.helpers.paths import SAMPLE_CRAWL
from tests.reference.rules import judge

SHARD = SAMPLE_CRAWL / "shard-00000.warc.gz"

# Published thresholds, and loose or tight ones under which tests that are rarely reached decide
# too.
RULES: dict[str, RuleConfig] = {
    "repetition": GopherRepetitionConfig(),
    "repetition-loose-lines": GopherRepetitionConfig(
        max_duplicate_paragraph_share=1, max_duplicate_paragraph_character_share=1,
        max_duplicate_line_share=1,
        max_duplicate_line_character_share=1, max_top_2gram_share=9, max_top_3gram_share=0.3,
        max_top_4gram_share=0.3,
    ),
    "repetition-loose-ngrams": GopherRepetitionConfig(
        max_duplicate_paragraph_share=1, max_duplicate_paragraph_character_share=1,
        max_duplicate_line_share=1,
        max_duplicate_line_character_share=1, max_top_2gram_share=9, max_top_3gram_share=9,
        max_top_4gram_share=9,
        max_duplicate_5gram_share=0.6, max_duplicate_6gram_share=0.55,
        max_duplicate_7gram_share=0.5,
        max_duplicate_8gram_share=0.4, max_duplicate_9gram_share=0.3,
        max_duplicate_10gram_share=0.05,
    ),
    "quality": GopherQualityConfig(),
    "quality-short": GopherQualityConfig(min_words=1, min_mean_word_length=1.5,
        min_alphabetic_word_share=0.3),
    "quality-tight": GopherQualityConfig(
        min_words=0, max_words=150, max_mean_word_length=5, max_hash_ratio=0.02,
        max_ellipsis_ratio=0.02,
        max_bullet_line_share=0.2, max_ellipsis_line_share=0.1, min_alphabetic_word_share=0.5,
        min_stop_words=5,
    ),
    "c4": C4Config(min_sentences=1),
    "c4-datatrove": C4DatatroveConfig(),
    "c4-fineweb": C4DatatroveConfig(end_marks=()),
    "c4-tight": C4DatatroveConfig(max_word_length=12, min_sentences=2),
    "fineweb": FinewebQualityConfig(),
    "fineweb-loose": FinewebQualityConfig(max_duplicate_line_character_share=0.3,
        max_short_line_share=0.9),
    "fineweb-lists": FinewebQualityConfig(
        min_end_mark_line_share=0, max_short_line_share=1, max_duplicate_line_character_share=1,
        max_newlines_per_word=0.1
    ),
}  # fmt: skip

SENTENCE = "The people of the town have to be with that old mill and its wheel. "
ADVERSARIAL = [
    "",
    " ",
    "\n\n\n",
    "a",
    "word " * 300,
    SENTENCE,
    SENTENCE * 2 + "Then something else happened, which nobody had foreseen; it was rather odd.",
    "\n".join(
        f"Line {number} says something about the weather and that is all." for number in range(20)
    ),
    "\n\nrepeated\n\nrepeated\n\nother\n\n",
    "\nfirst\nsecond\n",
    "ab c d e f g h i j k l m. a bc d e f g h i j k l m. " * 4,  # equal only without separators
    "- item one\n• item two\n  - item three\n\t•\n-" + SENTENCE,
    f"{SENTENCE}...\n{SENTENCE}…\n{SENTENCE}\n" * 3,
    "# " * 80 + SENTENCE * 3,
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 " * 6 + SENTENCE,
    ("don't can't won't I'm you've cannot gonna state-of-the-art and/or $5.00 10km e.g. this, i.e. "
    "that. Mr. X.") * 3,
    (
        "She said: \"Hello!\" (Really?) 'Yes.' [1] "
        "He left [edit] early [citation needed]. [23][4]\n"
    )
    * 4,
    "[1] [2] [3]\n[4][5] one two\nwords here and [6] there.\n",
    ("We use cookies on this site.\nA real line that stays on the page.\nPlease enable JavaScript "
    "to go on.\n") * 3,
    "java[1]script is hidden in here.\nlorem [2]ipsum is not.\nprivacy [edit]policy neither.\n" * 3,
    "Good line number one is here.\nLorem ipsum dolor sit amet.\nfunction() { return; }",
    "Good line number one is here.\nshort {\nfunction() { return; } and more words.",
    "Some text.  Two spaces.   Three.\tTab. Nbsp.\u00a0\u00a0End.\u3000Ideographic. " * 5,
    "Old lines\x0bsplit\x0cby\x1cmany\x1dkinds\x1eof\x85breaks\u2028and\u2029more. " * 5,
    "中文没有空格。这是第二句！第三句呢？" * 20,
    "これは文です。" * 30 + SENTENCE,
    "emoji 😀😀 and ☺ marks ★★★ :) :-) <3 (^_^) ): x D: 8) ¯\\(ツ)/¯ here. " * 6,
    "x" * 1500 + " " + SENTENCE * 4,
    "(" * 300 + " " + "_" * 300 + " " + "-" * 300 + SENTENCE,
    "http://example.org/a/b?c=d&e=f#g " * 30 + SENTENCE * 3,
    "K İstanbul ſ ﬁ ß COOKIE POLICY use cooKies. JAVASCRİPT JAVASCRIPT.\n" * 4,
    "\ufeff\u200bzero\u200bwidth \u200d joiners\u00ad here. " * 10 + SENTENCE,
]  # fmt: skip

FRAGMENTS = [
    "the", "of", "and", "to", "mill", "wheel", "water", "don't", "e.g.", "U.S.", "10%", "#", "...",
    "…", "-", "•",
    "!", "word.", "end?", '"quoted."', "(aside)", "[1]", "[edit]", "{", "javascript", "use cookies",
        "3.14", "a/b",
    "foo_bar", "Mr.", "'tis", "naïve", "Äpfel", "数据", "。", "😀", "well-known", "x", "I", "0",
    "lorem ipsum",
    "state,", "semi;",
]  # fmt: skip
SPACES = [" "] * 24 + ["\n"] * 5 + ["\n\n"] * 2 + ["  ", "\t", "\u00a0", "\r\n", "\x85", ". "]


def random_text(seed: int) -> str:
    source = random.Random(seed)
    vocabulary = source.sample(FRAGMENTS, source.randint(3, len(FRAGMENTS)))
    words = [
        source.choice(vocabulary) + source.choice(SPACES)
        for _ in range(source.choice([5, 40, 120, 300]))
    ]
    for _ in range(source.randint(0, 3)):  # repeat a stretch, so that lines and n-grams repeat
        start = source.randrange(len(words))
        words += words[start : start + source.randint(1, 60)] * source.randint(1, 3)
    return "".join(words)


@lru_cache(maxsize=1)
def sample_pages() -> list[str]:
    batch = next(read_pages(str(SHARD), max_page_bytes=60_000, batch_pages=36))
    return [
        text for text in extract_text(batch.pages, ResiliparseExtractorConfig()).to_pylist() if text
    ]


def apply(rule: RuleConfig, texts: list[str]) -> RuleOutcome:
    return RuleChain([rule]).apply(pa.array(texts, pa.large_string()))[0]


def judgements(outcome: RuleOutcome) -> list[tuple[str | None, str | None]]:
    kept = iter(outcome.texts.to_pylist())
    return [(test, next(kept) if test is None else None) for test in outcome.test.to_pylist()]


def assert_equal_to_plain(rule: RuleConfig, texts: list[str]) -> None:
    fast = judgements(apply(rule, texts))
    for text, (test, rewritten) in zip(texts, fast, strict=True):
        plain_test, plain_text = judge(text, rule)
        assert (test, rewritten) == (plain_test, None if plain_test else plain_text), repr(
            text[:300]
        )


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_equal_on_adversarial_texts(rule: RuleConfig) -> None:
    assert_equal_to_plain(rule, ADVERSARIAL)


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_equal_on_random_texts(rule: RuleConfig) -> None:
    assert_equal_to_plain(rule, [random_text(seed) for seed in range(150)])


@pytest.mark.parametrize(
    "name", ["repetition", "quality", "c4", "c4-datatrove", "c4-fineweb", "fineweb"]
)
def test_equal_on_pages_of_the_sample_crawl(name: str) -> None:
    assert_equal_to_plain(RULES[name], sample_pages())


def test_every_test_of_every_rule_decides_somewhere() -> None:
    texts = ADVERSARIAL + [random_text(seed) for seed in range(150)] + sample_pages()
    seen = {
        (name.split("-")[0], test)
        for name, rule in RULES.items()
        for test in apply(rule, texts).test.to_pylist()
    }
    tests = {test for kind, test in seen if kind == "repetition" and test}
    assert len(tests) == 1 + 4 + 3 + 6
    assert {test for kind, test in seen if kind == "quality" and test} == {
        "words", "mean word length", "hash signs per word", "ellipses per word", "stop words",
        "share of lines that start with a bullet", "share of lines that end with an ellipsis",
        "share of words with a letter",
    }  # fmt: skip
    assert {test for kind, test in seen if kind == "c4" and test} == {
        "sentences",
        "lorem ipsum",
        "curly bracket",
    }
    assert len({test for kind, test in seen if kind == "fineweb" and test}) == 5
