"""Factors of a user's run: what its config chooses is the default of every case, in tiny widths.

A choice that the factors have already becomes their default. A section with further fields, such as
an attention with its own scale, becomes a value of its own, called after the config.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.doctor.pairs.factors import Factor, Settings, Value

OWN = "as in the config"

# Sections whose numbers belong to a step of this size, or to widths that a tiny model does not
# have: only the kind of the run is taken over.
KIND_ONLY = (
    "schedule",
    "ramp",
    "length stages",
    "attention",
    "position",
    "rope scaling",
    "parametrization",
    "objective",
)
# They follow from the machine and its memory, not from what a run computes.
KEPT = (
    "shard",
    "replicate",
    "inspection",
    "heads",
    "accumulation",
    "matmuls",
    "expert matmuls",
    "compile",
    "recurrent layers",
)


def replace_defaults(factors: Sequence[Factor], config: RunConfig) -> tuple[Factor, ...]:
    """Return the factors with the choices of a config as defaults.

    Args:
        factors: the factors.
        config: the user's run.

    Returns:
        As many factors, in the same order.
    """
    settings = config.model_dump(mode="json")
    return tuple(
        factor if factor.is_event or factor.name in KEPT else _replace_default(factor, settings)
        for factor in factors
    )


def _replace_default(factor: Factor, settings: Settings) -> Factor:
    found = next((value for value in factor.values if _is_chosen(factor, value, settings)), None)
    section = _get(settings, factor.path) if factor.path else None
    kind = section.get("kind") if isinstance(section, dict) else section
    if found is None and kind is not None:
        found = next((value for value in factor.values if value.label == kind), None)
    if found is None:
        return factor
    if (
        isinstance(section, dict)
        and factor.name not in KIND_ONLY
        and not _is_chosen(factor, found, settings)
    ):
        own = Value(OWN, {factor.path: section}, found.needs)
        return replace(factor, values=(own, *factor.values))
    return replace(
        factor, values=(found, *(value for value in factor.values if value is not found))
    )


def _is_chosen(factor: Factor, value: Value, settings: Settings) -> bool:
    """Return whether the config has all that a value sets, and it sets something."""
    made = {} if callable(value.settings) else value.settings
    return bool(made) and all(
        _contains(_get(settings, key), wanted) for key, wanted in made.items()
    )


def _contains(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            _contains(found.get(key), value) for key, value in wanted.items()
        )
    return bool(found == wanted)


def _get(settings: Settings, key: str) -> Any:
    found: Any = settings
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
