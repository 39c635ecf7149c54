"""Codes of languages: a wrong one is refused where a config is read, with the right one."""

import pytest

from llmsys.config.loading.load import read_config
from llmsys.errors import ConfigError

LISTS = "data.rules=[{kind: bad_words, word_lists: [{entries: [x]}, {language: %s, entries: [x]}]}]"


@pytest.mark.parametrize(
    ("code", "kind", "expected"),
    [
        ("english", "combined", "Use en, English."),
        ("en-US", "combined", "Use en, English."),
        ("norwegian nynorsk", "combined", "Use nn, Norwegian Nynorsk."),
        ("spanisch", "combined", "Use es, Spanish."),
        ("iw", "combined", "Use he, Hebrew."),
        ('"no"', "combined", "Use nb for Norwegian Bokmål, or nn for Nynorsk."),
        ("zg", "combined", "Use its code of ISO 639-1; the nearest are zu, zh or za."),
        ("mi", "py3langid", "Use data.language.kind=combined, which does."),
    ],
)
def test_a_code_that_no_document_can_have_is_refused_with_the_nearest(
    code: str, kind: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config("train/demo", [f"data.language={{kind: {kind}, languages: [de, {code}]}}"])
    word = code.strip('"')
    assert (
        f"data.language.languages.1: {word!r} is no code of a language that data.language.kind="
        f"{kind} identifies. {expected}"
    ) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.language.profiles={german: mine.yaml}", "data.language.profiles.german"),
        ("tokenizer.language_weights={en: 1, german: 1}", "tokenizer.language_weights.german"),
        (LISTS % "german", "data.rules.0.word_lists.1.language"),
    ],
)
def test_every_key_of_a_language_takes_codes_alone(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config("train/demo", [override])
    assert f"{key}: 'german' is no code of a language" in str(caught.value)
    assert "Use de, German." in str(caught.value)


def test_weights_may_name_languages_that_a_derived_config_does_not_keep() -> None:
    weights = "tokenizer.language_weights={en: 1, de: 1}"
    for kept in ("[]", "[de, en]", "[en]"):
        read_config("train/demo", [weights, f"data.language.languages={kept}"])
