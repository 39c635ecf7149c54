"""Rules of a config with other thresholds."""

import json
from typing import Any

Rules = list[dict[str, Any]]


def change_rules(rules: Rules, values: dict[str, float]) -> Rules:
    """Return rules with other values, by the number of the rule and the field: `4.min_words`."""
    changed: Rules = json.loads(json.dumps(rules))
    for name, value in values.items():
        number, field = name.split(".")
        changed[int(number)][field] = value
    return changed
