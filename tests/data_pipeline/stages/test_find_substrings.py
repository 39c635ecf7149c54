"""Laws of taking repeated parts out: equal to the plain twins, first copies stay, whatever the
files and the ranges.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import spacy

from llmsys.config.deduplication import LineDedupConfig, ParagraphDedupConfig, SentenceDedupConfig
from llmsys.data_pipeline.dedup.text_segments import (
    SentenceSplitter,
    remove_segment_runs,
    split_segments,
)
from tests.helpers.deduplication import build_document, deduplicate_documents
from tests.reference import repeated_text as plain

NOTHING: dict[str, Any] = {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}
RANGES: list[tuple[int, dict[str, Any]]] = [
    (1, {"kind": "sorted"}),
    (3, {"kind": "sorted", "keys_per_task": 400}),
    (2, {"kind": "bloom"}),
]
WORDS = ["the", "River", "ran", "3,000", "stones", "don't", "(see", "it)", "café", "Über"]
SENTENCES = [
    'Plain words. Then more.\nA new line! And why? (Because.) "Said." ... Five.',
    " leads. White  space.\n\n\nParagraph... trails. ",
    "One.Two three.four U.S. e.g. Mr. A? B!!  C。 D॥E",
    "x.\n",
    "",
    " ",
    "\n",
]


def made_texts(seed: int, separator: str, parts: int) -> list[str]:
    """Texts of parts, of which some are drawn from a small pool."""
    choose = random.Random(seed)
    pool = [" ".join(choose.choices(WORDS, k=choose.randrange(1, 7))) + "." for _ in range(90)]
    return [separator.join(choose.choices(pool, k=choose.randrange(1, parts))) for _ in range(25)]


def test_sentences_and_words_are_those_of_spacy() -> None:
    nlp = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    texts = [*SENTENCES, *made_texts(5, " ", 9)]
    for _ in range(2):
        for text, found in zip(texts, SentenceSplitter().find_boundaries(texts), strict=True):
            assert found.ends == [end for _, end in plain.find_sentence_spans(text, nlp)]
            assert found.words == sum(1 for token in nlp(text) if token.text.strip())


@pytest.mark.parametrize(
    ("config", "separator"),
    [
        (ParagraphDedupConfig(min_words=3, min_sentences=1), "\n \n"),
        (LineDedupConfig(min_words=3, min_sentences=1, min_characters=9), "\n"),
        (SentenceDedupConfig(min_words=8, min_sentences=2, sentences=2), " "),
    ],
    ids=["paragraphs", "lines", "sentences"],
)
def test_spans_equal_the_plain_twin_in_any_order(
    tmp_path: Path, config: Any, separator: str
) -> None:
    texts = made_texts(1, separator, 12)
    length = getattr(config, "sentences", 1)
    units = split_segments(texts, config)
    places = plain.find_later_places([found.keys for found in units])
    expected = {}
    for number, (text, found, first) in enumerate(zip(texts, units, places, strict=True)):
        left = remove_segment_runs(text, found, first, length) if first else text
        ends, words = SentenceSplitter().find_boundaries([left])[0]
        if left == text or (
            left and words >= config.min_words and len(ends) >= config.min_sentences
        ):
            expected[f"{number:032x}"] = left
    assert 5 < len(expected) < len(texts), len(expected)
    rows = [build_document(f"{number:032x}", text) for number, text in enumerate(texts)]
    for files, keys in RANGES:
        random.Random(files).shuffle(rows)
        asked = NOTHING | {
            "repeated_segments": config.model_dump(),
            "key_filter": {**keys, "keys_per_task": 40},
        }
        kept, gone = deduplicate_documents(tmp_path / str(files), rows, asked, files)
        assert {row["id"]: row["text"] for row in kept} == expected
        assert {row["stage"] for row in gone} == {"repeated_segments"}
        assert all(
            row["value"] < row["threshold"] and row["reason"].endswith(f"< {row['threshold']:g}")
            for row in gone
            if row["test"] != "empty"
        )
        removed = {row["id"]: row["repeated_segments.removed_characters"] for row in kept}
        assert all(
            removed[row["id"]] == len(row["text"]) - len(expected[row["id"]])
            for row in rows
            if row["id"] in removed
        )


@pytest.mark.parametrize("seed", range(2))
def test_strings_equal_a_suffix_array_of_the_whole_corpus(tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    pieces = ["".join(choose.choices("abcé 文\n", k=choose.randrange(10, 70))) for _ in range(12)]
    texts = ["".join(choose.choices(pieces, k=choose.randrange(1, 6))) for _ in range(14)]
    texts += ["a" * 61, "ab" * 40, "short", "b" * 20]
    expected = plain.cut_repeated_strings(texts, 20)
    rows = [build_document(f"{number:032x}", text) for number, text in enumerate(texts)]
    for files, keys in RANGES:
        random.Random(files).shuffle(rows)
        asked = NOTHING | {
            "substring": {"kind": "substring", "min_characters": 20, "min_words": 0},
            "key_filter": keys,
        }
        kept, gone = deduplicate_documents(tmp_path / f"{seed}{files}", rows, asked, files)
        found = {row["id"]: row["text"] for row in kept} | {row["id"]: "" for row in gone}
        touched = {number for number, text in enumerate(texts) if expected[number] != text.strip()}
        assert [found[f"{n:032x}"] for n in sorted(touched)] == [
            expected[n] for n in sorted(touched)
        ]
        assert all(found[f"{n:032x}"] == texts[n] for n in range(len(texts)) if n not in touched)
        assert {row["reason"] for row in gone} <= {"duplicate_substrings: nothing is left"}
        assert len(touched) > 5
