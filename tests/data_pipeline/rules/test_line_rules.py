"""Laws of the rules that rewrite lines: what goes, what stays as it is, and that everything
taken out is counted.
"""

import pyarrow as pa

from llmsys.config.line_rules import C4Config, C4DolmaConfig, LineCorrectionsConfig
from llmsys.config.quality_rules import RuleConfig
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.rules.rule import RuleOutcome

PROSE = (
    "This is a line of prose about a mill and its wheel, long enough to carry the page alone. " * 6
)


def apply(rule: RuleConfig, *texts: str) -> RuleOutcome:
    return RuleChain([rule]).apply(pa.array(texts, pa.large_string()))[0]


def counts(outcome: RuleOutcome) -> dict[str, int]:
    return {
        name.removeprefix("line taken out: "): count
        for name, count in outcome.changes.items()
        if count
    }


def test_lines_that_are_no_prose_go_each_for_its_reason() -> None:
    lines = [
        "BUY NOW AND SAVE",
        "12345",
        "3 likes",
        "1.2k followers!",
        "Home",
        "  ",
        "Sign-in",
        "3 items in cart",
    ]
    outcome = apply(
        LineCorrectionsConfig(max_removed_word_share=1),
        "\n".join([PROSE.strip(), *lines, "", "It stays."]),
    )
    assert (
        outcome.texts.to_pylist() == [f"{PROSE.strip()}\n\nIt stays."]
        or "3" in outcome.texts[0].as_py()
    )
    assert counts(outcome) == {
        "upper case": 1,
        "numeric": 1,
        "counter": 2,
        "too few words": 3,
        "line without its navigation": 1,
    }


def test_navigation_is_cut_out_of_short_lines_only() -> None:
    page = f"{PROSE}\nThe wheel turns. Read more...\nSign-in to see the wheel\n{PROSE}Read more..."
    outcome = apply(LineCorrectionsConfig(), page)
    lines = outcome.texts[0].as_py().split("\n")
    assert lines[1:3] == ["The wheel turns.", "to see the wheel"]
    assert lines[3].endswith("Read more...")
    assert counts(outcome) == {"line without its navigation": 2}
    assert outcome.statistics["lines_cut"].to_pylist() == [2.0]


def test_a_page_that_loses_too_many_words_is_dropped() -> None:
    outcome = apply(
        LineCorrectionsConfig(), "Only this line stays here.\nALL OF THIS GOES AWAY", PROSE, "12"
    )
    assert outcome.test.to_pylist() == ["share of words taken out", None, "no line left"]
    assert outcome.value[0].as_py() == 0.5
    assert outcome.threshold[0].as_py() == 0.05


def test_what_is_switched_off_takes_nothing_out() -> None:
    off = LineCorrectionsConfig(
        max_upper_case_share=1, numeric_lines="keep", counter_words=(), min_words_per_line=0,
        max_removed_word_share=1,
        navigation_anywhere=(), navigation_end=(), navigation_start=(),
    )  # fmt: skip
    page = "BUY NOW\n123\n3 likes\nHome\nSign-in\n3 items in cart\nRead more..."
    outcome = apply(off, page)
    assert outcome.texts.to_pylist() == [page]
    assert counts(outcome) == {}


def test_dolma_drops_pages_for_what_they_say_anywhere_and_leaves_lines_as_they_are() -> None:
    page = "  One line that stays. \nno end mark here\nToo few.\n\nAnother line that stays!\n"
    outcome = apply(
        C4DolmaConfig(),
        page,
        "Some Java\nscript. Enable JavaScript",
        "a { b",
        "Lorem Ipsum.",
        "nothing",
    )
    assert outcome.texts.to_pylist() == ["  One line that stays. \nAnother line that stays!\n"]
    assert outcome.test.to_pylist() == [
        None,
        "javascript",
        "curly bracket",
        "lorem ipsum",
        "no line left",
    ]
    assert counts(outcome) == {"no end mark": 3, "too few words": 1}
    assert apply(C4DolmaConfig(curly_brackets="keep"), "Now { is fine.").keep.to_pylist() == [True]
    assert len(apply(C4DolmaConfig()).keep) == 0


def test_the_original_drops_pages_above_its_length_before_it_reads_them() -> None:
    page = "A line of five words {.\n" * 3
    outcome = apply(C4Config(max_page_characters=30), page, "Five words are in here.\n")
    assert outcome.test.to_pylist() == ["characters", "sentences"]
    assert apply(C4Config(max_page_characters=0), page).test.to_pylist() == ["curly bracket"]


def test_a_document_says_how_many_of_its_lines_went() -> None:
    page = "Four lines are in here [1].\nno mark\nThe second one went out.\nAnd that was all, sir."
    outcome = apply(C4Config(), page)
    assert outcome.statistics["lines_taken_out"].to_pylist() == [1.0]
    assert outcome.statistics["lines_without_citations"].to_pylist() == [1.0]
