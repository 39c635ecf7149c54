"""`section.key=value` from the command line, as one layer of values."""

from collections.abc import Sequence
from typing import Any

from llmsys.config.merge import ConfigLayer
from llmsys.config.yaml_text import MAX_DEPTH, Keys, parse_yaml
from llmsys.errors import ConfigError

COMMAND_LINE = "command line"


def read_overrides(overrides: Sequence[str]) -> ConfigLayer:
    """The layer that the arguments make; a later one wins over an earlier one.

    The value is YAML: `optimizer.learning_rate=3e-4`, `data.inputs=[a.warc.gz, b.warc.gz]`, `model.moe=null`. Entries
    of lists are counted from 0: `data.rules.0.kind=c4`. Raises one ConfigError with all arguments that are malformed.
    """
    values: dict[str, Any] = {}
    origins: dict[Keys, str] = {}
    problems = []
    for override in overrides:
        try:
            _apply_override(override, values, origins)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return ConfigLayer(values, origins)


def _apply_override(override: str, values: dict[str, Any], origins: dict[Keys, str]) -> None:
    path, equals, text = override.partition("=")
    keys = tuple(path.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(f"{override!r} is not section.key=value. Write, say, batch.sequence_length=1024.")
    if len(keys) > MAX_DEPTH:
        raise ConfigError(
            f"{override[:40]!r}… names a key {len(keys):,} levels deep, and no section is deeper than {MAX_DEPTH}. "
            f"Write, say, batch.sequence_length=1024."
        )
    value, _ = parse_yaml(text, f"command line, {path}")
    target: Any = values
    for key in keys[:-1]:
        target = _get_or_create_child(target, key)
    if isinstance(target, list) and _require_list_index(keys[-1], target):
        target[int(keys[-1])] = value
    else:
        target[keys[-1]] = value
    origins[keys] = COMMAND_LINE


def _get_or_create_child(target: Any, key: str) -> Any:
    """The mapping or list at `key` that an earlier argument wrote; a new mapping when there is none."""
    if isinstance(target, list):
        return target[int(key)] if _require_list_index(key, target) else {}
    if not isinstance(target.get(key), dict | list):
        target[key] = {}
    return target[key]


def _require_list_index(key: str, entries: list[Any]) -> bool:
    if key.isdigit() and int(key) < len(entries):
        return True
    raise ConfigError(f"{key!r} is not an entry of a list of {len(entries)}. Use 0 to {len(entries) - 1}.")
