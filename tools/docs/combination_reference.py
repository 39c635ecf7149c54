"""Reference page of what cannot be combined with what, from `llmsys/config/combinations.yaml`."""

import re

from llmsys.config.combinations import Feature, RefusedChoice, load_combinations
from tools.docs.markdown import format_code, format_table, format_text

FIRST = (
    "# What combines with what\n\nA config that combines a feature with the choice of the same row "
    "ends with that message, before any process starts; … is the value that was given. What this "
    "page does not name can be combined, as far as sizes divide. "
    "`KEY!=a|b` is any value but these, and a key alone is one that is set. Keys that no config "
    "has are properties that follow from it; `model_fields_set` are the sections that are given."
)


def format_message(feature: Feature, choice: RefusedChoice) -> str:
    """Return the message of a row, with … for values that only a run has."""
    known = {
        "otherwise": feature.otherwise,
        "feature": str(feature.conditions[0]),
        "choice": str(choice.conditions[0]),
        "name": choice.key.rpartition(".")[2],
    }
    text = re.sub(
        r"(?<!\{)\{([a-z_.]+)\}(?!\})", lambda hit: known.get(hit[1], "…"), choice.message
    )
    return text.replace("{{", "{").replace("}}", "}")


def format_page() -> str:
    """Return the page: one table, the rows in the order of the file."""
    rows = [
        (
            " and ".join(map(format_code, feature.conditions)),
            " and ".join(map(format_code, choice.conditions)),
            format_text(format_message(feature, choice)),
        )
        for feature in load_combinations()
        for choice in feature.refuses
    ]
    return f"{FIRST}\n\n{format_table(('feature', 'not with', 'message'), rows)}\n"
