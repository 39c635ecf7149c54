"""Words and sentences equal spaCy's on whole texts, although every chunk is split only once."""

import random

import numpy as np
import pytest
from spacy.lang.char_classes import UNITS
from spacy.symbols import IDS

from llmsys.data_pipeline.text.ragged_arrays import compute_chunk_spans, join_without_whitespace
from llmsys.data_pipeline.text.spacy_tokenizer import (
    LONGEST_CHUNK,
    LONGEST_PLAIN_CHUNK,
    SpacyTokenizer,
)
from llmsys.data_pipeline.text.word_cache import ChunkHashTable
from llmsys.data_pipeline.text.word_columns import WordSplitter
from tests.reference.rules import split_english_words, split_sentences, split_words

pytestmark = pytest.mark.usefixtures("either_core")

CHUNKS = [
    "word", "Word,", "(word)", '"word."', "don't", "I'm", "A.", "ab.", "Ab.", "AB.", "U.S.", "e.g.",
    "vs.",
    "a.m.", "10am", "10km", "$5.00", "1,000", "a-b", "a/b", "--", "...", "…", "::", ":)", "):",
    "'(", "(-:",
    "XD", "xD", "C++", "dont.", "(cant", "cannot,", "gonna)", "'em", "'tis", "o'clock",
    "rock'n'roll", "it’s",
    "l’eau", "https://a.org/b?c=d", "a@b.org", "#tag", "@name", "foo_bar", "x=y", "中文。", "naïve.",
    "Ünder,",
    "3.14", "3.", "(3)", "[4]", "]x[", "\u200b", "😀", "😀😀x", "Mr.", "Id.", "id.", "Ill.", "Ill,",
    "ill.", "co.",
    "co", "(co.)", "im.", "Ima)", "C.", "km.", "5km.", "word...", "word!!", "IS_ALPHA", "NORM",
    "O….tk{_", "m—S”’.os", "a–b.com", "(ಠ_ಠ)…”", "10.0.0.1:80/x",
]  # fmt: skip


def split(texts: list[str], splitter: WordSplitter | None = None) -> list[list[str]]:
    columns = (splitter or WordSplitter()).split_words(texts)
    get_word = columns.vocabulary.get_word
    return [
        [get_word(word) for word in columns.ids_W[start:end].tolist()]
        for start, end in zip(columns.offsets[:-1], columns.offsets[1:], strict=True)
    ]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_words_of_a_chunk_equal_spacy(chunk: str) -> None:
    assert SpacyTokenizer().split_words([chunk]) == [split_words(chunk)]


def test_plain_chunks_around_every_special_case_equal_spacy() -> None:
    special = [
        word for word in split_english_words().tokenizer.rules if word.isascii() and word.isalpha()
    ]
    chunks = [
        pattern % word
        for word in special
        for pattern in ("%s", "%s,", "%s.", "(%s", "(%s)", '"%s"', "x%s", "%s!")
    ]
    assert SpacyTokenizer().split_words(chunks) == [split_words(chunk) for chunk in chunks]


def test_random_chunks_of_marks_units_exceptions_and_addresses_equal_spacy() -> None:
    """Two in three are decided without spaCy, by `EnglishRules`."""
    source = random.Random(0)
    exceptions = sorted(
        name for name in split_english_words().tokenizer.rules if not any(map(str.isspace, name))
    )
    marks = list(".,:;!?()[]{}<>_#*&'\"`“”‘’…–—%=$+-~^/@|\\")
    parts = [
        *marks,
        *"abmgSTUC0199" * 4,
        "km",
        "US$",
        "'s",
        "http://",
        "www.",
        "ab.com",
        "é",
        "中",
        "²",
        *exceptions,
    ]
    chunks = ["".join(source.choices(parts, k=source.randint(1, 7))) for _ in range(4_000)]
    chunks += [
        "".join(source.choices(parts[: -len(exceptions)], k=source.randint(1, 9)))
        for _ in range(4_000)
    ]
    units = [unit for unit in [*UNITS.split("|"), "US$", "A$", "$", "+"] if unit.isascii()]
    chunks += [
        f"{before}{unit}{after}"
        for unit in units
        for before in ("5", "x5", "a")
        for after in ("", ".", ")")
    ]
    assert SpacyTokenizer().split_words(chunks) == [split_words(chunk) for chunk in chunks]


def test_names_of_spacy_symbols_break_no_later_text() -> None:
    chunks = SpacyTokenizer()
    for name in IDS:
        if name:
            assert "".join(chunks.split_words([f"{name}."])[0]) == f"{name}."
    for start in range(0, 3_000, 100):
        numbers = [f"x{number}-y" for number in range(start, start + 100)]
        assert chunks.split_words(numbers) == [[number[:-2], "-", "y"] for number in numbers]


def test_words_of_texts_equal_spacy() -> None:
    source = random.Random(0)
    spaces = [" ", " ", " ", "\n", "\n\n", "  ", "\t", "\u00a0", "\x85", " \n "]
    # emoticons may reach over a space
    plain = [chunk for chunk in CHUNKS if not any(mark in chunk for mark in ":()'")]
    texts = [
        "".join(source.choice(plain) + source.choice(spaces) for _ in range(60)) for _ in range(40)
    ]
    assert split(texts) == [split_words(text) for text in texts]


def test_sentences_of_lines_equal_spacy() -> None:
    source = random.Random(1)
    parts = [
        "word",
        "Word.",
        "end!",
        "?",
        "...",
        "…",
        "(aside.)",
        '"quoted."',
        "e.g.",
        "。",
        "1.",
        "--",
        "A.",
    ]
    spaces = [" ", " ", " ", "  ", "\t", "\u00a0", " \u00a0", "\u3000"]
    lines = [
        "".join(source.choice(parts) + source.choice(spaces) for _ in range(source.randint(0, 12)))
        for _ in range(400)
    ]
    lines += ["", " ", "  ", "a.  ", " a. b"]
    counted = WordSplitter().compute_line_columns(lines, [[line] for line in lines])
    assert counted.sentences_L.tolist() == [len(split_sentences(line)) for line in lines]


def test_chunks_and_lines_in_bytes_are_those_of_str_split_and_splitlines() -> None:
    source, splitter = random.Random(0), WordSplitter()
    spaces = [chr(point) for point in range(0x3001) if chr(point).isspace()]
    parts = [
        *spaces,
        *spaces,
        "\r\n",
        "\n",
        " ",
        " ",
        "  ",
        *"ab.!éÂ中😀\0",
        "—",
        "‰",
        "ab",
        "y" * 15,
        "z" * 16,
        "word.",
    ]
    for _ in range(600):
        texts = [
            "".join(source.choices(parts, k=source.randint(0, 30)))
            for _ in range(source.randint(0, 4))
        ]
        spans, chunks = compute_chunk_spans(texts), [text.split() for text in texts]
        assert spans.chunks_per_text.tolist() == list(map(len, chunks))
        assert spans.decode_chunks(np.arange(len(spans.starts_C))) == [
            chunk for one in chunks for chunk in one
        ]
        assert join_without_whitespace(texts) == "".join("".join(one) for one in chunks).encode()
        lines = [text.splitlines() for text in texts]
        found, each = (
            splitter.compute_line_columns(texts, lines),
            [line for one in lines for line in one],
        )
        assert found.chunks_L.tolist() == [len(line.split()) for line in each]
        assert found.words_L.tolist() == splitter.split_words(each).counts.tolist()
        assert (
            found.sentences_L.tolist()
            == splitter.compute_line_columns(each, [[line] for line in each]).sentences_L.tolist()
        )


def test_the_table_gives_every_chunk_one_number_of_its_own() -> None:
    table, memo, source = ChunkHashTable(), dict[tuple[int, int], int](), np.random.default_rng(0)
    for size in (1, 3, 40_000, 40_000):
        low, high = source.integers(0, 500, (2, size), np.uint64) << np.uint64(40)
        numbers, new = table.find_or_insert(low, high, len(memo))
        pairs = list(zip(low.tolist(), high.tolist(), strict=True))
        for row in new.tolist():
            assert memo.setdefault(pairs[row], len(memo)) == len(memo) - 1
        assert numbers.tolist() == [memo[pair] for pair in pairs]


def test_the_memo_is_bounded_and_forgets_without_a_trace() -> None:
    by_text, by_line = WordSplitter(memo_chunks=50), WordSplitter(memo_chunks=50)
    for start in range(0, 1000, 20):
        texts = [
            f"word{number} and state-of-the-art number {number}."
            for number in range(start, start + 20)
        ]
        assert split(texts, by_text) == split(texts)
        lines = [[text] for text in texts]
        words = by_line.compute_line_columns(texts, lines).words_L
        assert words.tolist() == WordSplitter().compute_line_columns(texts, lines).words_L.tolist()
        chunks = [len(splitter._compiled or splitter._memory) for splitter in (by_text, by_line)]
        assert max(chunks) <= 50 + 2 * 20 + 10


@pytest.mark.parametrize(
    "chunk", ["_" * (LONGEST_CHUNK + 1), "a1" * LONGEST_PLAIN_CHUNK, "(" * 10_000]
)
def test_overlong_chunks_are_cut_so_that_they_end(chunk: str) -> None:
    words = SpacyTokenizer().split_words([chunk])[0]
    assert "".join(words) == chunk
    assert max(map(len, words)) <= 200
