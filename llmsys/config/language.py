"""Configuration of language identification (`data.language:`), codes, and language profiles for the
quality rules.

A profile has the word segmentation, stop words, end marks and thresholds of one language.

Reads: one YAML file per language in configs/data/languages, or a file that the config names;
`default` is the profile of languages without one.

Invariants:
- A value in a rule overrides the profile of the document's language, and the profile overrides the
  published default.
- A value equal to the published default counts as unset: equal configs give equal datasets.
- The English profile changes nothing, because the published rules are for English.
- Every code of a config is one that its identifier can return.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationInfo, field_validator

from llmsys.config.quality_rules import RuleConfig, Script
from llmsys.config.section import NamedRuleConfig, Section, raise_violations
from llmsys.errors import Violation, format_choices

Codes = TypeVar("Codes", tuple[str, ...], dict[str, str])


class LanguageConfig(Section):
    """The languages to keep, and the identifier with its threshold."""

    kind: Literal["combined", "py3langid", "cld2"] = Field(
        "combined",
        description="Language identifier. Each ships its model in its package; combined is the "
        "most accurate.",
    )
    languages: tuple[str, ...] = Field(
        ("en",),
        validate_default=False,
        description="ISO 639-1 codes to keep. Empty: keep every language.",
    )
    min_score: float = Field(
        0.65, ge=0, le=1, description="Minimum probability of the most likely language."
    )
    max_characters: int = Field(
        4_096, ge=1, description="Number of characters from the start of the text to read."
    )
    profiles: dict[str, str] = Field(
        {},
        validate_default=False,
        description="Language profiles by code: a path or config name that replaces "
        "data/languages/CODE.",
    )

    @field_validator("languages", "profiles")
    @classmethod
    def _check_codes(cls, codes: Codes, info: ValidationInfo) -> Codes:
        keys = codes if isinstance(codes, dict) else map(str, range(len(codes)))
        if kind := info.data.get("kind"):  # a wrong one has a message of its own
            raise_violations(find_code_violations(kind, zip(keys, codes, strict=True)))
        return codes


def find_code_violations(kind: str, codes: Iterable[tuple[str, str]]) -> Iterator[Violation]:
    """Yield a violation for every code that an identifier cannot return.

    Args:
        kind: identifier, `data.language.kind`.
        codes: key and code of each value.
    """
    known = list_known_codes(kind)
    for key, code in codes:
        if code not in known:
            yield Violation(
                key,
                f"{code!r} is no code of a language that data.language.kind={kind} identifies. "
                f"{_format_nearest_codes(code, known)}",
            )


DEFAULT = "default"
Dictionary = Literal["jieba", "sudachipy", "pythainlp"]

_RULE: TypeAdapter[RuleConfig] = TypeAdapter(RuleConfig)


class SpacedWordsConfig(Section):
    """Words between spaces; punctuation and contractions are split as by spaCy's tokenizer."""

    kind: Literal["spaces"] = "spaces"
    rules: str = Field(
        "xx",
        description="Language of spaCy's tokenizer rules. xx: the language-independent rules. "
        "Those of the shipped profiles are here; others need spaCy: llmsys[spacy].",
    )


class CharacterWordsConfig(Section):
    """One word per character in scripts without spaces; other scripts are split at spaces."""

    kind: Literal["characters"] = "characters"


class DictionaryWordsConfig(Section):
    """Dictionary segmentation, as in datatrove; each library is an extra: llmsys[zh], [ja],
    [th].
    """

    kind: Literal["dictionary"] = "dictionary"
    dictionary: Dictionary = Field(
        description="Segmenter: jieba for Chinese, sudachipy for Japanese, pythainlp for Thai."
    )


Words = Annotated[
    SpacedWordsConfig | CharacterWordsConfig | DictionaryWordsConfig, Field(discriminator="kind")
]


class LanguageProfile(Section):
    """Settings of the quality rules for one language."""

    name: str = Field(min_length=1, description="Display name of the language.")
    scripts: tuple[Script, ...] = Field((), description="Scripts of the language.")
    words: Words = Field(
        SpacedWordsConfig(), description="Word segmentation, for rules and near duplicates."
    )
    end_marks: tuple[str, ...] = Field(
        (), description="Punctuation that ends a line of prose. Empty: the rule's own."
    )
    stop_words: tuple[str, ...] = Field((), description="Common words. Empty: the rule's own.")
    rules: dict[str, dict[str, Any]] = Field(
        {},
        description="Overrides of the published thresholds by kind of rule, such as "
        "gopher_quality: {…}.",
    )

    @field_validator("rules")
    @classmethod
    def _check_rule_overrides(cls, rules: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for kind, fields in rules.items():
            _RULE.validate_python({**fields, "kind": kind})
        return rules

    def localize_rule(self, published: RuleConfig) -> RuleConfig:
        """Return a rule for documents in this language.

        Args:
            published: the rule as configured. Values that differ from their defaults override the
                profile.
        """
        return self.build_rule(published, _select_written_values(published))

    def build_rule(self, published: RuleConfig, written: Mapping[str, Any]) -> RuleConfig:
        """Return a rule for documents in this language, given its values that are no defaults."""
        own = {
            name: getattr(self, name)
            for name in ("scripts", "stop_words", "end_marks")
            if name in type(published).model_fields
        }
        values: dict[str, Any] = {name: value for name, value in own.items() if value}
        # The thresholds were derived with the words of this profile; other dialects split words in
        # their own way.
        if getattr(published, "dialect", "datatrove") == "datatrove":
            values |= self.rules.get(published.kind, {})
        return _RULE.validate_python({**values, **written, "kind": published.kind})


def _select_written_values(rule: RuleConfig) -> dict[str, Any]:
    """Return the values of a rule that differ from their defaults."""
    return {
        name: getattr(rule, name)
        for name, field in type(rule).model_fields.items()
        if field.is_required()
        or getattr(rule, name) != field.get_default(call_default_factory=True)
    }


class LanguageRules(Section):
    """Word segmentation and rules for documents in one language."""

    words: Words = Field(description="Word segmentation.")
    rules: tuple[RuleConfig, ...] = Field(
        description="Rules in order, with the overrides of the profile."
    )


_BY_CODE: TypeAdapter[dict[str, LanguageRules]] = TypeAdapter(dict[str, LanguageRules])


def serialize_language_rules(
    profiles: Mapping[str, LanguageProfile], rules: Sequence[RuleConfig]
) -> str:
    """Return the rules of all languages as JSON, which is part of task keys.

    Args:
        profiles: language profiles by code.
        rules: the configured rules, in their order.

    Returns:
        JSON text that `parse_language_rules` reads.
    """
    # Once for all languages: defaults are copied to compare them.
    written = [(rule, _select_written_values(rule)) for rule in rules]
    own = {
        code: LanguageRules(
            words=profile.words,
            rules=tuple(profile.build_rule(rule, values) for rule, values in written),
        )
        for code, profile in profiles.items()
    }
    return _BY_CODE.dump_json(own).decode()


@lru_cache(maxsize=1)  # every task of a stage has the same text
def parse_language_rules(text: str) -> Mapping[str, LanguageRules]:
    """Return the rules of all languages from JSON.

    Args:
        text: result of `serialize_language_rules`.

    Returns:
        Rules by language code.
    """
    return _BY_CODE.validate_json(text)


def find_name_violations(
    rules: Sequence[NamedRuleConfig], taken: Collection[str]
) -> Iterator[Violation]:
    """Yield a violation for every rule whose name is already used by another rule or is in
    `taken`.
    """
    names = [rule.title for rule in rules]
    for number, (rule, name) in enumerate(zip(rules, names, strict=True)):
        if name in names[:number]:
            first = names.index(name)
            yield Violation(
                f"{number}",
                f"{name} is already the name of rules.{first}, and drops are counted by name. "
                f"Give it another name, such as name: {name}_2.",
            )
        # Another rule's kind counts as taken: the meaning of `gopher_quality` must not depend on
        # the config.
        elif name in taken and name != getattr(rule, "kind", ""):
            yield Violation(
                f"{number}.name",
                f"{name} is the name of a stage or of another kind of rule. Use another name, "
                f"such as my_{name}.",
            )


# One code per language, whatever the identifier calls it: ISO 639-1 where it has one and ISO 639-3
# otherwise. nb and nn are distinct; `no`, which both identifiers use for Bokmål as opposed to nn,
# becomes nb. All Chinese is zh.
CODE_OF = {
    "no": "nb",
    "iw": "he",
    "in": "id",
    "jw": "jv",
    "mo": "ro",
    "sh": "sr",
    "zh-Hant": "zh",
}

# The codes that each identifier can return. Listed here to reject a wrong code before the slow
# models are loaded.
_BAYES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa
fi fo fr fuv
fy ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km
kn ko ku ky
la lb lg lij ln lo lt ltg lv mg mk ml mn mr ms mt my nb ne nl nn nso oc om or pa pcm pl ps pt qu ro
ru rw sa sdh
se si sk sl sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue
zh zu zxx
"""
_COMPACT = """
aa ab af ak am ar as ay az ba be bg bh bi bn bo br bs ca ceb chr co crs cs cy da de dv dz el en eo
es et eu fa
fi fj fo fr fy ga gd gl gn gu gv ha haw he hi hmn hr ht hu hy ia id ie ig ik is it iu ja jv ka kha
kk kl km kn
ko ks ku ky la lb lg lif ln lo lt lv mfe mg mi mk ml mn mr ms mt my na nb ne nl nn nr nso ny oc om
or pa pl ps
pt qu rm rn ro ru rw sa sco sd sg si sk sl sm sn so sq sr ss st su sv sw syr ta te tg th ti tk tl
tlh tn to tr
ts tt ug uk ur uz ve vi vo war wo xh xx-Bugi xx-Goth yi yo za zh zu zzp
"""

# English names for people who write one instead of its code, where it has a profile or many
# speakers.
_NAMES = """
Afrikaans af, Albanian sq, Amharic am, Arabic ar, Armenian hy, Assamese as, Azerbaijani az,
Basque eu, Belarusian be, Bengali bn, Bosnian bs, Bulgarian bg, Burmese my, Cantonese yue,
Catalan ca, Chinese zh, Croatian hr, Czech cs, Danish da, Dutch nl, English en, Esperanto eo,
Estonian et, Farsi fa, Filipino tl, Finnish fi, French fr, Galician gl, Ganda lg, Georgian ka,
German de, Greek el, Gujarati gu, Haitian ht, Hausa ha, Hebrew he, Hindi hi, Hungarian hu,
Icelandic is, Igbo ig, Indonesian id, Irish ga, Italian it, Japanese ja, Javanese jv, Kannada kn,
Kazakh kk, Khmer km, Korean ko, Kurdish ku, Kyrgyz ky, Lao lo, Latin la, Latvian lv,
Lithuanian lt, Luxembourgish lb, Macedonian mk, Malay ms, Malayalam ml, Maltese mt, Mandarin zh,
Maori mi, Marathi mr, Mongolian mn, Nepali ne, Norwegian nb, Norwegian Bokmål nb,
Norwegian Nynorsk nn, Odia or, Oromo om, Pashto ps, Persian fa, Polish pl, Portuguese pt,
Punjabi pa, Romanian ro, Russian ru, Sanskrit sa, Serbian sr, Shona sn, Sindhi sd, Sinhala si,
Slovak sk, Slovene sl, Slovenian sl, Somali so, Sotho st, Spanish es, Sundanese su, Swahili sw,
Swedish sv, Tagalog tl, Tamil ta, Tatar tt, Telugu te, Thai th, Tibetan bo, Tigrinya ti,
Tsonga ts, Tswana tn, Turkish tr, Turkmen tk, Ukrainian uk, Urdu ur, Uyghur ug, Uzbek uz,
Vietnamese vi, Welsh cy, Xhosa xh, Yiddish yi, Yoruba yo, Zulu zu
"""

BAYES_CODES = frozenset(_BAYES.split())
COMPACT_CODES = frozenset(_COMPACT.split())


def normalize_language_code(code: str) -> str:
    """Return the pipeline's code for an identifier's label.

    Args:
        code: a label such as `zh-Hant`.

    Returns:
        The code, such as `zh`.
    """
    return CODE_OF.get(code, code)


def list_known_codes(kind: str) -> frozenset[str]:
    """List the codes that an identifier can return.

    Args:
        kind: `py3langid`, `cld2` or `combined`.

    Returns:
        Codes, without `und` (unknown).
    """
    return {"py3langid": BAYES_CODES, "cld2": COMPACT_CODES}.get(kind, BAYES_CODES | COMPACT_CODES)


def list_language_names() -> dict[str, str]:
    """List the English names of languages.

    Returns:
        Codes by name in lower case.
    """
    pairs = [" ".join(entry.split()).rpartition(" ") for entry in _NAMES.split(",")]
    return {name.lower(): code for name, _, code in pairs}


def _format_nearest_codes(code: str, known: Collection[str]) -> str:
    """Return the sentence that says which code to use instead of one that is not known."""
    word = code.strip().lower().replace("_", "-")
    if word in ("no", "nor"):
        return "Use nb for Norwegian Bokmål, or nn for Nynorsk."
    names = list_language_names()
    # en-US, and what other programs call a language
    begun = [CODE_OF.get(code, ""), CODE_OF.get(word, ""), word, word.partition("-")[0]]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.8)
    meant = next((one for one in [*begun, *(names[name] for name in close)] if one in known), None)
    if meant is not None:
        title = next((name.title() for name, value in names.items() if value == meant), "")
        return f"Use {meant}, {title}." if title else f"Use {meant}."
    if code in list_known_codes("combined"):
        return "Use data.language.kind=combined, which does."
    nearest = difflib.get_close_matches(word, sorted(known), n=3, cutoff=0.3)
    nearest = nearest or [one for one in sorted(known) if one[:1] == word[:1]][:3]
    listed = format_choices(nearest or ["en"])
    return f"Use its code of ISO 639-1; the nearest {'is' if len(nearest) < 2 else 'are'} {listed}."
