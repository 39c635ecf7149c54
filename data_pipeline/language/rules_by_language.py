"""Resolve the config of a dataset into rules per language, and give each language one code.

Reads the config and its language profiles, once and in the first process; tasks get the result as text. A language that
no document can have, or one without a profile, is rejected.

Codes are ISO 639-1 where it has one and ISO 639-3 otherwise. nb and nn are distinct; `no`, which both identifiers use
for Bokmål as opposed to nn, becomes nb. Traditional and simplified Chinese are both zh.
"""

from collections.abc import Sequence

from llmsys.config.data import CrawlConfig
from llmsys.config.language import (
    DictionaryWordsConfig,
    LanguageProfile,
    load_language_profiles,
    serialize_language_rules,
)
from llmsys.config.quality_rules import RuleConfig

CODE_OF = {
    "no": "nb",
    "iw": "he",
    "in": "id",
    "jw": "jv",
    "mo": "ro",
    "sh": "sr",
    "zh-Hant": "zh",
}

# The codes that each identifier can return. Listed here to reject a wrong code before the slow models are loaded.
_BAYES = """
ace af am an ar ary arz as az ba bcl be bg bn br bs ca crh cs cy da de dz el en eo es et eu ext fa fi fo fr fuv
fy ga gcf gcr gd gl gom grc gu gug guw ha hbo he hi hr ht hu hy id ig is it ja jv ka kab kik kk km kn ko ku ky
la lb lg lij ln lo lt ltg lv mg mk ml mn mr ms mt my nb ne nl nn nso oc om or pa pcm pl ps pt qu ro ru rw sa sdh
se si sk sl sn so sq sr st sv sw ta te tg th tk tl tr tt ug uk ur uz uzs vec vi vo wa wuu xh yo yue zh zu zxx
"""
_COMPACT = """
aa ab af ak am ar as ay az ba be bg bh bi bn bo br bs ca ceb chr co crs cs cy da de dv dz el en eo es et eu fa
fi fj fo fr fy ga gd gl gn gu gv ha haw he hi hmn hr ht hu hy ia id ie ig ik is it iu ja jv ka kha kk kl km kn
ko ks ku ky la lb lg lif ln lo lt lv mfe mg mi mk ml mn mr ms mt my na nb ne nl nn nr nso ny oc om or pa pl ps
pt qu rm rn ro ru rw sa sco sd sg si sk sl sm sn so sq sr ss st su sv sw syr ta te tg th ti tk tl tlh tn to tr
ts tt ug uk ur uz ve vi vo war wo xh xx-Bugi xx-Goth yi yo za zh zu zzp
"""

BAYES_CODES = frozenset(_BAYES.split())
COMPACT_CODES = frozenset(_COMPACT.split())


def normalize_language_code(code: str) -> str:
    """Return the pipeline's code for an identifier's label."""
    return CODE_OF.get(code, code)


def list_known_codes(kind: str) -> frozenset[str]:
    """List the codes that an identifier can return.

    Args:
        kind: `py3langid`, `cld2` or `combined`.

    Returns:
        Codes, without `und` (unknown).
    """
    return {"py3langid": BAYES_CODES, "cld2": COMPACT_CODES}.get(kind, BAYES_CODES | COMPACT_CODES)


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
