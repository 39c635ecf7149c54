"""Words by rules equal spaCy's in every language that a profile names, and the rules are those of
the installed spaCy.
"""

import random
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.graph.resource_files import list_rule_libraries
from llmsys.data_pipeline.text.spacy_tokenizer import SpacyTokenizer, load_spacy_pipeline
from llmsys.data_pipeline.text.splitting_rules import (
    FOLDER,
    load_sentence_marks,
    load_splitting_rules,
)
from llmsys.errors import ConfigError
from tools.splitting_rules import build_language, build_shared, format_json, list_rule_languages

LANGUAGES = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem != "shared")
MARKS = list(".,:;!?()[]{}<>_#*&'\"`“”‘’…–—%=$+-~^/@|\\«»„¿¡。、॥।؟،°²€£₽😀™")
LETTERS = [
    *"abmgSTUC0199", "km", "US$", "'s", "http://", "www.", "ab.com", "é", "Ç", "ß", "İ", "ı",
    "中", "の", "한", "Привет", "слово", "ї", "Ωμέγα", "ά", "हिन्दी", "की", "বাংলা", "தமிழ்",
    "తెలుగు", "ગુજરાતી", "አማርኛ", "שלום", "עִבְרִית", "عربي", "فارسی", "اردو", "հայ", "ქარ", "l'", "d’",
    "qu'", "-t-il", "rendez-vous", "e.V.", "z.B.", "5", "12", "3.", "٣", "ª", "º",
    "M.", "II", "XIV.",
    "Rp", "USD", "kg", "°C", "u.s.w.", "orang-orang", "ko-ordinat", "a\u0301",
]  # fmt: skip


def split_with_spacy(code: str, chunk: str) -> list[str]:
    nlp = load_spacy_pipeline(code)[0]
    with nlp.memory_zone():
        return [word.text for word in nlp.tokenizer(chunk)]


def find_differences(code: str, chunks: Sequence[str]) -> list[tuple[str, list[str], list[str]]]:
    rules = SpacyTokenizer(code)
    pairs = [
        (chunk, words, split_with_spacy(code, chunk))
        for chunk, words in zip(chunks, rules.split_words(chunks), strict=True)
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


def list_chunks(code: str, seed: int, count: int) -> list[str]:
    source = random.Random(seed)
    exceptions = sorted(
        name
        for name in load_spacy_pipeline(code)[0].tokenizer.rules
        if not any(map(str.isspace, name))
    )
    some = source.sample(exceptions, min(200, len(exceptions)))
    parts = [*MARKS, *LETTERS, *some]
    chunks = ["".join(source.choices(parts, k=source.randint(1, 6))) for _ in range(count)]
    plain = [source.choice(LETTERS + some) for _ in range(count // 2)]
    chunks += [
        source.choice(["", "", *MARKS]) + word + source.choice(["", *MARKS]) for word in plain
    ]
    return chunks + exceptions[:: max(1, len(exceptions) // 300)]


@pytest.mark.parametrize("code", LANGUAGES)
def test_words_of_hard_chunks_equal_spacy(code: str) -> None:
    assert find_differences(code, list_chunks(code, 0, 600)) == []


@pytest.mark.parametrize("code", LANGUAGES)
def test_sentence_marks_are_those_of_spacy(code: str) -> None:
    assert load_spacy_pipeline(code)[1] == load_sentence_marks()


def test_every_language_of_a_profile_has_rules() -> None:
    assert list_rule_languages() == LANGUAGES


@pytest.mark.parametrize("code", ["en", "fr", "hu", "id", "tr", "xx"])
def test_the_files_are_what_the_tool_makes_of_the_installed_spacy(code: str) -> None:
    shared = build_shared()
    assert (FOLDER / "shared.json").read_text() == format_json(shared)
    made = format_json(build_language(code, shared["classes"]))
    assert (FOLDER / f"{code}.json").read_text() == made


def test_neighbouring_words_become_an_exception_again() -> None:
    # `:` is split off the end of `x):`, and `):` is an exception
    assert load_splitting_rules("xx").split_chunk("x):") == split_with_spacy("xx", "x):")


def test_a_language_without_rules_is_split_by_spacy() -> None:
    assert "kmr" not in LANGUAGES
    assert find_differences("grc", ["Ἀχιλῆος,", "(Πηληϊάδεω)"]) == []
    assert "grc" not in LANGUAGES


def build_data(tmp_path: Path, rules: str) -> CrawlConfig:
    """Return a crawl of Greek whose words are split by the rules of a language."""
    path = tmp_path / "el.yaml"
    path.write_text(f"name: Greek\nwords: {{kind: spaces, rules: {rules}}}\n")
    settings = {"language": {"languages": ["el"], "profiles": {"el": str(path)}}}
    return CrawlConfig.model_validate(settings)


def test_words_by_rules_of_ours_need_no_spacy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    assert list_rule_libraries(build_data(tmp_path, "el")) == []
    with pytest.raises(ConfigError, match=r"words\.rules: grc .*pip install 'llmsys\[spacy\]', or"):
        list_rule_libraries(build_data(tmp_path, "grc"))


def test_the_version_of_spacy_is_a_part_of_the_key_of_what_it_splits(tmp_path: Path) -> None:
    assert list_rule_libraries(build_data(tmp_path, "grc")) == [
        f"spacy=={metadata.version('spacy')}"
    ]


@pytest.mark.parametrize("code", ["qq", "../lang/en", "char_classes"])
def test_a_language_that_spacy_does_not_have_is_refused_before_anything_is_read(
    tmp_path: Path, code: str
) -> None:
    with pytest.raises(ConfigError, match=r"is no language of spacy==.*or xx"):
        list_rule_libraries(build_data(tmp_path, code))
