"""Resolve the config of a dataset into rules per language.

Reads the config and its language profiles, once and in the first process; tasks get the result as
text. A language that no document can have, or one without a profile, is rejected.
"""

import difflib
import os
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from llmsys.config.data import CrawlConfig
from llmsys.config.language import (
    DEFAULT,
    DictionaryWordsConfig,
    LanguageConfig,
    LanguageProfile,
    SpacedWordsConfig,
    list_known_codes,
    serialize_language_rules,
)
from llmsys.config.loading.config_files import PROFILES, find_config, list_config_roots
from llmsys.config.loading.yaml_files import format_path, parse_yaml
from llmsys.config.quality_rules import RuleConfig
from llmsys.data_pipeline.language.profile_files import read_profile_values
from llmsys.errors import ConfigError


def serialize_rules_by_language(
    data: CrawlConfig, rules: Sequence[RuleConfig] | None = None
) -> str:
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
    """Return the languages whose near duplicates are found by characters, because they are written
    without spaces.

    Args:
        data: the config.

    Returns:
        A flag for each language with a profile.
    """
    return {
        code: profile.words.kind != "spaces"
        for code, profile in sorted(_load_profiles(data).items())
    }


def list_dictionaries(data: CrawlConfig) -> list[str]:
    """List the dictionaries that split the words of some language.

    Args:
        data: the config.

    Returns:
        Sorted names of dictionaries.
    """
    words = [profile.words for profile in _load_profiles(data).values()]
    return sorted(
        {splitter.dictionary for splitter in words if isinstance(splitter, DictionaryWordsConfig)}
    )


def list_word_rules(data: CrawlConfig) -> list[str]:
    """List the languages by whose rules words between spaces are split.

    Args:
        data: the config.

    Returns:
        Sorted codes, as spaCy names languages.
    """
    words = [profile.words for profile in _load_profiles(data).values()]
    return sorted({splitter.rules for splitter in words if isinstance(splitter, SpacedWordsConfig)})


def _load_profiles(data: CrawlConfig) -> dict[str, LanguageProfile]:
    return load_language_profiles(data.language, list_known_codes(data.language.kind))


def list_profile_codes() -> list[str]:
    """Return the language codes with a profile in the config folders, sorted."""
    codes = {path.stem for root in list_config_roots() for path in (root / PROFILES).glob("*.yaml")}
    return sorted(codes - {DEFAULT})


def read_profile(name: str) -> LanguageProfile:
    """Read a language profile.

    Args:
        name: A path, or a name such as `data/languages/zh`.

    Returns:
        The profile.

    Raises:
        ConfigError: The file is missing, or a value is invalid.
    """
    return _read_profiles([find_config(name, Path.cwd(), "data.language.profiles")])[0]


def _read_profiles(paths: Sequence[Path]) -> tuple[LanguageProfile, ...]:
    # The modification times are a cache key: a changed file is read again.
    return _read_unchanged_profiles(tuple((path, path.stat().st_mtime_ns) for path in paths))


@lru_cache(maxsize=256)
def _read_unchanged_profiles(files: tuple[tuple[Path, int], ...]) -> tuple[LanguageProfile, ...]:
    paths = [path for path, _ in files]
    return tuple(
        _validate_profile(path, values)
        for path, values in zip(paths, read_profile_values(paths), strict=True)
    )


def _validate_profile(path: Path, values: Any) -> LanguageProfile:
    try:
        return LanguageProfile.model_validate(values or {})
    except ValidationError as error:
        _, lines = parse_yaml(path.read_text(encoding="utf-8"), format_path(path))
        first = error.errors()[0]
        keys = tuple(str(key) for key in first["loc"])
        line = next(
            (lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), 1
        )
        raise ConfigError(
            f"{format_path(path)}:{line}: {'.'.join(keys) or 'profile'}: {first['msg']}."
        ) from None


def _find_profile_files(codes: Collection[str]) -> dict[str, Path]:
    """Find the profiles of languages as `find_config` does, and list each folder once: asked for
    one after the other, 80 of them take a fifth of the start of a preparation.
    """
    folders = [root / PROFILES for root in (Path.cwd(), *list_config_roots())]
    listed = [(folder.resolve(), set(os.listdir(folder))) for folder in folders if folder.is_dir()]
    found: dict[str, Path] = {}
    for code in codes:
        name = f"{code}.yaml"
        for folder, names in listed:
            if code in names:
                break  # a file or folder of that name comes first
            if name in names:
                found[code] = folder / name
                break
    return found


def load_language_profiles(
    config: LanguageConfig, known: Collection[str]
) -> dict[str, LanguageProfile]:
    """Return the profiles of the languages to keep.

    Args:
        config: the `data.language:` section.
        known: codes that the identifier can return.

    Returns:
        Profiles by language code; `default` is the profile of all other languages.

    Raises:
        ConfigError: for a code without a profile.
    """
    own = list_profile_codes()
    for code in (*config.languages, *config.profiles):
        if code not in own and code not in config.profiles:
            raise ConfigError(
                f"data.language.languages: {code} has no profile in configs/{PROFILES}, and "
                f"English thresholds do not apply. {_format_closest_codes(code, own)} Write a "
                f"profile, or use the default one: data.language.profiles: {{{code}: "
                f"{PROFILES}/{DEFAULT}}}."
            )
    codes = config.languages or sorted({*own, *config.profiles} & set(known))
    wanted = list(dict.fromkeys([*codes, DEFAULT]))
    files = _find_profile_files(wanted)
    given = {code: name for code, name in config.profiles.items() if code != DEFAULT}
    own_files = {code: path for code, path in files.items() if code not in given}
    read = dict(zip(own_files, _read_profiles(list(own_files.values())), strict=True))
    return {
        code: read[code] if code in read else read_profile(given.get(code, f"{PROFILES}/{code}"))
        for code in wanted
    }


def _format_closest_codes(code: str, codes: Collection[str]) -> str:
    """Return a sentence with the codes closest to `code`."""
    close = difflib.get_close_matches(code.lower(), sorted(codes), n=3, cutoff=0.3)
    close = (
        close
        or [known for known in sorted(codes) if known[:1] == code[:1].lower()][:3]
        or sorted(codes)[:3]
    )
    return f"The nearest codes are {', '.join(close)}."
