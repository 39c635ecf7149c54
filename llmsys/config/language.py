"""Configuration of language identification (`data.language:`), and language profiles for the quality rules.

A profile has the word segmentation, stop words, end marks and thresholds of one language.

Reads: one YAML file per language in configs/data/languages, or a file that the config names; `default` is the profile
of languages without one.

Invariants:
- A value in a rule overrides the profile of the document's language, and the profile overrides the published default.
- A value equal to the published default counts as unset: equal configs give equal datasets.
- The English profile changes nothing, because the published rules are for English.
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
    """The languages to keep, and the identifier with its threshold."""

    kind: Literal["combined", "py3langid", "cld2"] = Field(
        "combined",
        description="Language identifier. Each ships its model in its package; combined is the most accurate.",
    )
    languages: tuple[str, ...] = Field(("en",), description="ISO 639-1 codes to keep. Empty: keep every language.")
    min_score: float = Field(0.65, ge=0, le=1, description="Minimum probability of the most likely language.")
    max_characters: int = Field(4_096, ge=1, description="Number of characters from the start of the text to read.")
    profiles: dict[str, str] = Field(
        {}, description="Language profiles by code: a path or config name that replaces data/languages/CODE."
    )


DEFAULT = "default"
Dictionary = Literal["jieba", "sudachipy", "pythainlp"]

_RULE: TypeAdapter[RuleConfig] = TypeAdapter(RuleConfig)


class SpacedWordsConfig(Section):
    """Words between spaces; punctuation and contractions are split as by spaCy's tokenizer."""

    kind: Literal["spaces"] = "spaces"
    rules: str = Field("xx", description="Language of spaCy's tokenizer rules. xx: the language-independent rules.")


class CharacterWordsConfig(Section):
    """One word per character in scripts without spaces; other scripts are split at spaces."""

    kind: Literal["characters"] = "characters"


class DictionaryWordsConfig(Section):
    """Dictionary segmentation, as in datatrove; each library is an extra: llmsys[zh], [ja], [th]."""

    kind: Literal["dictionary"] = "dictionary"
    dictionary: Dictionary = Field(
        description="Segmenter: jieba for Chinese, sudachipy for Japanese, pythainlp for Thai."
    )


Words = Annotated[SpacedWordsConfig | CharacterWordsConfig | DictionaryWordsConfig, Field(discriminator="kind")]


class LanguageProfile(Section):
    """Settings of the quality rules for one language."""

    name: str = Field(min_length=1, description="Display name of the language.")
    scripts: tuple[Script, ...] = Field((), description="Scripts of the language.")
    words: Words = Field(SpacedWordsConfig(), description="Word segmentation, for rules and near duplicates.")
    end_marks: tuple[str, ...] = Field((), description="Punctuation that ends a line of prose. Empty: the rule's own.")
    stop_words: tuple[str, ...] = Field((), description="Common words. Empty: the rule's own.")
    rules: dict[str, dict[str, Any]] = Field(
        {}, description="Overrides of the published thresholds by kind of rule, such as gopher_quality: {…}."
    )

    @field_validator("rules")
    @classmethod
    def _check_rule_overrides(cls, rules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for kind, fields in rules.items():
            for field in fields:
                if new := find_new_key(("data", "rules", "*", field)):
                    raise ValueError(f"{kind}.{field} was renamed to {new.rpartition('.')[2]}")
            _RULE.validate_python({**fields, "kind": kind})
        return rules

    def localize_rule(self, published: RuleConfig) -> RuleConfig:
        """Return a rule for documents in this language.

        Args:
            published: the rule as configured. Values that differ from their defaults override the profile.
        """
        fields = type(published).model_fields
        written = {
            name: getattr(published, name)
            for name, field in fields.items()
            if field.is_required() or getattr(published, name) != field.get_default(call_default_factory=True)
        }
        own = {name: getattr(self, name) for name in ("scripts", "stop_words", "end_marks") if name in fields}
        values: dict[str, Any] = {name: value for name, value in own.items() if value}
        # The thresholds were derived with the words of this profile; other dialects split words in their own way.
        if getattr(published, "dialect", "datatrove") == "datatrove":
            values |= self.rules.get(published.kind, {})
        return _RULE.validate_python({**values, **written, "kind": published.kind})


class LanguageRules(Section):
    """Word segmentation and rules for documents in one language."""

    words: Words = Field(description="Word segmentation.")
    rules: tuple[RuleConfig, ...] = Field(description="Rules in order, with the overrides of the profile.")


_BY_CODE: TypeAdapter[dict[str, LanguageRules]] = TypeAdapter(dict[str, LanguageRules])


def serialize_language_rules(profiles: Mapping[str, LanguageProfile], rules: Sequence[RuleConfig]) -> str:
    """Return the rules of all languages as JSON, which is part of task keys.

    Args:
        profiles: language profiles by code.
        rules: the configured rules, in their order.

    Returns:
        JSON text that `parse_language_rules` reads.
    """
    own = {
        code: LanguageRules(words=profile.words, rules=tuple(profile.localize_rule(rule) for rule in rules))
        for code, profile in profiles.items()
    }
    values = _BY_CODE.dump_python(own, mode="json")
    for language_rules in values.values():
        # Task keys keep the old names, so that equal settings reuse earlier results.
        language_rules["rules"] = to_recorded_names(language_rules["rules"], "data.rules")
    return to_json(values).decode()


def parse_language_rules(text: str) -> dict[str, LanguageRules]:
    """Return the rules of all languages from JSON.

    Args:
        text: result of `serialize_language_rules`.

    Returns:
        Rules by language code.
    """
    values = from_json(text)
    for language_rules in values.values():
        language_rules["rules"] = to_current_names(language_rules["rules"], "data.rules")
    return _BY_CODE.validate_python(values)


def list_profile_codes() -> list[str]:
    """Return the language codes with a profile in the config folders, sorted."""
    codes = {path.stem for root in list_config_roots() for path in (root / PROFILES).glob("*.yaml")}
    return sorted(codes - {DEFAULT})


def read_profile(name: str) -> LanguageProfile:
    """Return the profile of a path, or of a name such as `data/languages/zh`.

    Raises:
        ConfigError: for a missing file or an invalid value.
    """
    path = find_config(name, Path.cwd(), "data.language.profiles")
    # The modification time is a cache key: a changed file is read again.
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
    """Return the profiles of the languages to keep.

    Args:
        config: the `data.language:` section.
        known: codes that the identifier can return.

    Returns:
        Profiles by language code; `default` is the profile of all other languages.

    Raises:
        ConfigError: for a code that the identifier cannot return, and for one without a profile.
    """
    own = list_profile_codes()
    for code in (*config.languages, *config.profiles):
        if code not in known:
            raise ConfigError(_format_unknown_code(code, config, known))
        if code not in own and code not in config.profiles:
            raise ConfigError(
                f"data.language.languages: {code} has no profile in configs/{PROFILES}, and English thresholds "
                f"do not apply. {_format_closest_codes(code, own)} Write a profile, or use the default one: "
                f"data.language.profiles: {{{code}: {PROFILES}/{DEFAULT}}}."
            )
    codes = config.languages or sorted({*own, *config.profiles} & set(known))
    named = {code: config.profiles.get(code, f"{PROFILES}/{code}") for code in codes}
    return {code: read_profile(name) for code, name in {**named, DEFAULT: f"{PROFILES}/{DEFAULT}"}.items()}


def _format_unknown_code(code: str, config: LanguageConfig, known: Collection[str]) -> str:
    where = "languages" if code in config.languages else "profiles"
    return (
        f"data.language.{where}: the identifier {config.kind} does not know {code!r}. "
        f"{_format_closest_codes(code, known)}"
    )


def _format_closest_codes(code: str, codes: Collection[str]) -> str:
    """Return a sentence with the codes closest to `code`."""
    if code == "no":
        return "Norwegian is nb (Bokmål) or nn (Nynorsk)."
    named = [
        known for known in list_profile_codes() if read_profile(f"{PROFILES}/{known}").name.lower() == code.lower()
    ]
    if named:
        return f"{code.capitalize()} is {named[0]}."
    close = difflib.get_close_matches(code.lower(), sorted(codes), n=3, cutoff=0.3)
    close = close or [known for known in sorted(codes) if known[:1] == code[:1].lower()][:3] or sorted(codes)[:3]
    return f"The nearest codes are {', '.join(close)}."
