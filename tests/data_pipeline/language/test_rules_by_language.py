"""Profiles: what is written stands above the profile, English keeps the published rules, each
document its own.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import TypeAdapter

from llmsys.config.data import CrawlConfig
from llmsys.config.language import (
    LanguageConfig,
    list_known_codes,
    list_language_names,
    parse_language_rules,
)
from llmsys.config.line_rules import C4DatatroveConfig
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RuleConfig,
)
from llmsys.data_pipeline.language.rules_by_language import (
    get_character_dedup_flags,
    list_profile_codes,
    load_language_profiles,
    read_profile,
    serialize_rules_by_language,
)
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.rules.language_chains import LanguageRuleChains
from llmsys.data_pipeline.rules.rule import RuleOutcome
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import CharacterTokenizer, insert_spaces
from llmsys.errors import ConfigError

RULES = (
    GopherRepetitionConfig(max_top_2gram_share=1, max_top_3gram_share=1, max_top_4gram_share=1),
    GopherQualityConfig(min_words=8),
    C4DatatroveConfig(min_sentences=1, end_marks=()),
    FinewebQualityConfig(),
)
LINGUA = """af am ar az be bg bn bs ca cs cy da de el en eo es et eu fa fi fr ga gu he hi hr hu hy
id is it ja ka kk ko la lg lt lv mi mk mn mr ms nb nl nn om pa pl pt ro ru si sk sl sn
so sq sr st sv sw ta te th ti tl tn tr ts uk ur vi xh yo zh zu"""
TEXTS = [
    (
        "en",
        "The wheel of the old mill turns with the water, and that is all there is to say about it "
        "in the town.",
    ),
    (
        "de",
        "Das Rad der alten Mühle dreht sich mit dem Wasser, und das ist alles, was man in der "
        "Stadt davon sagt.",
    ),
    (
        "zh",
        "老磨坊的轮子随着水转动，镇上的人们说的也就是这些。他们在河边走来走去，谈论天气和收成，直到天黑。",
    ),
    ("en", "Wheel mill town river bridge stone people water tall."),
    (
        "de",
        "The wheel of the old mill turns with the water, and that is all there is to say about it "
        "in the town.",
    ),
    (
        "xx",
        "Rota vetera molae aqua vertitur neque plura in oppido dici possunt de illa re antiqua.",
    ),
    ("zh", "轮子"),
]


def data(*keep: str, rules: tuple[RuleConfig, ...] = RULES, **language: object) -> CrawlConfig:
    return CrawlConfig(
        language=LanguageConfig.model_validate({"languages": keep, **language}), rules=rules
    )


def columns(outcome: RuleOutcome) -> list[object]:
    lists = (outcome.keep, outcome.test, outcome.value, outcome.threshold, outcome.texts)
    statistics = {name: column.to_pylist() for name, column in outcome.statistics.items()}
    return [outcome.rule, *(column.to_pylist() for column in lists), statistics, outcome.changes]


def test_every_language_of_the_sentences_has_a_model_and_a_profile() -> None:
    assert set(LINGUA.split()) <= set(list_profile_codes()) & list_known_codes("combined")
    for code in (*list_profile_codes(), "default"):
        assert read_profile(f"data/languages/{code}").name


def test_the_profile_of_english_changes_nothing() -> None:
    english = read_profile("data/languages/en")
    every: list[RuleConfig] = [TypeAdapter(RuleConfig).validate_python({"kind": kind}) for kind in (
        "gopher_repetition", "gopher_quality", "c4", "c4_datatrove", "c4_dolma", "fineweb_quality",
        "line_corrections"
    )]  # fmt: skip
    assert [english.localize_rule(rule) for rule in every] == every
    assert english.words.kind == "spaces"


def test_what_is_written_stands_above_the_profile_and_that_above_the_default() -> None:
    chinese = read_profile("data/languages/zh")
    assert chinese.localize_rule(GopherQualityConfig()) != GopherQualityConfig()
    rule = chinese.localize_rule(GopherQualityConfig(min_words=60))
    assert isinstance(rule, GopherQualityConfig)
    assert (rule.min_words, rule.max_words, rule.max_hash_ratio) == (60, 150_000, 0.1)
    other = chinese.localize_rule(GopherQualityConfig(dialect="paper"))
    assert isinstance(other, GopherQualityConfig)
    assert (other.min_words, other.stop_words) == (50, chinese.stop_words)


def test_each_document_is_judged_as_if_its_language_were_alone() -> None:
    rules = parse_language_rules(serialize_rules_by_language(data("en", "de", "zh")))
    codes, texts = zip(*TEXTS, strict=True)
    together = LanguageRuleChains(rules).apply(pa.array(texts, pa.large_string()), pa.array(codes))
    alone = [
        LanguageRuleChains(rules).apply(pa.array([text], pa.large_string()), pa.array([code]))
        for code, text in TEXTS
    ]
    reached = list(range(len(TEXTS)))
    for number, outcome in enumerate(together):
        parts = [alone[document][number] for document in reached]
        assert outcome.keep.to_pylist() == [part.keep[0].as_py() for part in parts]
        assert outcome.test.to_pylist() == [part.test[0].as_py() for part in parts]
        assert outcome.threshold.to_pylist() == [part.threshold[0].as_py() for part in parts]
        kept = [part for part in parts if part.keep[0].as_py()]
        assert outcome.texts.to_pylist() == [part.texts[0].as_py() for part in kept]
        for name, column in outcome.statistics.items():
            assert column.to_pylist() == [part.statistics[name][0].as_py() for part in kept]
        reached = [
            document for document, part in zip(reached, parts, strict=True) if part.keep[0].as_py()
        ]
    assert {TEXTS[document][0] for document in reached} == {"en", "de", "zh", "xx"}


def test_english_among_other_languages_is_judged_as_by_the_chain_alone() -> None:
    english = [text for code, text in TEXTS if code == "en"]
    column = pa.array(english, pa.large_string())
    chains = LanguageRuleChains(parse_language_rules(serialize_rules_by_language(data("en", "de"))))
    mine = chains.apply(column, pa.array(["en"] * len(english)))
    assert [columns(one) for one in mine] == [
        columns(one) for one in RuleChain(RULES).apply(column)
    ]


def test_characters_of_scripts_without_spaces_are_words() -> None:
    text = "他说：“Hello world，”我不知道。 ที่นี้ มี UTF-8 がぎ"
    chunks = CharacterTokenizer().split_chunks(text)
    assert "".join(chunks) == "".join(text.split())
    assert chunks[:3] == ["他", "说", "："]
    assert insert_spaces("ที่นี้がぎ") == "ที่ นี้ が ぎ"
    words = WordSplitter(CharacterTokenizer()).split_words([text, "", "道"])
    assert words.counts.tolist()[1:] == [0, 1]
    line = "他说。我不知道！真的"
    assert WordSplitter(CharacterTokenizer()).compute_line_columns(
        [line], [[line]]
    ).sentences_L.tolist() == [3]
    found = get_character_dedup_flags(data("en", "ja", "th", "zh", "ko"))
    assert found == {"default": False, "en": False, "ja": True, "ko": False, "th": True, "zh": True}


@pytest.mark.parametrize(
    ("keep", "language", "expected"),
    [
        (
            ("yue",),
            {},
            r"yue has no profile in configs/data/languages.*profiles: \{yue: "
            r"data/languages/default\}",
        ),
        (
            ("zh",),
            {"profiles": {"zh": "data/languages/klingon"}},
            r"config 'data/languages/klingon'",
        ),
    ],
)
def test_a_language_without_a_profile_is_refused(
    keep: tuple[str, ...], language: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        serialize_rules_by_language(data(*keep, **language))


def test_a_language_can_be_called_by_the_name_of_its_profile() -> None:
    names = {read_profile(f"data/languages/{code}").name: code for code in list_profile_codes()}
    codes = list_language_names()
    assert {name: codes.get(name.lower()) for name in names} == names
    assert set(codes.values()) <= list_known_codes("combined")


def test_a_profile_of_the_users_stands_for_the_shipped_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nstop_words: [a, b]\nrules:\n  gopher_quality: {min_words: 7}\n")
    config = LanguageConfig(languages=("yue",), profiles={"yue": str(path)})
    profiles = load_language_profiles(config, list_known_codes("combined"))
    assert sorted(profiles) == ["default", "yue"]
    rule = profiles["yue"].localize_rule(GopherQualityConfig())
    assert isinstance(rule, GopherQualityConfig)
    assert (rule.min_words, rule.stop_words) == (7, ("a", "b"))


@pytest.mark.parametrize(
    "text", ["rules:\n  gopher: {}\n", "rules:\n  gopher_quality: {min_word: 3}\n", "nam: x\n"]
)
def test_a_mistake_in_a_profile_is_named_with_file_and_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(f"name: wrong\n{text}")
    with pytest.raises(ConfigError, match=r"wrong\.yaml:[1-3]: (rules|nam)"):
        read_profile(str(path))
