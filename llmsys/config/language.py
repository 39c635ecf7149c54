"""Configuration of language identification (`data.language:`), and language profiles for the quality rules.

A profile has the word segmentation, stop words, end marks and thresholds of one language.

Reads: one YAML file per language in configs/data/languages, or a file that the config names; `default` is the profile
of languages without one.

Invariants:
- A value in a rule overrides the profile of the document's language, and the profile overrides the published default.
- A value equal to the published default counts as unset: equal configs give equal datasets.
- The English profile changes nothing, because the published rules are for English.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, field_validator
from pydantic_core import from_json, to_json

from llmsys.config.migration import find_new_key, to_current_names, to_recorded_names
from llmsys.config.quality_rules import RuleConfig, Script
from llmsys.config.section import Section


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
