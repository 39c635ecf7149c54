"""From the config of a dataset to what is asked of each of its languages.

Reads the config and the profiles that it means, once and in the first process; tasks get the result as text. Refuses a
language that no document can have, and one without a profile.
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
    """The words and rules of every language that can stay, see `serialize_language_rules`; `rules` stand in for the
    config's.

    Raises ConfigError for a code without a model or a profile, with the nearest ones.
    """
    return serialize_language_rules(_load_profiles(data), data.rules if rules is None else rules)


def get_character_dedup_flags(data: CrawlConfig) -> dict[str, bool]:
    """For each language with a profile, whether near duplicates are found by characters: it writes no spaces."""
    return {code: profile.words.kind != "spaces" for code, profile in sorted(_load_profiles(data).items())}


def list_dictionaries(data: CrawlConfig) -> list[str]:
    """The dictionaries that find the words of some language, in order."""
    words = [profile.words for profile in _load_profiles(data).values()]
    return sorted({one.dictionary for one in words if isinstance(one, DictionaryWordsConfig)})


def _load_profiles(data: CrawlConfig) -> dict[str, LanguageProfile]:
    return load_language_profiles(data.language, list_known_codes(data.language.kind))
