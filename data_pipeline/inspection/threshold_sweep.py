"""Count how many documents other thresholds would keep, from the stored statistics of a dataset.

Reads the statistics in documents/ and the values in dropped/; the crawl is not read again. The
documents that a stricter threshold drops are exact (except that a duplicate might be kept instead).
Those that a looser one returns are an upper bound, because the later tests were not applied to
them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmsys.config.custom_rules import PythonRuleConfig
from llmsys.config.language import DEFAULT, LanguageConfig, list_known_codes
from llmsys.config.loading.yaml_files import parse_yaml
from llmsys.config.quality_rules import RuleConfig
from llmsys.data_pipeline.language.rules_by_language import load_language_profiles
from llmsys.data_pipeline.rules.chain import list_thresholds
from llmsys.data_pipeline.rules.rule import ThresholdTest
from llmsys.dataset.manifest import Manifest, load_manifest
from llmsys.errors import DataError
from llmsys.storage.arrow_file import read_columns, read_schema

_RULE: TypeAdapter[Any] = TypeAdapter(RuleConfig)
LANGUAGE_SCORE = "language.min_score"
_DROPPED = ("rule", "test", "value", "threshold")


@dataclass(frozen=True)
class SweepValue:
    """One threshold: the documents that are kept for certain, and how many dropped ones might
    return.
    """

    value: float
    stay: int
    might_return: int


@dataclass(frozen=True)
class ThresholdSweep:
    """Thresholds of one field.

    Attributes:
        field: name of the field, `rule.field`.
        test: test that compares with it.
        now: its values in the dataset: one, unless languages differ.
        documents: number of kept documents.
        values: results per threshold.
    """

    field: str
    test: str
    now: tuple[float, ...]
    documents: int
    values: tuple[SweepValue, ...]


def sweep_threshold(folder: Path, wanted: str) -> ThresholdSweep:
    """Count the documents that other values of a threshold would keep.

    Args:
        folder: the dataset folder.
        wanted: `rule.field=a,b,c`.

    Returns:
        The counts for each value.

    Raises:
        DataError: if the dataset has no such rule, field or test.
    """
    name, values = _parse_sweep(wanted)
    manifest = load_manifest(folder)
    kind, _, field = name.partition(".")
    if name == LANGUAGE_SCORE:
        rules: list[Any] = [_read_language(manifest)]
        tried: list[ThresholdTest | None] = [
            ThresholdTest("score", "language_score", "below", rules[0].min_score)
        ]
    else:
        rules = _resolve_rules(manifest, folder, kind, field)
        tried = [
            _find_threshold_test(rule, field, value, name) for rule in rules for value in values
        ]
    now = sorted({getattr(_get_settings(rule), field) for rule in rules})
    limit = next((test for test in tried if test is not None), None)
    if limit is None:
        raise DataError(
            f"no test compares a stored statistic with {name}: it changes the measurement itself, "
            f"or all values are {now[0]} already. Prepare a copy of the dataset to see its effect."
        )
    column = limit.statistic if name == LANGUAGE_SCORE else f"{kind}.{limit.statistic}"
    stay, back = _count_documents(folder, manifest, (kind, column), limit, values)
    found = [
        SweepValue(value, kept, more) for value, kept, more in zip(values, stay, back, strict=True)
    ]
    documents = sum(entry.rows for entry in manifest.documents.files)
    return ThresholdSweep(name, limit.test, tuple(map(float, now)), documents, tuple(found))


def format_sweep(found: ThresholdSweep) -> str:
    """Format a sweep as a table.

    Args:
        found: the sweep.

    Returns:
        Lines of text, one per value.
    """
    now = (
        f"{found.now[0]:g}"
        if len(found.now) == 1
        else f"{found.now[0]:g} to {found.now[-1]:g} by language"
    )
    lines = [
        f"{found.field} is {now} ({found.test}), and {found.documents:,} documents are kept.",
        f"{'value':>12}{'stay':>12}{'at most':>12}",
    ]
    for row in found.values:
        lines.append(f"{row.value:>12g}{row.stay:>12,}{row.stay + row.might_return:>12,}")
    return "\n".join(
        [
            *lines,
            "Upper bound: counts documents that this test would no longer drop; later tests may "
            "still drop them.",
        ]
    )


def _parse_sweep(wanted: str) -> tuple[str, list[float]]:
    name, _, text = wanted.partition("=")
    values = [parse_yaml(part, "--sweep")[0] for part in text.split(",") if part.strip()]
    if (
        name.count(".") != 1
        or not values
        or not all(isinstance(value, int | float) for value in values)
    ):
        raise DataError(
            f"--sweep {wanted!r} cannot be parsed. Write rule.field=a,b,c: "
            "gopher_quality.min_words=30,50,80."
        )
    return name, values


def _resolve_rules(manifest: Manifest, folder: Path, kind: str, field: str) -> list[Any]:
    """Return the distinct versions of a rule over the languages of the dataset."""
    stored = manifest.config["data"].get("rules", [])
    rules = [_RULE.validate_python(rule) for rule in stored]
    rule = next((one for one in rules if one.title == kind), None)
    if rule is None:
        there = ", ".join(one.title for one in rules) or "none"
        raise DataError(
            f"{folder} was prepared without the rule {kind}. Its rules: {there}; and "
            f"{LANGUAGE_SCORE}."
        )
    known = type(_get_settings(rule)).model_fields
    if field not in known:
        fields = ", ".join(name for name in known if name.startswith(("min_", "max_")))
        raise DataError(f"{kind} has no field {field}. Its thresholds: {fields}.")
    language = _read_language(manifest)
    profiles = load_language_profiles(language, list_known_codes(language.kind))
    own = [
        profiles.get(code, profiles[DEFAULT])
        for code in manifest.languages
        if code in (language.languages or [code])
    ]
    return list(dict.fromkeys(profile.localize_rule(rule) for profile in own)) or [rule]


def _get_settings(rule: Any) -> Any:
    """Return the object whose fields are the thresholds of a rule: its section, or the user's
    own object.
    """
    if isinstance(rule, PythonRuleConfig):
        from llmsys.data_pipeline.rules.python_rule import load_python_rule  # runs the user's code

        return load_python_rule(rule)
    return rule


def _read_language(manifest: Manifest) -> LanguageConfig:
    return LanguageConfig.model_validate(manifest.config["data"]["language"])


def _find_threshold_test(rule: Any, field: str, value: float, name: str) -> ThresholdTest | None:
    """Return the test whose threshold follows the field, None if this value changes none."""
    try:
        values = rule.model_dump()
        if isinstance(rule, PythonRuleConfig):
            values["options"] = rule.options | {field: value}
        else:
            values[field] = value
        changed = _RULE.validate_python(values)
    except ValidationError as error:
        raise DataError(f"{name}={value:g} is invalid: {error.errors()[0]['msg']}.") from None
    # Compare all tests of the rule: the name of a field does not tell which test reads it.
    pairs = zip(list_thresholds(rule), list_thresholds(changed), strict=False)
    return next((one for one, other in pairs if one.threshold != other.threshold), None)


def _compute_stay_mask(values: Any, limit: ThresholdTest, threshold: float) -> Any:
    # in the stored dtype, so that a value equal to its threshold stays
    edge = values.dtype.type(threshold)
    return values <= edge if limit.drop_side == "above" else values >= edge


def _count_documents(
    folder: Path,
    manifest: Manifest,
    where: tuple[str, str],
    limit: ThresholdTest,
    values: Sequence[float],
) -> tuple[list[int], list[int]]:
    """Count, per threshold, the kept documents that stay and the documents dropped by this test
    that would pass it.

    `where` is the name of the rule and the column of kept documents with its measured value.
    """
    stay, back = [0] * len(values), [0] * len(values)
    rule, column = where
    for entry in manifest.documents.files:
        for (kept,) in _iter_columns(folder / "documents" / entry.name, [column]):
            stay = [
                count + int(_compute_stay_mask(kept, limit, value).sum())
                for count, value in zip(stay, values, strict=True)
            ]
    for entry in manifest.dropped.files:
        for rules, tests, found, thresholds in _iter_columns(
            folder / "dropped" / entry.name, _DROPPED
        ):
            ours = (rules == rule) & (tests == limit.test)
            ours &= found > thresholds if limit.drop_side == "above" else found < thresholds
            gone = found[ours]
            back = [
                count + int(_compute_stay_mask(gone, limit, value).sum())
                for count, value in zip(back, values, strict=True)
            ]
    return stay, back


def _iter_columns(path: Path, names: Sequence[str]) -> Iterator[list[Any]]:
    """Yield the named columns of each record batch of a file, without decompressing the others."""
    if missing := [name for name in names if name not in read_schema(path).names]:
        raise DataError(
            f"{path} has no column {missing[0]}, which --sweep needs. Prepare the dataset again."
        )
    for batch in read_columns(path, names.__contains__):
        yield [batch.column(name).to_numpy(zero_copy_only=False) for name in names]
