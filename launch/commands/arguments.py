"""The words of a verb of its own (nodes=, step=), which stand among the overrides of the config."""

from collections.abc import Collection, Sequence

from llmsys.errors import ConfigError


def split_arguments(words: Sequence[str], names: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Part `words` into the values of the verb's own names and the config's overrides; ConfigError for a name twice."""
    mine: dict[str, str] = {}
    rest = []
    for word in words:
        name, _, value = word.partition("=")
        if name not in names:
            rest.append(word)
        elif name in mine:
            raise ConfigError(f"{name}={mine[name]} and {name}={value} are given. Give {name}= once.")
        else:
            mine[name] = value
    return mine, rest
