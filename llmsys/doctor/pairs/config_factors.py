"""Factors of a user's run: what its config chooses is the default of every case, in tiny widths.

A choice that the factors have already becomes their default. A section with further fields, such as
an attention with its own scale, becomes a separate value, called after the config.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from llmsys.config.run import RunConfig
from llmsys.config.section import Section
from llmsys.doctor.pairs.factor import Factor, Settings, Value

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
    replaced = {
        factor.name: factor
        if factor.is_event or factor.name in KEPT
        else _replace_default(factor, config, settings)
        for factor in factors
    }
    # Kinds that do not fit the tiny model's other choices, as latent attention its grouped heads.
    for factor in list(replaced.values()):
        for name, label in factor.get_value(factor.default).needs.items():
            replaced[name] = _put_first(replaced[name], replaced[name].get_value(label))
    return tuple(replaced.values())


def _put_first(factor: Factor, value: Value) -> Factor:
    others = (other for other in factor.values if other is not value)
    return replace(factor, values=(value, *others))


def _replace_default(factor: Factor, config: RunConfig, settings: Settings) -> Factor:
    chosen = [value for value in factor.values if _is_chosen(value, settings)]
    # The one that sets most: others may set a part of it.
    found = max(chosen, key=lambda value: len(str(value.settings)), default=None)
    section = _get_section(config, factor.path)
    if found is None and section is not None:
        kind = getattr(section, "kind", section)
        found = next((value for value in factor.values if value.label == kind), None)
    if found is None:
        return factor
    if isinstance(section, Section) and factor.name not in KIND_ONLY:
        changed = _list_changed_fields(section)
        made = {} if callable(found.settings) else found.settings.get(factor.path, {})
        if changed != {key: value for key, value in made.items() if key != "kind"}:
            own = Value(OWN, {factor.path: section.model_dump(mode="json")}, found.needs)
            return replace(factor, values=(own, *factor.values))
    return _put_first(factor, found)


def _list_changed_fields(section: Section) -> Settings:
    """Return the fields of a section that differ from their defaults, but for its kind."""
    stored = section.model_dump(mode="json")
    changed: Settings = {}
    for name, field in type(section).model_fields.items():
        is_default = not field.is_required() and getattr(section, name) == field.get_default(
            call_default_factory=True, validated_data={}
        )
        if name != "kind" and not is_default:
            changed[name] = stored[name]
    return changed


def _get_section(config: RunConfig, path: str) -> Any:
    found: Any = config
    for key in path.split(".") if path else ():
        found = getattr(found, key, None)
    return found if path else None


def _is_chosen(value: Value, settings: Settings) -> bool:
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
