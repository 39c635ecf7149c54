"""The names of what deduplication does: rules in their order, what each tests, and how a drop reads.

Reads the config, gives names and reasons; imports nothing of the pipeline.
"""

from collections.abc import Mapping

from llmsys.config.deduplicate import DeduplicationConfig

URL, EXACT, SPANS = "url_duplicates", "exact_duplicates", "duplicate_spans"
NEAR, SUBSTRING = "near_duplicates", "duplicate_substrings"

_TESTS = {URL: "same url", EXACT: "same text", NEAR: "shares a bucket"}


def list_dedup_rules(config: DeduplicationConfig) -> list[str]:
    """Return the rules of a config in the order in which they act."""
    kinds = {
        URL: config.url.kind,
        EXACT: config.exact.kind,
        SPANS: config.spans.kind,
        NEAR: config.minhash.kind,
        SUBSTRING: config.substring.kind,
    }
    return [rule for rule, kind in kinds.items() if kind != "none"]


def build_duplicate_verdict(rule: str, kept: str, earlier: str, size: int) -> tuple[str, float | None, float | None, str]:
    """Return test, value, threshold and reason of a document that another one stays for."""
    test = _TESTS[rule]
    if earlier:
        test = f"{test} as an earlier dataset" if rule != NEAR else f"{test} with an earlier dataset"
        return test, float(size), 1.0, f"{rule}: {_TESTS[rule]} with {kept} of the earlier dataset {earlier}"
    return test, float(size), 1.0, f"{rule}: {test} with {kept}, which stays of {size} documents"


def build_too_short_verdict(
    rule: str, text: str, limits: Mapping[str, tuple[int, int]]
) -> tuple[str, float | None, float | None, str] | None:
    """Return the verdict on a text that was cut, or None when enough is left: nothing at all, or a count below its
    limit.
    """
    if not text:
        return "empty", 0.0, None, f"{rule}: nothing is left"
    for test, (count, limit) in limits.items():
        if count < limit:
            return test, float(count), float(limit), f"{rule}: {count} {test} left < {limit}"
    return None
