"""Count documents and bytes through the stages, and the drops of each test with examples.

Invariants:
    - Sums and examples do not depend on the order of tasks.
    - The examples of a test are the dropped documents with the smallest ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llmsys.data_pipeline.core.document_schema import EXCERPT_CHARACTERS
from llmsys.data_pipeline.core.input_fields import FIELDS
from llmsys.dataset.manifest import DropCount, DropExample, FunnelStage

EXAMPLES = 3  # per test, which bounds the manifest
EXAMPLE_CHARACTERS = 400
# Funnel names of the two optional stages after collecting.
DECONTAMINATE = "decontaminate"
PII = "pii"
_COUNTS = ("documents_in", "bytes_in", "documents_out", "bytes_out")


class FunnelCounts:
    """Counts of one task, or the sum of several."""

    def __init__(self, plain: Mapping[str, Any] | None = None) -> None:
        """Start empty, or from the result of an earlier `to_dict()`.

        Args:
            plain: The result of `to_dict()`, such as the `tally` of a task record. Nested
                dictionaries of stages and changes are copied. Default: None, all counts are zero.
        """
        plain = plain or {"stages": {}, "drops": []}
        self.changes: dict[str, dict[str, int]] = {
            stage: dict(counts) for stage, counts in plain.get("changes", {}).items()
        }
        self.stages: dict[str, dict[str, int]] = {
            stage: dict(counts) for stage, counts in plain["stages"].items()
        }
        self.drops: dict[tuple[str, str, str], dict[str, Any]] = {
            (drop["stage"], drop["rule"], drop["test"]): dict(drop) for drop in plain["drops"]
        }

    def add_amounts(self, stage: str, **amounts: int) -> None:
        """Add to the documents and bytes that enter and leave a stage.

        Args:
            stage: Name of the stage in the funnel; a stage that is new begins with zeros.
            **amounts: Amounts by name: `documents_in`, `bytes_in`, `documents_out`, `bytes_out`.
                Those that are left out do not change.

        Raises:
            KeyError: A name is none of the four.
        """
        counts = self.stages.setdefault(stage, dict.fromkeys(_COUNTS, 0))
        for name, amount in amounts.items():
            counts[name] += amount

    def add_drops(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count dropped documents.

        Args:
            rows: Rows of `DROPPED_SCHEMA`. Each counts once for its stage, rule and test, with its
                `bytes`; those with the smallest ids become the examples of the test.
        """
        for row in rows:
            self._add_drops(
                row["stage"], row["rule"], row["test"], 1, row["bytes"], [_build_example(row)]
            )

    def add_drop_count(self, stage: str, test: str, documents: int) -> None:
        """Count drops that have neither id nor size, such as unreadable records.

        Args:
            stage: Name of the stage; the rule of the drops has the same name.
            test: What failed, as the funnel shows it.
            documents: Number of drops. They have no bytes and no examples.
        """
        self._add_drops(stage, stage, test, documents, 0, [])

    def add_changes(self, stage: str, amounts: Mapping[str, int]) -> None:
        """Count changes to documents that stay, such as removed lines.

        Args:
            stage: Name of the stage in the funnel.
            amounts: Number of changes by their name. The funnel leaves out those that are zero.
        """
        counts = self.changes.setdefault(stage, {})
        for name, amount in amounts.items():
            counts[name] = counts.get(name, 0) + amount

    def merge_counts(self, other: "FunnelCounts") -> None:
        """Add the counts of another task.

        Args:
            other: Counts of other documents; not changed. The order in which tasks are merged does
                not change the result.
        """
        for stage, counts in other.stages.items():
            self.add_amounts(stage, **counts)
        for stage, amounts in other.changes.items():
            self.add_changes(stage, amounts)
        for drop in other.drops.values():
            self._add_drops(
                drop["stage"],
                drop["rule"],
                drop["test"],
                drop["documents"],
                drop["bytes"],
                drop["examples"],
            )

    def replace_stage(self, stage: str, old: "FunnelCounts", new: "FunnelCounts") -> None:
        """Replace what some documents added to the amounts and changes of a stage.

        Args:
            stage: Name of the stage in the funnel.
            old: What these documents added.
            new: What they add now.
        """
        for sign, other in ((-1, old), (1, new)):
            amounts = other.stages.get(stage, {})
            self.add_amounts(stage, **{name: sign * count for name, count in amounts.items()})
            changes = other.changes.get(stage, {})
            self.add_changes(stage, {name: sign * count for name, count in changes.items()})

    def _add_drops(
        self,
        stage: str,
        rule: str,
        test: str,
        documents: int,
        size: int,
        examples: Sequence[dict[str, Any]],
    ) -> None:
        empty = {
            "stage": stage,
            "rule": rule,
            "test": test,
            "documents": 0,
            "bytes": 0,
            "examples": [],
        }
        drop = self.drops.setdefault((stage, rule, test), empty)
        drop["documents"] += documents
        drop["bytes"] += size
        # The smallest ids, so that examples do not depend on the order of tasks.
        candidates = [*drop["examples"], *examples]
        drop["examples"] = sorted(candidates, key=lambda example: (example["id"], example["url"]))[
            :EXAMPLES
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as values that JSON can hold."""
        return {"stages": self.stages, "drops": list(self.drops.values()), "changes": self.changes}

    def build_funnel(self, order: Sequence[str]) -> tuple[FunnelStage, ...]:
        """Return the stages in an order, the tests of each by falling number of drops.

        Args:
            order: Names of the stages. One without counts gets zeros; one that is not named is left
                out.

        Returns:
            One stage per name.
        """
        return tuple(self._build_stage(stage) for stage in order)

    def _build_stage(self, stage: str) -> FunnelStage:
        # A stage that saw no document still has its row of zeros.
        self.add_amounts(stage)
        drops = [drop for drop in self.drops.values() if drop["stage"] == stage]
        drops.sort(key=lambda drop: (-drop["documents"], drop["rule"], drop["test"]))
        changed = {
            name: amount for name, amount in sorted(self.changes.get(stage, {}).items()) if amount
        }
        dropped = tuple(_build_drop(drop) for drop in drops)
        return FunnelStage(stage=stage, **self.stages[stage], dropped=dropped, changed=changed)


def _build_example(row: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: row[name] for name in ("id", "url", "value", "threshold", "reason")}
    return {**fields, "excerpt": row["text"][:EXAMPLE_CHARACTERS]}


def _build_drop(drop: Mapping[str, Any]) -> DropCount:
    examples = tuple(
        DropExample(**{name: value for name, value in example.items() if name != "id"})
        for example in drop["examples"]
    )
    return DropCount(
        rule=drop["rule"],
        test=drop["test"],
        documents=drop["documents"],
        bytes=drop["bytes"],
        examples=examples,
    )


def sort_in_file_order(drops: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort the dropped documents of one file by their offset in it.

    Args:
        drops: Rows of `DROPPED_SCHEMA`.

    Returns:
        The rows in an order that does not depend on blocks and batches.
    """
    return sorted(drops, key=lambda drop: drop["offset"])


def build_dropped_rows(
    documents: Iterable[Mapping[str, Any]],
    stage: str,
    verdicts: Iterable[tuple[str, float | None, float | None, str]],
) -> list[dict[str, Any]]:
    """Build the rows of `DROPPED_SCHEMA` for dropped documents.

    Args:
        documents: Mappings with id, url, file, offset and text.
        stage: Stage that drops them; also the name of the rule.
        verdicts: Test, value, threshold and reason of each document.

    Returns:
        One row per document, with its further fields. Texts are cut to `EXCERPT_CHARACTERS`.
    """
    return [
        {
            **{name: document[name] for name in ("id", "url", "file", "offset")},
            "stage": stage,
            "rule": stage,
            "test": test,
            "value": value,
            "threshold": threshold,
            "reason": reason,
            "bytes": len((document["text"] or "").encode()),
            "text": (document["text"] or "")[:EXCERPT_CHARACTERS],
            **({FIELDS: document[FIELDS]} if FIELDS in document else {}),
        }
        for document, (test, value, threshold, reason) in zip(documents, verdicts, strict=True)
    ]


def format_reason(
    rule: str, test: str, value: float | None, threshold: float | None, match: str | None = None
) -> str:
    """Format the reason for a drop in one line, such as `gopher_quality: mean word length 11.2 >
    10`.

    Args:
        rule: name of the rule.
        test: name of the failed test: the measured quantity, or a description such as `curly
            bracket` if it has no value.
        value: the measured value; None if nothing is measured.
        threshold: its limit; a value above it was dropped for being too large, one below for being
            too small.
        match: the match of the test, shown in brackets.

    Returns:
        One line of text.
    """
    found = f" ({match})" if match else ""
    if value is None or threshold is None:
        return f"{rule}: {test}{found}"
    return (
        f"{rule}: {test} {format_measured_value(value)} {'>' if value > threshold else '<'} "
        f"{threshold:.10g}{found}"
    )


def format_measured_value(value: float) -> str:
    """Format a number for reasons.

    Args:
        value: the number.

    Returns:
        Four significant digits, and all digits before the decimal point.
    """
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
