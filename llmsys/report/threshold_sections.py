"""Build blocks about one threshold: the number of documents near it, and the nearest ones on both
sides.

Reads `ThresholdReport`s.

Invariants:
- The number of documents per test, and of characters of each, is bounded, whatever the dataset's
  size.
"""

from collections.abc import Sequence
from itertools import groupby

from llmsys.dataset.manifest_section import (
    CLOSE,
    NearThresholdDocument,
    ThresholdReport,
    ThresholdSide,
)
from llmsys.report.html_markup import (
    Html,
    build_definition_list,
    build_details,
    build_tag,
    format_bytes,
    format_number,
    format_user_text,
    join_html,
)

URL_CHARACTERS = 2_000  # of an endless address; a longer one says how much is missing
EARLY_EXIT = (
    "A document is dropped at the first test that it fails, and later tests are not run on it. A "
    "looser threshold therefore keeps at most as many more documents as are counted here. Kept "
    "documents passed every test; their values are in the columns of documents/. llmsys prepare "
    "CONFIG --sweep rule.field=a,b,c counts what other thresholds would keep."
)


def build_early_exit_note() -> Html:
    """Return a note on how to read the counts by test: a document is dropped by the first test
    that fails.
    """
    return build_tag("p", EARLY_EXIT, class_="muted")


def build_threshold_block(border: ThresholdReport) -> Html:
    """Return one test: the counts on both sides, and the documents nearest to the threshold."""
    gone, stays = (
        ("just above", "at or just below")
        if border.drops == "above"
        else ("just below", "at or just above")
    )
    sides = [
        _build_side(f"Dropped, {gone} the threshold", border.dropped),
        _build_side(f"Kept, {stays} the threshold", border.kept),
    ]
    return build_tag(
        "div",
        build_tag("p", build_tag("b", format_rule(border))),
        build_tag("p", _format_near_counts(border)),
        build_tag("div", sides, class_="grid near"),
    )


def format_rule(border: ThresholdReport) -> str:
    """Return the test as a condition: words < 50 is dropped."""
    sign = ">" if border.drops == "above" else "<"
    return f"{border.test.replace('_', ' ')} {sign} {_format_thresholds(border)} is dropped"


def _format_thresholds(border: ThresholdReport) -> str:
    """Return the threshold; where languages differ, the lowest and the highest."""
    low, high = border.thresholds[0], border.thresholds[-1]
    return (
        format_number(low)
        if low == high
        else f"{format_number(low)} to {format_number(high)} (by language)"
    )


def _format_near_counts(border: ThresholdReport) -> str:
    dropped, kept = border.dropped, border.kept
    return (
        f"{format_number(dropped.documents)} dropped ({format_bytes(dropped.bytes)}), "
        f"{format_number(dropped.close)} of them within "
        f"{CLOSE:.0%} of the threshold; {format_number(kept.documents)} kept in the end, "
        f"{format_number(kept.close)} of them "
        f"as near."
    )


def _build_side(heading: str, side: ThresholdSide) -> Html:
    documents = [_build_document(one) for one in side.nearest] or build_tag(
        "p", "None.", class_="muted"
    )
    return build_tag("div", build_tag("h4", heading), documents)


def _build_url(url: str) -> Html:
    left = len(url) - URL_CHARACTERS
    more = (
        build_tag("span", f" … {format_number(left)} more characters", class_="muted")
        if left > 0
        else None
    )
    return build_tag("span", url[:URL_CHARACTERS], more)


def _build_document(near: NearThresholdDocument) -> Html:
    facts = [
        ("value", format_number(near.value)),
        ("threshold", format_number(near.threshold)),
        ("page", _build_url(near.url)),
    ]
    if near.reason:
        facts.append(("reason", join_html(near.reason)))
    return build_tag(
        "div", build_definition_list(facts), format_user_text(near.excerpt), class_="example"
    )


def build_silent_tests_table(reports: Sequence[ThresholdReport]) -> Html | None:
    """Return the tests that dropped nothing, each with the kept documents nearest to its
    threshold.
    """
    silent = [
        border for border in reports if not border.dropped.documents and border.kept.documents
    ]
    if not silent:
        return None
    rules = [
        build_tag(
            "div",
            build_tag("h4", rule.replace("_", " ")),
            [_build_silent_test(border) for border in group],
        )
        for rule, group in groupby(silent, key=lambda border: border.rule)
    ]
    return build_details(
        [
            build_tag("b", "Tests that dropped nothing"),
            build_tag("span", f" {len(silent)}", class_="muted"),
        ],
        rules,
    )


def _build_silent_test(border: ThresholdReport) -> Html:
    nearest = ", ".join(format_number(one.value) for one in border.kept.nearest)
    summary = [format_rule(border), build_tag("span", f" nearest kept: {nearest}", class_="muted")]
    return build_details(summary, [_build_document(one) for one in border.kept.nearest])
