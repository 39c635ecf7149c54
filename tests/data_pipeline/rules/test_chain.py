"""Laws of the rule chain: order, independence of the batch, reasons that can be read, statistics
that explain them.
"""

import random

import numpy as np
import pyarrow as pa
import pytest
from pydantic import TypeAdapter, ValidationError

from llmsys.config.line_rules import C4Config, C4DatatroveConfig
from llmsys.config.quality_rules import (
    FinewebQualityConfig,
    GopherQualityConfig,
    GopherRepetitionConfig,
    RuleConfig,
)
from llmsys.data_pipeline.core.funnel import format_reason
from llmsys.data_pipeline.rules.chain import RuleChain
from llmsys.data_pipeline.rules.rule import RuleOutcome, WordSplitters
from llmsys.data_pipeline.text.word_columns import WordSplitter

ALL = (
    GopherRepetitionConfig(),
    GopherQualityConfig(min_words=5),
    C4DatatroveConfig(min_sentences=1),
    FinewebQualityConfig(),
)
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "that",
    "mill",
    "wheel",
    "water",
    "stone",
    "people",
    "town",
    "river",
    "bridge",
    "tall",
]


def text(seed: int) -> str:
    source = random.Random(seed)
    lines = [
        " ".join(source.choices(WORDS, k=source.randint(2, 14)))
        + source.choice([".", "?", "", "..."])
        for _ in range(12)
    ]
    return "\n".join(source.choices(lines, k=source.randint(4, 14)))


TEXTS = [text(seed) for seed in range(120)]


def apply(texts: list[str], rules: tuple[RuleConfig, ...] = ALL) -> list[RuleOutcome]:
    return RuleChain(rules).apply(pa.array(texts, pa.large_string()))


def columns(outcomes: list[RuleOutcome]) -> list[object]:
    return [
        (o.rule, o.keep.to_pylist(), o.test.to_pylist(), o.value.to_pylist(),
            o.threshold.to_pylist(),
         o.texts.to_pylist(), {name: column.to_pylist() for name, column in o.statistics.items()},
         o.changes)
        for o in outcomes
    ]  # fmt: skip


def test_each_rule_sees_what_the_rules_before_it_kept() -> None:
    outcomes = apply(TEXTS)
    assert [outcome.rule for outcome in outcomes] == [rule.kind for rule in ALL]
    expected = len(TEXTS)
    for outcome in outcomes:
        assert (
            len(outcome.keep)
            == len(outcome.test)
            == len(outcome.value)
            == len(outcome.threshold)
            == expected
        )
        expected = outcome.keep.true_count
        assert len(outcome.texts) == expected
        assert {len(column) for column in outcome.statistics.values()} == {expected}
        assert outcome.test.null_count == expected
    assert 0 < expected < len(TEXTS)


def test_a_verdict_does_not_depend_on_the_neighbours() -> None:
    together = apply(TEXTS)[0]
    alone = [apply([one])[0] for one in TEXTS]
    assert together.test.to_pylist() == [outcome.test[0].as_py() for outcome in alone]
    assert together.value.to_pylist() == [outcome.value[0].as_py() for outcome in alone]
    for name, column in together.statistics.items():
        assert column.to_pylist() == [
            outcome.statistics[name][0].as_py() for outcome in alone if outcome.keep[0].as_py()
        ]


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = columns(apply(TEXTS))
    monkeypatch.setattr("llmsys.data_pipeline.rules.chain._SLICE_BYTES", 1_000)
    assert columns(apply(TEXTS)) == whole


def test_what_the_memo_holds_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, fresh = RuleChain(ALL), columns(apply(TEXTS))
    column = pa.array(TEXTS, pa.large_string())
    chain.apply(column.take(pa.array(list(reversed(range(len(TEXTS)))))))
    assert columns(chain.apply(column)) == fresh
    monkeypatch.setattr("llmsys.data_pipeline.rules.chain._SLICE_BYTES", 1_000)
    assert (
        columns(RuleChain(ALL, WordSplitters(WordSplitter(memo_chunks=1))).apply(column)) == fresh
    )


def test_no_documents_and_no_rules_are_fine() -> None:
    assert apply(TEXTS, ()) == []
    outcomes = apply([])
    assert [len(outcome.keep) for outcome in outcomes] == [0, 0, 0, 0]
    assert [outcome.texts.type for outcome in outcomes] == [pa.large_string()] * 4


def test_a_value_equal_to_its_threshold_stays() -> None:
    words = " ".join(["river"] * 4 + ["the", "of"]) + "."
    for limit, kept in ((6, True), (7, False)):
        config = GopherQualityConfig(min_words=limit, max_words=6, min_alphabetic_word_share=0)
        assert apply([words], (config,))[0].keep.to_pylist() == [kept]


@pytest.mark.parametrize(
    ("rule", "document", "expected"),
    [
        (
            GopherQualityConfig(min_words=1),
            "extraordinarily" * 2 + " " + "the of",
            "gopher_quality: mean word length 11.67 > 10",
        ),
        (GopherQualityConfig(), "the of and", "gopher_quality: words 3 < 50"),
        (
            GopherRepetitionConfig(),
            "a\n\na\n\na\n\nb",
            "gopher_repetition: share of duplicate paragraphs 0.5 > 0.3",
        ),
        (GopherRepetitionConfig(), "", "gopher_repetition: empty text"),
        (C4Config(), "One two three four five.", "c4: sentences 1 < 3"),
        (C4DatatroveConfig(), "int main() { return 0; } is code.", "c4_datatrove: curly bracket"),
        (
            FinewebQualityConfig(),
            "no mark\nno mark here",
            "fineweb_quality: share of lines with an end mark 0 < 0.12",
        ),
    ],
)
def test_drops_explain_themselves(rule: RuleConfig, document: str, expected: str) -> None:
    outcome = apply([document], (rule,))[0]
    assert (
        format_reason(
            outcome.rule,
            outcome.test[0].as_py(),
            outcome.value[0].as_py(),
            outcome.threshold[0].as_py(),
        )
        == expected
    )


def test_every_value_is_on_the_wrong_side_of_its_threshold() -> None:
    for outcome in apply(TEXTS):
        values, thresholds = (
            outcome.value.to_numpy(zero_copy_only=False),
            outcome.threshold.to_numpy(zero_copy_only=False),
        )
        dropped = ~np.isnan(values)
        assert np.all(values[dropped] != thresholds[dropped])
        assert outcome.value.null_count == outcome.threshold.null_count


def test_lines_taken_out_of_kept_documents_are_counted() -> None:
    page = "\n".join(
        [
            "We use cookies here always.",
            "This line is kept for good.",
            "Enable JavaScript to go on.",
            "No mark at this end",
            "Too few.",
            "Kept [1] as well, but cited.",
        ]
    )
    outcome = apply([page, "dropped {"], (C4DatatroveConfig(min_sentences=1),))[0]
    assert outcome.texts.to_pylist() == ["This line is kept for good.\nKept  as well, but cited."]
    assert {name: count for name, count in outcome.changes.items() if count} == {
        "line taken out: policy": 1,
        "line taken out: javascript": 1,
        "line taken out: no end mark": 1,
        "line taken out: too few words": 1,
        "line without its citations": 1,
    }


def test_the_original_counts_words_after_citations_are_removed() -> None:
    line = "[1] [2] three four five."
    assert apply([line], (C4Config(min_sentences=1),))[0].test.to_pylist() == ["sentences"]
    assert apply([line], (C4DatatroveConfig(min_words_per_line=5, min_sentences=1),))[
        0
    ].keep.to_pylist() == [True]


def test_rules_are_configured_by_kind_and_unknown_ones_are_refused() -> None:
    adapter: TypeAdapter[RuleConfig] = TypeAdapter(RuleConfig)
    assert adapter.validate_python({"kind": "c4_datatrove", "end_marks": []}) == C4DatatroveConfig(
        end_marks=()
    )
    with pytest.raises(ValidationError, match="gopher_repetition"):
        adapter.validate_python({"kind": "gopher"})
    with pytest.raises(ValidationError, match="min_word"):
        adapter.validate_python({"kind": "c4", "min_word": 3})
