"""Resolve the config of a dataset into rules per language.

Reads the config and its language profiles, once and in the first process; tasks get the result as text. A language that
no document can have, or one without a profile, is rejected.
"""

from collections.abc import Sequence

from data_pipeline.language.codes import list_known_codes
from llmsys.config.data import CrawlConfig
from llmsys.config.language import (
    DictionaryWordsConfig,
    LanguageProfile,
    load_language_profiles,
    serialize_language_rules,
)
from llmsys.config.quality_rules import RuleConfig


def serialize_rules_by_language(data: CrawlConfig, rules: Sequence[RuleConfig] | None = None) -> str:
    """Serialize the words and rules of every language that can be kept.

    Args:
        data: the config.
        rules: replacement for the rules of the config; None for those.

    Returns:
        The text that `serialize_language_rules` writes.

    Raises:
        ConfigError: for a code without a model or a profile; names the nearest ones.
    """
    return serialize_language_rules(_load_profiles(data), data.rules if rules is None else rules)


def get_character_dedup_flags(data: CrawlConfig) -> dict[str, bool]:
    """Return the languages whose near duplicates are found by characters, because they are written without spaces.

    Args:
        data: the config.

    Returns:
        A flag for each language with a profile.
    """
    return {code: profile.words.kind != "spaces" for code, profile in sorted(_load_profiles(data).items())}


def list_dictionaries(data: CrawlConfig) -> list[str]:
    """List the dictionaries that split the words of some language.

    Args:
        data: the config.

    Returns:
        Sorted names of dictionaries.
    """
    words = [profile.words for profile in _load_profiles(data).values()]
    return sorted({splitter.dictionary for splitter in words if isinstance(splitter, DictionaryWordsConfig)})


def _load_profiles(data: CrawlConfig) -> dict[str, LanguageProfile]:
    return load_language_profiles(data.language, list_known_codes(data.language.kind))
