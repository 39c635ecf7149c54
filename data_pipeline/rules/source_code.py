"""Name the programming language and the license of source files, and drop files by them, by their
lines and by marks of generated files.

The limits are those of StarCoder (Li et al. 2023, section 3.1): lines longer than 1,000 characters,
100 on average, and less than a quarter of letters and digits.

Invariants:
- Answers are columns of kept documents; reasons of drops name the answer that decided.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from llmsys.config.source_code import UNKNOWN, SourceCodeConfig
from llmsys.data_pipeline.rules.document_row import DocumentRow
from llmsys.data_pipeline.rules.rule import (
    DocumentBatch,
    Floats,
    RuleVerdicts,
    ThresholdTest,
    apply_thresholds,
    compute_share,
    prepend_test,
)
from llmsys.data_pipeline.text.licenses import convert_field, find_license, is_allowed
from llmsys.data_pipeline.text.programming_languages import get_language_table
from llmsys.errors import ConfigError

_ALPHANUMERIC = (string.ascii_letters + string.digits).encode()
_MARKER_CHARACTERS = 2_000  # of the first lines


class SourceCodeRule:
    """A rule for files of source code.

    Args:
        config: languages, licenses and limits.

    Raises:
        ConfigError: a language has no such name.
    """

    kind = "source_code"

    def __init__(self, config: SourceCodeConfig) -> None:
        self._config = config
        self.limits = list_source_code_limits(config)
        self._languages = list_languages(config)
        self._licenses = frozenset(name.lower() for name in config.licenses)
        self._markers = [marker.lower() for marker in config.generated_markers]

    def apply(self, batch: DocumentBatch) -> RuleVerdicts:
        """Return the verdicts: generated, language, license, then the limits."""
        languages = [_find_language(row, self._config.path_field) for row in batch.rows]
        licenses = [_find_license(row, self._config.license_field) for row in batch.rows]
        verdicts = apply_thresholds(self.limits, _measure_lines(batch), len(batch))
        # the last one that is prepended is tested first
        tests = (
            ("license", list(map(self._find_wrong_license, licenses))),
            ("language", list(map(self._find_wrong_language, languages))),
            ("generated", list(map(self._find_marker, batch.texts))),
        )
        matches: dict[int, str] = {}
        for test, found in tests:
            fails: npt.NDArray[np.bool_] = np.array([one is not None for one in found], np.bool_)
            verdicts = prepend_test(verdicts, test, fails)
            matches |= {row: one for row, one in enumerate(found) if one is not None}
        columns = {
            "programming_language": pa.array(languages, pa.large_string()),
            "license": pa.array(licenses, pa.large_string()),
        }
        return replace(verdicts, matches=matches, columns=columns)

    def _find_wrong_language(self, language: str) -> str | None:
        return language if self._languages and language not in self._languages else None

    def _find_wrong_license(self, license: str) -> str | None:
        if license == UNKNOWN:
            return UNKNOWN if self._config.drop_unknown_license else None
        wrong = self._licenses and not is_allowed(license, self._licenses)
        return license if wrong else None

    def _find_marker(self, text: str) -> str | None:
        lines = text[:_MARKER_CHARACTERS].lower().split("\n", self._config.marker_lines)
        head = "\n".join(lines[: self._config.marker_lines])
        return next((marker for marker in self._markers if marker in head), None)


def list_source_code_limits(config: SourceCodeConfig) -> Sequence[ThresholdTest]:
    """List the tests that compare a statistic with a threshold.

    Args:
        config: the rule and its limits.

    Returns:
        The tests, in the order in which they apply.
    """
    return (
        ThresholdTest("longest line", "longest_line", "above", config.max_line_length),
        ThresholdTest("mean line length", "mean_line_length", "above", config.max_mean_line_length),
        ThresholdTest(
            "share of letters and digits",
            "alphanumeric_share",
            "below",
            config.min_alphanumeric_share,
        ),
    )


def list_languages(config: SourceCodeConfig) -> frozenset[str]:
    """Return the names of the languages to keep, as the column has them.

    Args:
        config: the rule; languages by name or alias.

    Returns:
        The names; empty for all languages.

    Raises:
        ConfigError: a language has no such name.
    """
    found = set()
    for name in config.languages:
        table = get_language_table()
        language = table.find_name(name)
        if language is None:
            near = get_close_matches(name.casefold(), table.list_names(), 1)
            hint = f"Did you mean {table.find_name(near[0])}?" if near else "See"
            raise ConfigError(
                f"the rule {config.title}: {name!r} is no language that Pygments names. {hint} "
                "https://pygments.org/languages has them."
            )
        found.add(language)
    return frozenset(found)


def _measure_lines(batch: DocumentBatch) -> Mapping[str, Floats]:
    lines = [text.splitlines() or [""] for text in batch.texts]
    longest = batch.to_counts(max(map(len, some)) for some in lines)
    characters = batch.to_counts(sum(map(len, some)) for some in lines)
    alphanumeric = batch.to_counts(map(_count_alphanumeric, batch.texts))
    return {
        "longest_line": longest.astype(np.float64),
        "mean_line_length": compute_share(characters, batch.to_counts(map(len, lines))),
        "alphanumeric_share": compute_share(alphanumeric, batch.character_counts),
    }


def _count_alphanumeric(text: str) -> int:
    if not text.isascii():
        return sum(map(str.isalnum, text))
    # 20 times faster than a test of each character
    return len(text) - len(text.encode().translate(None, _ALPHANUMERIC))


def _find_language(row: DocumentRow, path_field: str | None) -> str:
    path = _read_field(row.fields, path_field)
    if not isinstance(path, str) or not path:
        path = unquote(urlsplit(row.url).path)
    return get_language_table().find_language(path.replace("\\", "/"), row.text)


def _find_license(row: DocumentRow, license_field: str | None) -> str:
    found = find_license(row.text)
    if found == UNKNOWN and license_field is not None:
        return convert_field(_read_field(row.fields, license_field))
    return found


def _read_field(fields: Mapping[str, Any], name: str | None) -> Any:
    """Return a field of the input, or a field of a mapping for `a.b`; None without it."""
    if name is None or name in fields:
        return None if name is None else fields[name]
    value: Any = fields
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
