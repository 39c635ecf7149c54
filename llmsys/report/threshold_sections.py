"""What the page says about one threshold: how many documents lie near it, and the nearest ones on both sides.

Reads `Border`s; gives pieces of the funnel's section. Promises: a page shows as many documents per test, and as many
characters of each, for a small dataset and for a large one.
"""

from collections.abc import Sequence
from itertools import groupby

from llmsys.report.markup import Html, bytes_amount, definitions, fold, join, number, tag, user_text
from llmsys.threshold import CLOSE, Border, NearThreshold, Side

URL_CHARACTERS = 2_000  # of an endless address; a longer one says how much is missing
EARLY_EXIT = (
    "A document leaves at the first test that it fails, and the tests behind that one are not asked. So a looser "
    "threshold gives back no more documents than are counted here, and how many fail one test alone cannot be read "
    "from this page. Documents that stay have passed every test; their values stand in the columns of documents/. "
    "llmsys prepare CONFIG --sweep rule.field=a,b,c counts what other thresholds would keep."
)


def early_exit_note() -> Html:
    """What the counts by test say, and what they do not."""
    return tag("p", EARLY_EXIT, class_="muted")


def border_block(border: Border) -> Html:
    """One test: the counts on both sides, and the documents nearest to the threshold."""
    gone, stays = ("just above", "at or just below") if border.drops == "above" else ("just below", "at or just above")
    sides = [
        _side(f"Dropped, {gone} the threshold", border.dropped),
        _side(f"Kept, {stays} the threshold", border.kept),
    ]
    return tag(
        "div", tag("p", tag("b", rule_text(border))), tag("p", _near(border)), tag("div", sides, class_="grid near")
    )


def rule_text(border: Border) -> str:
    """The test as it decides: words < 50 is dropped."""
    sign = ">" if border.drops == "above" else "<"
    return f"{border.test.replace('_', ' ')} {sign} {_thresholds(border)} is dropped"


def _thresholds(border: Border) -> str:
    """The threshold; where languages differ, the least and the greatest."""
    low, high = border.thresholds[0], border.thresholds[-1]
    return number(low) if low == high else f"{number(low)} to {number(high)} (by language)"


def _near(border: Border) -> str:
    dropped, kept = border.dropped, border.kept
    return (
        f"{number(dropped.documents)} dropped ({bytes_amount(dropped.bytes)}), {number(dropped.close)} of them within "
        f"{CLOSE:.0%} of the threshold; {number(kept.documents)} kept in the end, {number(kept.close)} of them "
        f"as near."
    )


def _side(heading: str, side: Side) -> Html:
    documents = [_document(one) for one in side.nearest] or tag("p", "None.", class_="muted")
    return tag("div", tag("h4", heading), documents)


def _build_url(url: str) -> Html:
    left = len(url) - URL_CHARACTERS
    more = tag("span", f" … {number(left)} more characters", class_="muted") if left > 0 else None
    return tag("span", url[:URL_CHARACTERS], more)


def _document(near: NearThreshold) -> Html:
    facts = [("value", number(near.value)), ("threshold", number(near.threshold)), ("page", _build_url(near.url))]
    if near.reason:
        facts.append(("reason", join(near.reason)))
    return tag("div", definitions(facts), user_text(near.excerpt), class_="example")


def silent_tests(borders: Sequence[Border]) -> Html | None:
    """The tests that dropped nothing, each with the kept documents that came nearest to its threshold."""
    silent = [border for border in borders if not border.dropped.documents and border.kept.documents]
    if not silent:
        return None
    rules = [
        tag("div", tag("h4", rule.replace("_", " ")), [_silent(border) for border in group])
        for rule, group in groupby(silent, key=lambda border: border.rule)
    ]
    return fold([tag("b", "Tests that dropped nothing"), tag("span", f" {len(silent)}", class_="muted")], rules)


def _silent(border: Border) -> Html:
    nearest = ", ".join(number(one.value) for one in border.kept.nearest)
    summary = [rule_text(border), tag("span", f" nearest kept: {nearest}", class_="muted")]
    return fold(summary, [_document(one) for one in border.kept.nearest])
