"""The same rule in the words of another tool.

Reads the rules of a config, gives for each family that tools read differently (Gopher's two rules, C4) its reading in a
named dialect, with the thresholds of the config. C4 in the dialect `paper` is the original's published code, which is
also what DCLM repeats.
"""

from collections.abc import Sequence
from typing import get_args

from llmsys.config.line_rules import C4Config, C4DatatroveConfig, C4DolmaConfig
from llmsys.config.quality_rules import Dialect, GopherQualityConfig, GopherRepetitionConfig, RuleConfig
from llmsys.errors import ConfigError

DIALECTS: tuple[str, ...] = get_args(Dialect)
C4Reading = C4Config | C4DatatroveConfig | C4DolmaConfig

_ALL: tuple[RuleConfig, ...] = (GopherRepetitionConfig(), GopherQualityConfig(), C4DatatroveConfig())
_SYMBOLS = {"max_hash_ratio", "max_ellipsis_ratio", "max_symbol_ratio"}


def translate_rules(rules: Sequence[RuleConfig], dialect: str) -> dict[str, RuleConfig]:
    """The rules of a config that have dialects, each read in this one, by name (`c4` for any reading of it); when it
    has none of them, the published ones.

    Raises:
        ConfigError: there is no such dialect.
    """
    if dialect not in DIALECTS:
        raise ConfigError(f"{dialect} is no dialect. Use two or more of {', '.join(DIALECTS)}.")
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
            case _:
                pass
    return found


def _translate_gopher_quality(rule: GopherQualityConfig, dialect: str) -> GopherQualityConfig:
    """Limits on symbols stay where the dialect has them, and are the published ones where it has others."""
    values = rule.model_dump() | {"dialect": dialect}
    together = {"dolma", "dclm"}
    if (dialect in together) != (rule.dialect in together):
        values = {name: value for name, value in values.items() if name not in _SYMBOLS}
    return GopherQualityConfig.model_validate(values)


def _translate_c4(rule: C4Reading, dialect: str) -> C4Reading:
    """The config's own constants for its own reading, the published ones for others."""
    kinds: dict[str, type[C4Reading]] = {"datatrove": C4DatatroveConfig, "dolma": C4DolmaConfig}
    kind = kinds.get(dialect, C4Config)
    return rule if isinstance(rule, kind) else kind(curly_brackets=rule.curly_brackets)
