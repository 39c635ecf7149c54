"""Split a verb's own arguments (nodes=, step=) from the overrides of the config."""

from collections.abc import Collection, Sequence

from llmsys.errors import ConfigError


def split_arguments(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Split `words` into the verb's own values and the config's overrides; raise ConfigError for a name given twice."""
    mine: dict[str, str] = {}
    rest = []
    for word in words:
        name, _, value = word.partition("=")
        if name not in names:
            rest.append(word)
        elif name in mine:
            raise ConfigError(f"{name}={mine[name]} and {name}={value} were both given. Give {name}= once.")
        else:
            mine[name] = value
    return mine, rest
