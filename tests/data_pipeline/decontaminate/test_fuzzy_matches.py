"""Laws of fuzzy matches: changed words hide no item, and what only resembles one is none."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from llmsys.config.decontamination import CoverageFuzzyMatchConfig
from llmsys.data_pipeline.decontaminate.contamination_report import ContaminationJudge
from llmsys.data_pipeline.decontaminate.fuzzy_index import FuzzyIndex, FuzzyParts
from llmsys.data_pipeline.stages.find_contamination import DECIDED_SCHEMA
from llmsys.data_pipeline.text.word_hashes import WordHasher
from llmsys.errors import DataError
from tests.data_pipeline.decontaminate.test_decontamination import (
    config,
    index,
    matches,
    write_set,
)
from tests.reference.filters import measure_item_shares

SEED = 3
LETTERS = "bcdfghjklmnprstvw"


def make_words(choose: random.Random, count: int) -> list[str]:
    """Pronounceable words; few of them are frequent, as in a language."""
    made = ["".join(choose.choices(LETTERS, k=choose.randint(2, 5))) for _ in range(2_000)]
    return choose.choices(made, [1 / (rank + 3) for rank in range(len(made))], k=count)


def replace_words(text: str, every: int) -> str:
    words = text.split()
    for place in range(every - 1, len(words), every):
        words[place] = f"other{place}"
    return " ".join(words)


def find_items(folder: Path, items: list[str], texts: list[str], **options: Any) -> set[Any]:
    """(row, item) of the fuzzy matches that decide."""
    rules = config(
        write_set(folder, [{"question": item} for item in items]),
        fuzzy={"kind": "coverage", **options},
    )
    found, held, _ = matches(folder, rules, texts)
    found = [match for match in found if match["share"]]
    which, named, _ = held.get_items(np.array([match["gram"] for match in found], np.int64))
    return {(found[at]["row"], item) for at, item in zip(which, named, strict=True)}


@pytest.mark.parametrize("every", [10, 7, 5])
def test_items_with_replaced_words_are_found_and_other_texts_are_not(
    tmp_path: Path, every: int
) -> None:
    choose = random.Random(SEED)
    items = [" ".join(make_words(choose, choose.randint(30, 90))) for _ in range(25)]
    around = [" ".join(make_words(choose, 400)) for _ in range(50)]
    texts = [
        f"{around[number]} {replace_words(item, every)} {around[number + 25]}"
        for number, item in enumerate(items)
    ]
    found = find_items(tmp_path, items, [*texts, *around])
    assert found == {(number, number) for number in range(25)}


@pytest.mark.parametrize("min_share", [0.3, 0.5, 0.75])
def test_passages_equal_their_plain_twin(tmp_path: Path, min_share: float) -> None:
    choose = random.Random(SEED)
    vocabulary = "abcdefghijklmn"

    def make(shortest: int, longest: int) -> str:
        return " ".join(choose.choices(vocabulary, k=choose.randint(shortest, longest)))

    items = [make(4, 25) for _ in range(40)]
    items += items[:2]
    texts = [make(0, 60) for _ in range(15)]
    texts += [
        f"{make(0, 20)} {replace_words(choose.choice(items), choose.randint(3, 9))} {make(0, 20)}"
        for _ in range(30)
    ]
    found = find_items(tmp_path, items, texts, min_share=min_share, min_item_words=6)
    first = {number: items.index(item) for number, item in enumerate(items)}
    plain = {
        (row, item)
        for row, text in enumerate(texts)
        for item, share in measure_item_shares(text, items, 3, 6).items()
        if share >= min_share - 1e-9
    }
    assert {(row, first[item]) for row, item in found} == plain
    assert len(plain) > 10


def test_the_words_of_an_item_scattered_over_a_long_text_are_no_match(tmp_path: Path) -> None:
    choose = random.Random(SEED)
    item = make_words(choose, 60)
    pieces = [" ".join(item[start : start + 6]) for start in range(0, 60, 6)]
    far = f" {' '.join(make_words(choose, 40))} ".join(pieces)
    near = " other words ".join(pieces)
    assert find_items(tmp_path, [" ".join(item)], [far, near]) == {(1, 0)}


def test_a_passage_of_two_texts_is_no_match(tmp_path: Path) -> None:
    item = make_words(random.Random(SEED), 40)
    halves = [" ".join(item[:20]), " ".join(item[20:])]
    assert find_items(tmp_path, [" ".join(item)], [*halves, " ".join(item)]) == {(2, 0)}


def test_common_ngrams_of_items_do_not_count(tmp_path: Path) -> None:
    choose = random.Random(SEED)
    opening = "write a function that takes a list of numbers and returns one of them so that"
    items = [f"{opening} {' '.join(make_words(choose, 9))}" for _ in range(12)]
    texts = [f"{opening} {' '.join(make_words(choose, 9))}", replace_words(items[4], 10)]
    assert find_items(tmp_path, items, texts, min_item_words=5) == {(1, 4)}


def test_a_match_gives_place_share_and_reason(tmp_path: Path) -> None:
    item = make_words(random.Random(SEED), 40)
    rules = config(write_set(tmp_path, [{"question": " ".join(item)}]), fuzzy={"kind": "coverage"})
    changed = " ".join([*item[:10], "x", "y", *item[12:]])
    text = f"Before it. {changed} After it. {' word' * 60} {changed}"
    found, held, names = matches(tmp_path, rules, [text, "nothing"])
    found = [match for match in found if match["share"]]
    assert [text[match["begin"] : match["end"]] for match in found] == [changed, changed]
    assert [match["share"] for match in found] == pytest.approx([38 / 40] * 2)
    document = {"id": "1", "url": "u", "text": text}
    batch = pa.RecordBatch.from_pylist(found, DECIDED_SCHEMA)
    result = ContaminationJudge(rules, held, names).judge_document(document, batch)
    assert result.verdict is not None
    assert result.verdict[3].startswith(
        "decontaminate: matches 2 > 0 (set set.jsonl:1, 95% of its words: '"
    )
    (row,) = result.rows
    assert (row["item"], row["share"], row["matches"], row["words"]) == ("set.jsonl:1", 0.95, 2, 40)


def test_an_item_in_more_documents_than_allowed_is_spared(tmp_path: Path) -> None:
    item = " ".join(make_words(random.Random(SEED), 40))
    texts = [f"{replace_words(item, 8)} {number}" for number in range(3)]
    for limit, rows in ((2, set()), (3, {0, 1, 2}), (0, {0, 1, 2})):
        folder = tmp_path / str(limit)
        folder.mkdir()
        rules = config(
            write_set(folder, [{"question": item}]),
            fuzzy={"kind": "coverage"},
            max_documents=limit,
        )
        found, _, _ = matches(folder, rules, texts)
        assert {match["row"] for match in found} == rows


def test_parts_that_only_exact_ngrams_find_are_counted_and_a_set_of_them_is_named(
    tmp_path: Path,
) -> None:
    words = make_words(random.Random(SEED), 60)
    rows = [{"question": " ".join(words[:12])}, {"question": " ".join(words[20:33])}]
    rules = config(write_set(tmp_path, rows), fuzzy={"kind": "coverage"})
    assert index(tmp_path, rules)[2]["sets"]["set"]["only_exact"] == 1
    rules = config(write_set(tmp_path, rows[:1]), fuzzy={"kind": "coverage"})
    with pytest.raises(
        DataError,
        match=r"no query or label .* has 13 words in n-grams that count "
        r"\(data\.decontaminate\.fuzzy\.min_item_words\)\. Lower it",
    ):
        index(tmp_path, rules)


def test_an_item_that_repeats_words_costs_no_more_than_ten_places(tmp_path: Path) -> None:
    parts = FuzzyParts(CoverageFuzzyMatchConfig(min_item_words=5), 4)
    hasher = WordHasher()
    repeated = "0 " * 5_000 + "and the end of it is here"
    parts.add_part(0, 0, 0, hasher.hash_words([repeated]).hashes)
    assert not parts.write(tmp_path / "fuzzy.arrow")
    held = FuzzyIndex(tmp_path / "fuzzy.arrow")
    found = held.find_passages(hasher.hash_words(["1 " * 5_000, "2 2 and the end of it is here"]))
    assert found.first.tolist() == [5_000]
    assert found.share.tolist() == [1]
