"""Translate rules into the dialect of another tool, with the thresholds of the config.

Gopher's two rules and C4 have dialects. C4 in the dialect `paper` is the original's published code,
which DCLM repeats.
"""

from collections.abc import Sequence
from typing import assert_never, get_args

from llmsys.config.custom_rules import (
    AnnotatorConfig,
    BadWordsConfig,
    EncoderClassifierConfig,
    FastTextClassifierConfig,
    LinearClassifierConfig,
    MapperConfig,
    PerplexityConfig,
    PythonRuleConfig,
)
from llmsys.config.line_rules import (
    C4Config,
    C4DatatroveConfig,
    C4DolmaConfig,
    LineCorrectionsConfig,
)
from llmsys.config.quality_rules import (
    Dialect,
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    NativeTextConfig,
    RuleConfig,
)
from llmsys.config.source_code import SourceCodeConfig
from llmsys.errors import ConfigError

DIALECTS: tuple[str, ...] = get_args(Dialect)
C4Reading = C4Config | C4DatatroveConfig | C4DolmaConfig

_ALL: tuple[RuleConfig, ...] = (
    GopherRepetitionConfig(),
    GopherQualityConfig(),
    C4DatatroveConfig(),
)
_SYMBOLS = {"max_hash_ratio", "max_ellipsis_ratio", "max_symbol_ratio"}


def translate_rules(rules: Sequence[RuleConfig], dialect: str) -> dict[str, RuleConfig]:
    """Translate the rules that have dialects.

    Args:
        rules: the rules of a config.
        dialect: one of `DIALECTS`.

    Returns:
        Each rule that has dialects, translated, by name (`c4` for any dialect of it); the published
        rules if there is none.

    Raises:
        ConfigError: if there is no such dialect.
    """
    if dialect not in DIALECTS:
        raise ConfigError(f"{dialect} is not a dialect. Use two or more of {', '.join(DIALECTS)}.")
    return _translate_to_dialect(rules, dialect) or _translate_to_dialect(_ALL, dialect)


def _translate_to_dialect(rules: Sequence[RuleConfig], dialect: str) -> dict[str, RuleConfig]:
    found: dict[str, RuleConfig] = {}
    for rule in rules:
        match rule:
            case GopherRepetitionConfig():
                found[rule.title] = rule.model_copy(update={"dialect": dialect})
            case GopherQualityConfig():
                found[rule.title] = _translate_gopher_quality(rule, dialect)
            case C4Config() | C4DatatroveConfig() | C4DolmaConfig():
                found[rule.name or "c4"] = _translate_c4(rule, dialect)
            case (
                LineCorrectionsConfig()
                | FinewebQualityConfig()
                | NativeTextConfig()
                | SourceCodeConfig()
                | BadWordsConfig()
                | FastTextClassifierConfig()
                | LinearClassifierConfig()
                | EncoderClassifierConfig()
                | PerplexityConfig()
                | PythonRuleConfig()
                | AnnotatorConfig()
                | MapperConfig()
            ):
                pass  # every tool measures these in the same way
            case unreachable:
                assert_never(unreachable)
    return found


def _translate_gopher_quality(rule: GopherQualityConfig, dialect: str) -> GopherQualityConfig:
    """Translate the rule; limits on symbols are the published ones if the dialect measures
    symbols differently.
    """
    values = rule.model_dump() | {"dialect": dialect}
    merged = {"dolma", "dclm"}  # they count all symbols together
    if (dialect in merged) != (rule.dialect in merged):
        values = {name: value for name, value in values.items() if name not in _SYMBOLS}
    return GopherQualityConfig.model_validate(values)


def _translate_c4(rule: C4Reading, dialect: str) -> C4Reading:
    """Return the rule itself in its own dialect, and the published constants in others."""
    kinds: dict[str, type[C4Reading]] = {"datatrove": C4DatatroveConfig, "dolma": C4DolmaConfig}
    kind = kinds.get(dialect, C4Config)
    return rule if isinstance(rule, kind) else kind(curly_brackets=rule.curly_brackets)
