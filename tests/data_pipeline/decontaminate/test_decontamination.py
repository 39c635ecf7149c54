"""Laws of decontamination: matches by the plain definition, common speech decides nothing, cuts
keep the rest.
"""

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pydantic import ValidationError

from llmsys.config.decontamination import EvaluationSetConfig, NgramDecontaminationConfig
from llmsys.data_pipeline.decontaminate.contamination_report import cut_spans, merge_spans
from llmsys.data_pipeline.decontaminate.evaluation_index import EvaluationIndex
from llmsys.data_pipeline.decontaminate.evaluation_items import (
    EvaluationItem,
    extract_item_ngrams,
    read_items,
)
from llmsys.data_pipeline.decontaminate.ngram_index import (
    NAMED_ITEMS,
    read_item_names,
    write_ngram_index,
)
from llmsys.data_pipeline.stages.find_contamination import filter_matches, write_matches
from llmsys.data_pipeline.text.word_hashes import WordHasher
from llmsys.dataset.token_shards import ArrowFileWriter, read_batches
from llmsys.errors import DataError
from tests.reference.filters import find_ngram_matches

TEXT = (
    "the river stone 3.14 Café state-of-the-art don't walks 中文 under bridges every 12,5 morning "
    "(quiet) while"
)
WORDS = TEXT.split()
TEXT_SCHEMA = pa.schema([("id", pa.string()), ("url", pa.string()), ("text", pa.large_string())])


def ignore(amount: float, dropped: int) -> None:
    pass


def sentences(choose: random.Random, shortest: int, longest: int) -> str:
    return " ".join(choose.choices(WORDS, k=choose.randint(shortest, longest)))


def write_set(folder: Path, rows: list[dict[str, Any]], name: str = "set.jsonl") -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    (folder / name).write_bytes(packed.get(Path(name).suffix, bytes)(data))
    return folder / name


def config(path: Path, **options: Any) -> NgramDecontaminationConfig:
    fields = {
        "name": "set",
        "files": [path],
        "query_fields": ["question"],
        **options.pop("set", {}),
    }
    return NgramDecontaminationConfig.model_validate({"sets": [fields], **options})


def index(folder: Path, rules: NgramDecontaminationConfig) -> tuple[Path, Path, dict[str, Any]]:
    grams, items = folder / "grams.arrow", folder / "items.arrow"
    fuzzy = folder / "fuzzy.arrow"
    return (
        grams,
        items,
        write_ngram_index(ignore, grams=grams, items=items, config=rules, fuzzy=fuzzy),
    )


def matches(
    folder: Path, rules: NgramDecontaminationConfig, texts: list[str]
) -> tuple[list[dict[str, Any]], EvaluationIndex, Path]:
    """The matches that decide, with the index that names them."""
    grams, items, _ = index(folder, rules)
    rows = [{"id": str(number), "url": "", "text": text} for number, text in enumerate(texts)]
    with ArrowFileWriter(folder / "texts.arrow", TEXT_SCHEMA) as writer:
        for first in range(0, len(rows), 7):
            writer.write(pa.RecordBatch.from_pylist(rows[first : first + 7], TEXT_SCHEMA))
    write_matches(
        ignore,
        source=folder / "texts.arrow",
        output=folder / "found.arrow",
        index=grams,
        digest=f"{folder} {rules}",
        fuzzy=get_fuzzy_file(folder, rules),
    )
    filter_matches(
        ignore,
        sources=[folder / "found.arrow"],
        output=folder / "decided.arrow",
        max_documents=rules.max_documents,
    )
    decided = next(read_batches(folder / "decided.arrow")).to_pylist()
    index_of_items = EvaluationIndex(grams, get_fuzzy_file(folder, rules))
    return [match for match in decided if not match["spared"]], index_of_items, items


def get_fuzzy_file(folder: Path, rules: NgramDecontaminationConfig) -> Path | None:
    return None if rules.fuzzy.kind == "none" else folder / "fuzzy.arrow"


def test_matches_equal_their_plain_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmsys.data_pipeline.stages.find_contamination._SLICE_CHARACTERS", 500)
    choose = random.Random(0)
    items = [sentences(choose, 2, 12) for _ in range(60)]
    texts = [sentences(choose, 0, 30) for _ in range(20)]
    texts += [
        f"{sentences(choose, 0, 9)}, {choose.choice(items).upper()}! {sentences(choose, 0, 9)}"
        for _ in range(40)
    ]
    rules = config(
        write_set(tmp_path, [{"question": item} for item in items]),
        ngram_words=5,
        min_item_words=3,
        max_documents=0,
    )
    found, grams, names = matches(tmp_path, rules, texts)
    # each character of a script without spaces is a word
    items = [item.replace("中文", "中 文") for item in items]
    plain = [find_ngram_matches(text.replace("中文", "中 文"), items, 5, 3) for text in texts]
    for row, expected in enumerate(plain):
        own = [match for match in found if match["row"] == row]
        assert len({match["gram"] for match in own}) == len({gram for _, gram in expected})
        _, held, _ = grams.get_items(np.array([match["gram"] for match in own], np.int64))
        named = {
            int(one["item"].split(":")[1]) - 1
            for one in read_item_names(names).take(pa.array(held)).to_pylist()
        }
        assert named == {item for item, _ in expected}
        for match in own:
            words = WordHasher().hash_words([texts[row][match["begin"] : match["end"]]])
            assert len(words.hashes) >= grams.get_words(np.array([match["gram"]]))[0]
    assert sum(map(len, plain)) > 60


def test_of_items_with_the_same_words_the_first_of_each_set_are_named(tmp_path: Path) -> None:
    twins = [{"question": "the river (stone) walks under bridges"}] * 6
    sets = [
        {
            "name": name,
            "files": [write_set(tmp_path, twins[:count], f"{name}.jsonl")],
            "query_fields": ["question"],
        }
        for name, count in (("a", 6), ("b", 2))
    ]
    rules = NgramDecontaminationConfig.model_validate({"sets": sets, "ngram_words": 5})
    found, grams, names = matches(tmp_path, rules, ["so THE river, stone walks under bridges!"])
    which, held, parts = grams.get_items(np.array([match["gram"] for match in found]))
    named = [
        (one["set"], one["item"]) for one in read_item_names(names).take(pa.array(held)).to_pylist()
    ]
    first = [("a", f"a.jsonl:{n}") for n in range(1, NAMED_ITEMS + 1)] + [
        ("b", "b.jsonl:1"),
        ("b", "b.jsonl:2"),
    ]
    assert named == first * 2
    assert which.tolist() == [0] * len(first) + [1] * len(first)
    assert set(parts.tolist()) == {0}


def test_parts_give_the_ngrams_that_their_names_say() -> None:
    item = EvaluationItem("one", ["a b c d e"], ["f g h i j", "k"])
    rules = config(Path("set"), ngram_words=4, min_item_words=2)

    def texts_of(part: str) -> set[str]:
        chosen = rules.model_copy(update={"parts": (part,)})
        wanted = {
            one
            for grams in extract_item_ngrams(item, chosen, WordHasher())[0]
            for one in grams.hashes.tolist()
        }
        letters = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
        runs = [" ".join(letters[start : start + 4]) for start in range(7)] + ["c d e k", "k"]
        return {run for run in runs if set(_grams(run)) & wanted}

    def _grams(run: str) -> list[int]:
        one = EvaluationItem("", [run], [])
        return [
            h
            for grams in extract_item_ngrams(one, rules, WordHasher())[0]
            for h in grams.hashes.tolist()
        ]

    assert texts_of("query") == {"a b c d", "b c d e"}
    assert texts_of("label") == {"f g h i", "g h i j"}
    assert texts_of("overlap") == {"c d e f", "d e f g", "e f g h", "c d e k"}
    assert extract_item_ngrams(item, rules, WordHasher())[1] == 1  # the label k


def test_an_ngram_of_too_many_documents_decides_nothing(tmp_path: Path) -> None:
    common, rare = "all work and no play makes one dull", "seven grey geese flew over a frozen lake"
    path = write_set(tmp_path, [{"question": common}, {"question": rare}])
    texts = [f"{common} number {n}" for n in range(4)] + [f"{rare}. {rare}. {rare}."]
    for limit, rows in (
        (2, [4, 4, 4]),
        (3, [4, 4, 4]),
        (4, [0, 1, 2, 3, 4, 4, 4]),
        (0, [0, 1, 2, 3, 4, 4, 4]),
    ):
        folder = tmp_path / str(limit)
        folder.mkdir()
        found, _, _ = matches(folder, config(path, max_documents=limit), texts)
        assert [match["row"] for match in found] == rows


def test_a_cut_takes_the_margin_and_short_pieces_and_keeps_the_rest() -> None:
    begin, middle, end = "begin " * 60, "MATCH HERE", " end" * 60
    text = f"{begin}{middle}{end}"
    place = (len(begin), len(begin) + len(middle))
    rules = config(Path("set"), margin_characters=13, min_piece_characters=50)
    cut = cut_spans(text, [place], rules)
    assert cut.text == f"{'begin ' * 57}".strip() + "\n\n" + (" end" * 56).strip()
    assert "MATCH" not in cut.text
    assert (
        cut_spans(text, [place], rules.model_copy(update={"min_piece_characters": 300})).pieces == 1
    )
    assert (
        cut_spans(text, [place], rules.model_copy(update={"margin_characters": 9_999})).failure
        == "nothing left"
    )
    places = [(start, start + 5) for start in range(0, 360, 60)]
    many = cut_spans(
        text, places, rules.model_copy(update={"min_piece_characters": 1, "max_pieces": 3})
    )
    assert (many.failure, many.pieces) == ("pieces", 6)
    assert not cut_spans(
        text, places, rules.model_copy(update={"min_piece_characters": 1, "max_pieces": 6})
    ).failure
    assert merge_spans("x" * 50, [(10, 40), (12, 15)], 1) == [(9, 41)]
    assert cut_spans("x" * 1_000, [(400, 500)], rules).text == "x" * 387 + "\n\n" + "x" * 487


@pytest.mark.parametrize("name", ["set.jsonl", "set.jsonl.gz", "set.jsonl.zst"])
def test_items_are_read_with_nested_fields_and_lists(tmp_path: Path, name: str) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "q7", "a": {"text": ["one", "two"]}, "question": "why"},
        {"id": 8, "a": {"text": []}, "question": 5},
    ]
    one = EvaluationSetConfig(
        name="x",
        files=(write_set(tmp_path, rows, name),),
        query_fields=("question",),
        label_fields=("a.text",),
        id_field="id",
    )
    assert list(read_items(one)) == [
        EvaluationItem("q7", ["why"], ["one", "two"]),
        EvaluationItem("8", ["5"], []),
    ]


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = write_set(tmp_path, [{"question": "too short"}, {"prompt": "x"}])
    with pytest.raises(
        DataError,
        match=rf"set, {path}, line 2: no field 'question'; its fields are prompt\. Correct",
    ):
        index(tmp_path, config(path))
    path = write_set(tmp_path, [{"question": "too short"}])
    with pytest.raises(
        DataError,
        match=r"no item of set has 5 words \(data\.decontaminate\.min_item_words\)\. Lower it",
    ):
        index(tmp_path, config(path))
    path.write_text("{")
    with pytest.raises(
        DataError, match=rf"{path}, line 1: not JSON .* Give a file with one JSON object per line\."
    ):
        index(tmp_path, config(path))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    with pytest.raises(DataError, match=r"evaluation file .*cut\.gz cannot be read: it is damaged"):
        index(tmp_path, config(tmp_path / "cut.gz"))
    with pytest.raises(ValidationError, match="query_fields and label_fields are both empty"):
        EvaluationSetConfig(name="x", files=(path,))


HIDDEN = (
    "The seven exemplary grey geese never flew over any frozen state-of-the-art lake before sunrise"
)


@pytest.mark.parametrize(
    "disguise",
    [
        "\u200b".join(HIDDEN),
        HIDDEN.replace("e", "e\u00ad").replace("a", "a\u2060"),
        HIDDEN.replace("exem", "exem\u00ad\n")
        .replace("fro", "fro-\r\n   ")
        .replace("state-", "state-\n"),
        HIDDEN.replace("exem", "exem- ").replace("be", "be\u2010\n"),
        HIDDEN.replace("geese", "ge-\u200b\nese")
        .replace("never", "nev-\ner")
        .replace("any", "an-\ny"),
        HIDDEN.translate({code: code + 0xFEE0 for code in range(0x21, 0x7F)}),
        HIDDEN.replace("fl", "\ufb02").replace("s", "\u017f"),
        HIDDEN.replace(" ", "\ufeff \u200e"),
        "".join(chr(0x1D400 + ord(one) - 65) if one.isupper() else one for one in HIDDEN),
    ],
)
def test_what_a_reader_does_not_see_hides_no_item(tmp_path: Path, disguise: str) -> None:
    noise = "Before it all there stands a long and winding sentence of other words -- and after it "
    pairs: list[tuple[str, str]] = [(HIDDEN, disguise), (disguise, HIDDEN)]
    for item, text in pairs:
        rules = config(write_set(tmp_path, [{"question": item}]))
        found, _, _ = matches(tmp_path, rules, [noise, f"{noise}{text} {noise}"])
        words = len(HIDDEN.replace("-", " ").split())
        assert {match["row"] for match in found} == {1}
        assert len({match["gram"] for match in found}) >= words - 12
        assert min(match["begin"] for match in found) == len(noise)
        assert max(match["end"] for match in found) <= len(noise) + len(text) + 1


def test_a_half_width_word_of_a_script_without_spaces_is_found_by_its_characters(
    tmp_path: Path,
) -> None:
    path = write_set(tmp_path, [{"question": "カタカナノブンショウ"}])
    found, _, _ = matches(
        tmp_path, config(path), ["xx ｶﾀｶﾅﾉﾌﾞﾝｼｮｳ yy", "カタカナ\u200bノブンショウ"]
    )
    assert {match["row"] for match in found} == {0, 1}
