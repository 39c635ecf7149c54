"""Chinese pages by configs/data/chinese.yaml: prose stays, a bad page goes for a reason with value
and threshold.

The prose is the beginning of a novel of the 14th century (public domain), see tests/data/README.md.
"""

import random
import re

import pyarrow as pa
import pytest

from llmsys.config.deduplication import MinHashDedupConfig
from llmsys.config.loading.load import load_run_config
from llmsys.data_pipeline.core.funnel import format_reason
from llmsys.data_pipeline.dedup.minhash import MinHasher
from llmsys.data_pipeline.language.identify import compute_keep_mask, identify_languages
from llmsys.data_pipeline.language.rules_by_language import serialize_rules_by_language
from llmsys.data_pipeline.rules.language_chains import get_language_chains
from llmsys.data_pipeline.text.word_tokenizers import insert_spaces
from tests.helpers.paths import TEST_DATA

DATA = load_run_config("data/chinese").data
NOVEL = (TEST_DATA / "text" / "zh_novel.txt").read_text(encoding="utf-8").strip()
LINES = NOVEL.split("\n")
PAGES = ["\n".join(LINES[start : start + 4]) for start in range(0, len(LINES) - 3, 4)]
NAMES = "玄德 关公 张飞 曹操 董卓 袁绍 刘备 孙坚 吕布 何进 张让 卢植 丁原 李儒".split()  # noqa: SIM905
SIMPLE = "国时为后会来这个们说对与于长见东门马车张刘关军书万两义乱众龙风飞应当尽无从将杀战师图边过远进还结给红约级"
TRADITIONAL = "國時為後會來這個們說對與於長見東門馬車張劉關軍書萬兩義亂眾龍風飛應當盡無從將殺戰師圖邊過遠進還結給紅約級"


def _keywords() -> str:
    source = random.Random(0)
    return "\n".join("，".join(source.choices(NAMES, k=12)) + "。" for _ in range(40))


def _every_other_line_traditional() -> str:
    table = str.maketrans(SIMPLE, TRADITIONAL)
    return "\n".join(
        line.translate(table) if number % 2 else line
        for number, line in enumerate(PAGES[1].split("\n"))
    )


BAD = {
    "keywords": (_keywords(), r"native_text: share of stop words 0 < 0\.04"),
    "UTF-8 read as GBK": (
        PAGES[0].encode().decode("gbk", "replace"),
        r"native_text: share of characters from wrong decoding 0\.\d+ > 0\.01",
    ),
    "UTF-8 read as GBK, holes left out": (
        PAGES[0].encode().decode("gbk", "ignore"),
        r"native_text: share of stop words 0\.00\d+ < 0\.04",
    ),
    "GBK read as Latin-1": (
        PAGES[0].encode("gbk").decode("latin-1"),
        r"native_text: share of letters that are Han 0 < 0\.5",
    ),
    "mixed variants": (
        _every_other_line_traditional(),
        r"native_text: share of the rarer of simplified and traditional 0\.\d+ > 0\.15",
    ),
    "half English": (
        PAGES[0][:400]
        + "\n"
        + "The quick brown fox jumps over the lazy dog near the river bank. " * 12,
        r"native_text: share of letters that are Han 0\.\d+ < 0\.5",
    ),
    "repeated": (
        "\n".join([LINES[0]] * 8),
        r"gopher_repetition: share of duplicate lines 0\.875 > 0\.287",
    ),
    "navigation": (
        "\n".join(f"首页 | 新闻的世界 | 论坛 | 登录 | 我的帮助 | 第{page}页" for page in range(40)),
        r"gopher_repetition: share of characters in the most frequent 4-gram 0\.\d+ > 0\.16",
    ),
    "titles": (
        "\n".join(re.findall(r"[一-鿿]{4,9}(?=[，。])", NOVEL)[:90]),
        r"fineweb_quality: share of lines with an end mark 0 < 0\.106",
    ),
    "short": (PAGES[0][:60] + "。", r"gopher_quality: words 5\d < 75"),
}


def judged(texts: list[str]) -> list[str]:
    """Why each text is dropped, empty where it stays."""
    reasons, left = [""] * len(texts), list(range(len(texts)))
    codes = pa.array(["zh"] * len(texts))
    for outcome in get_language_chains(serialize_rules_by_language(DATA)).apply(  # type: ignore[arg-type]
        pa.array(texts, pa.large_string()), codes
    ):
        kept = []
        for number, keep, *verdict in zip(  # noqa: B905
            left, outcome.keep, outcome.test, outcome.value, outcome.threshold
        ):
            if keep.as_py():
                kept.append(number)
            else:
                reasons[number] = format_reason(outcome.rule, *(part.as_py() for part in verdict))
        left = kept
    return reasons


def test_good_pages_are_known_for_chinese_and_stay() -> None:
    codes, scores = identify_languages(pa.array(PAGES), DATA.language)
    assert all(compute_keep_mask(codes, scores, DATA.language).to_pylist())
    assert judged(PAGES) == [""] * len(PAGES)


@pytest.mark.parametrize("name", BAD)
def test_bad_pages_go_for_a_reason_with_value_and_threshold(name: str) -> None:
    text, expected = BAD[name]
    assert re.fullmatch(expected, judged([text])[0])


def test_near_copies_are_found_by_characters_although_no_space_stands_between_them() -> None:
    page = NOVEL.replace("\n", "")[:3000]
    copy = "".join("甲" if place % 60 == 30 else character for place, character in enumerate(page))
    signer = MinHasher(MinHashDedupConfig())
    (first, second), _ = signer.compute_bucket_keys([page, copy])
    assert not (first == second).any()  # what stands between marks is one word
    (first, second), _ = signer.compute_bucket_keys([insert_spaces(page), insert_spaces(copy)])
    assert (first == second).any()
