"""What the rules need to know of a language: how its words are found, its stop words and end marks, its thresholds.

Reads nothing, gives `LanguageProfile`, one YAML file of configs/data/languages each. What a person writes in a rule
stands above the profile of the document's language, and that above the published default. English has the published
rules, so its profile changes nothing. A value that is written as the published default counts as not written: equal
configs make equal datasets, however they came about.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator

from llmsys.config.base import Section
from llmsys.config.native_text import Script
from llmsys.config.text import RuleConfig

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
    return _BY_CODE.dump_json(own).decode()


def parse_language_rules(text: str) -> dict[str, LanguageRules]:
    """The rules by code that `serialize_language_rules` wrote."""
    return _BY_CODE.validate_json(text)
