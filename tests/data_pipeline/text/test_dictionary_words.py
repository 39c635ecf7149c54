"""Laws of words by a dictionary: a chunk's words are the library's, and a library that is
missing is named first.
"""

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from llmsys.config.data import CrawlConfig
from llmsys.config.language import DictionaryWordsConfig
from llmsys.data_pipeline.graph.resource_files import list_rule_libraries, require_resource_files
from llmsys.data_pipeline.language.rules_by_language import get_character_dedup_flags, read_profile
from llmsys.data_pipeline.text.word_columns import WordSplitter
from llmsys.data_pipeline.text.word_tokenizers import (
    LONGEST_PIECE,
    DictionaryTokenizer,
    _load_segmenter,
    build_word_tokenizer,
)
from llmsys.errors import ConfigError

CODES = {"zh": "jieba", "ja": "sudachipy", "th": "pythainlp"}


def data(code: str) -> CrawlConfig:
    profiles = {code: f"data/languages/dictionary/{code}"}
    return CrawlConfig.model_validate({"language": {"languages": [code], "profiles": profiles}})


def test_words_are_what_the_library_says_of_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(text: str) -> list[str]:
        return [text[start : start + 2] for start in range(0, len(text), 2)]

    monkeypatch.setitem(
        sys.modules, "jieba", SimpleNamespace(cut=pairs, setLogLevel=lambda level: None)
    )
    _load_segmenter.cache_clear()
    try:
        splitter = WordSplitter(build_word_tokenizer(DictionaryWordsConfig(dictionary="jieba")))
        words = splitter.split_words(["他说我们 不知道", "", "不知道"])
        assert words.counts.tolist() == [4, 0, 2]
        long = "字" * (LONGEST_PIECE + 3)
        assert "".join(DictionaryTokenizer("jieba").split_words([long])[0]) == long
        assert "。" in DictionaryTokenizer("jieba").sentence_marks
    finally:
        _load_segmenter.cache_clear()


@pytest.mark.parametrize("code", CODES)
def test_a_dictionary_that_is_not_installed_is_named_before_anything_is_read(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(
        ConfigError,
        match=rf"the dictionary {CODES[code]} needs the package .*pip install 'llmsys\[{code}\]'\.",
    ):
        require_resource_files(data(code))
    monkeypatch.setattr(metadata, "version", lambda package: "1.2")
    assert f"{CODES[code].lower()}==1.2" in [
        found.lower() for found in list_rule_libraries(data(code))
    ]


@pytest.mark.parametrize("code", CODES)
def test_the_shipped_profiles_ask_for_the_dictionary_and_near_duplicates_for_characters(
    code: str,
) -> None:
    profile, characters = (
        read_profile(f"data/languages/dictionary/{code}"),
        read_profile(f"data/languages/{code}"),
    )
    assert profile.words == DictionaryWordsConfig.model_validate({"dictionary": CODES[code]})
    assert (profile.scripts, profile.name, profile.end_marks) == (
        characters.scripts,
        characters.name,
        characters.end_marks,
    )
    assert get_character_dedup_flags(data(code)) == {code: True, "default": False}


@pytest.mark.parametrize(
    ("dictionary", "text", "words"),
    [
        ("jieba", "我们不知道。", ["我们", "不", "知道", "。"]),
        ("sudachipy", "東京都に行く", ["東京", "都", "に", "行く"]),
        ("pythainlp", "ฉันรักภาษาไทย", ["ฉัน", "รัก", "ภาษาไทย"]),
    ],
)
def test_the_libraries_find_the_words_of_the_language(
    dictionary: str, text: str, words: list[str]
) -> None:
    pytest.importorskip(dictionary)
    assert DictionaryTokenizer(
        DictionaryWordsConfig.model_validate({"dictionary": dictionary}).dictionary
    ).split_words([text]) == [words]
