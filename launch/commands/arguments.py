"""Parse arguments of verbs: numbers of options, and a verb's own words (nodes=, step=) among
overrides.
"""

import argparse
import math
from collections.abc import Callable, Collection, Sequence

from llmsys.errors import ConfigError


def parse_count(minimum: int) -> Callable[[str], int]:
    """Return a `type=` of argparse for whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number. Use digits, such as 8"
            ) from None
        if value < minimum:
            raise argparse.ArgumentTypeError(
                f"{value} is too small: the minimum is {minimum}. Use {minimum} or more"
            )
        return value

    return parse


def parse_positive_number(text: str) -> float:
    """Parse a finite number above 0, as a `type=` of argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number above 0. Use digits, such as 8 or 0.5"
        )
    return value


def parse_probability(text: str) -> float:
    """Parse a number above 0 and below 1, as a `type=` of argparse."""
    value = parse_positive_number(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(
            f"{text} is not a probability: it must be below 1, which nothing is known with. Use, "
            "for example, 0.9"
        )
    return value


def split_arguments(
    words: Sequence[str], names: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Split `words` into the verb's own values and the config's overrides; raise ConfigError for
    a name given twice.
    """
    mine: dict[str, str] = {}
    rest = []
    for word in words:
        name, _, value = word.partition("=")
        if name not in names:
            rest.append(word)
        elif name in mine:
            raise ConfigError(
                f"{name}={mine[name]} and {name}={value} were both given. Give {name}= once."
            )
        else:
            mine[name] = value
    return mine, rest
