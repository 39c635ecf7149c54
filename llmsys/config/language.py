"""What a YAML file can say about languages: which stay, and by whose judgement.

Reads nothing, gives `LanguageConfig`. What the rules need to know of a language stands in a profile, see
`language_profile`.

What the rules need to know of a language: how its words are found, its stop words and end marks, its thresholds.

Reads nothing, gives `LanguageProfile`, one YAML file of configs/data/languages each. What a person writes in a rule
stands above the profile of the document's language, and that above the published default. English has the published
rules, so its profile changes nothing. A value that is written as the published default counts as not written: equal
configs make equal datasets, however they came about.

Which profile a language has: a file of configs/data/languages, or one that the config names.

Reads YAML files, gives `LanguageProfile`s by code. `default` is the profile of languages that have none.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, field_validator
from pydantic_core import from_json, to_json

from llmsys.config.migration import find_new_key, to_current_names, to_recorded_names
from llmsys.config.paths import PROFILES, find_config, format_path, list_config_roots
from llmsys.config.quality_rules import RuleConfig, Script
from llmsys.config.section import Section
from llmsys.config.yaml_parser import parse_yaml
from llmsys.errors import ConfigError


class LanguageConfig(Section):
    """Which languages stay, and how sure the identification must be."""

    kind: Literal["combined", "py3langid", "cld2"] = Field(
        "combined",
        description="Identifier; each has its model in its package. Both together are right most often.",
    )
    languages: tuple[str, ...] = Field(("en",), description="ISO 639-1 codes that stay; empty: every language stays.")
    min_score: float = Field(0.65, ge=0, le=1, description="Probability the best language must exceed.")
    max_characters: int = Field(4_096, ge=1, description="Characters of the beginning of the text that are read.")
    profiles: dict[str, str] = Field(
        {}, description="Profile by language code, a path or a name, instead of data/languages/CODE."
    )


DEFAULT = "default"
Dictionary = Literal["jieba", "sudachipy", "pythainlp"]

_RULE: TypeAdapter[RuleConfig] = TypeAdapter(RuleConfig)


class SpacedWordsConfig(Section):
    """Words stand between spaces; marks and contractions are taken off as spaCy's tokenizer does."""

    kind: Literal["spaces"] = "spaces"
    rules: str = Field("xx", description="Language of spaCy's tokenizer rules; xx: the rules for all languages.")


class CharacterWordsConfig(Section):
    """Every character of a script without spaces is a word; other scripts are split at spaces."""

    kind: Literal["characters"] = "characters"


class DictionaryWordsConfig(Section):
    """Words of a dictionary, found as datatrove finds them; each library is an extra: llmsys[zh], [ja], [th]."""

    kind: Literal["dictionary"] = "dictionary"
    dictionary: Dictionary = Field(description="jieba splits Chinese, sudachipy Japanese, pythainlp Thai.")


Words = Annotated[SpacedWordsConfig | CharacterWordsConfig | DictionaryWordsConfig, Field(discriminator="kind")]


class LanguageProfile(Section):
    """One language, as the rules see it."""

    name: str = Field(min_length=1, description="Name of the language, for people.")
    scripts: tuple[Script, ...] = Field((), description="Scripts that the language is written in.")
    words: Words = Field(SpacedWordsConfig(), description="How words are found, for rules and for near duplicates.")
    end_marks: tuple[str, ...] = Field((), description="Marks that end a line of prose; empty: as each rule says.")
    stop_words: tuple[str, ...] = Field((), description="Common words; empty: as each rule says.")
    rules: dict[str, dict[str, Any]] = Field(
        {}, description="Fields by kind of rule that differ from the published ones, such as gopher_quality: {…}."
    )

    @field_validator("rules")
    @classmethod
    def _check_rule_overrides(cls, rules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for kind, fields in rules.items():
            for field in fields:
                if new := find_new_key(("data", "rules", "*", field)):
                    raise ValueError(f"{kind}.{field} is now called {new.rpartition('.')[2]}")
            _RULE.validate_python({**fields, "kind": kind})
        return rules

    def localize_rule(self, published: RuleConfig) -> RuleConfig:
        """The rule for documents in this language: what was written in it, else the profile, else the default.

        Thresholds of a profile were met with the words of this profile; a dialect with words of its own takes the stop
        words alone.
        """
        fields = type(published).model_fields
        written = {
            name: getattr(published, name)
            for name, field in fields.items()
            if field.is_required() or getattr(published, name) != field.get_default(call_default_factory=True)
        }
        own = {name: getattr(self, name) for name in ("scripts", "stop_words", "end_marks") if name in fields}
        values: dict[str, Any] = {name: value for name, value in own.items() if value}
        if getattr(published, "dialect", "datatrove") == "datatrove":
            values |= self.rules.get(published.kind, {})
        return _RULE.validate_python({**values, **written, "kind": published.kind})


class LanguageRules(Section):
    """What is asked of documents in one language."""

    words: Words = Field(description="How words are found.")
    rules: tuple[RuleConfig, ...] = Field(description="The rules in their order, as the profile changes them.")


_BY_CODE: TypeAdapter[dict[str, LanguageRules]] = TypeAdapter(dict[str, LanguageRules])


def serialize_language_rules(profiles: Mapping[str, LanguageProfile], rules: Sequence[RuleConfig]) -> str:
    """What is asked of each language, as a text that tasks take along and the journal compares."""
    own = {
        code: LanguageRules(words=profile.words, rules=tuple(profile.localize_rule(rule) for rule in rules))
        for code, profile in profiles.items()
    }
    values = _BY_CODE.dump_python(own, mode="json")
    for one in values.values():
        one["rules"] = to_recorded_names(one["rules"], "data.rules")  # the text is part of task keys
    return to_json(values).decode()


def parse_language_rules(text: str) -> dict[str, LanguageRules]:
    """The rules by code that `serialize_language_rules` wrote."""
    values = from_json(text)
    for one in values.values():
        one["rules"] = to_current_names(one["rules"], "data.rules")
    return _BY_CODE.validate_python(values)


def list_profile_codes() -> list[str]:
    """Every code that has a profile of its own."""
    found = {path.stem for root in list_config_roots() for path in (root / PROFILES).glob("*.yaml")}
    return sorted(found - {DEFAULT})


def read_profile(name: str) -> LanguageProfile:
    """The profile of a path or a name such as `data/languages/zh`.

    Raises ConfigError for a missing file and for every value that it must not hold.
    """
    path = find_config(name, Path.cwd(), "data.language.profiles")
    return _read_profile_file(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=256)
def _read_profile_file(path: Path, changed: int) -> LanguageProfile:
    values, lines = parse_yaml(path.read_text(encoding="utf-8"), format_path(path))
    try:
        return LanguageProfile.model_validate(values or {})
    except ValidationError as error:
        first = error.errors()[0]
        keys = tuple(str(key) for key in first["loc"])
        line = next((lines[keys[:end]] for end in range(len(keys), 0, -1) if keys[:end] in lines), 1)
        raise ConfigError(f"{format_path(path)}:{line}: {'.'.join(keys) or 'profile'}: {first['msg']}.") from None


def load_language_profiles(config: LanguageConfig, known: Collection[str]) -> dict[str, LanguageProfile]:
    """The profiles of the languages that stay, by code, and that of all others as `default`.

    Args:
        config: which languages stay and whose profiles are the user's.
        known: codes that the identifier may give.

    Raises ConfigError for a code that no document can have, and for one without a profile.
    """
    own = list_profile_codes()
    for code in (*config.languages, *config.profiles):
        if code not in known:
            raise ConfigError(_format_unknown_code(code, config, known))
        if code not in own and code not in config.profiles:
            raise ConfigError(
                f"data.language.languages: {code} has no profile in configs/{PROFILES}, and its pages are not English. "
                f"{_format_closest_codes(code, own)} Write a profile, or take the one for languages without: "
                f"data.language.profiles: {{{code}: {PROFILES}/{DEFAULT}}}."
            )
    codes = config.languages or sorted({*own, *config.profiles} & set(known))
    named = {code: config.profiles.get(code, f"{PROFILES}/{code}") for code in codes}
    return {code: read_profile(name) for code, name in {**named, DEFAULT: f"{PROFILES}/{DEFAULT}"}.items()}


def _format_unknown_code(code: str, config: LanguageConfig, known: Collection[str]) -> str:
    where = "languages" if code in config.languages else "profiles"
    return (
        f"data.language.{where}: the identifier {config.kind} never says {code!r}. {_format_closest_codes(code, known)}"
    )


def _format_closest_codes(code: str, codes: Collection[str]) -> str:
    """The codes that look most like one."""
    if code == "no":
        return "Norwegian is nb (Bokmål) or nn (Nynorsk)."
    named = [one for one in list_profile_codes() if read_profile(f"{PROFILES}/{one}").name.lower() == code.lower()]
    if named:
        return f"{code.capitalize()} is {named[0]}."
    close = difflib.get_close_matches(code.lower(), sorted(codes), n=3, cutoff=0.3)
    close = close or [one for one in sorted(codes) if one[:1] == code[:1].lower()][:3] or sorted(codes)[:3]
    return f"The nearest codes are {', '.join(close)}."
