"""Laws of the funnel: counts and examples do not depend on which task saw a document, or when."""

import random
from typing import Any

from llmsys.data_pipeline.core.funnel import EXAMPLE_CHARACTERS, FunnelCounts, build_dropped_rows


def row(number: int) -> dict[str, Any]:
    document = {
        "id": f"{number:032x}",
        "url": f"u{number}",
        "file": "f",
        "offset": 0,
        "text": "é" * number,
    }
    return build_dropped_rows([document], "rule", [("test", 1.0, 2.0, f"reason {number}")])[0]


def test_sums_and_the_smallest_examples_are_the_same_in_any_order() -> None:
    numbers = list(range(500, 520))
    expected = None
    for seed in range(4):
        random.Random(seed).shuffle(numbers)
        whole = FunnelCounts()
        for start in range(0, len(numbers), 7):
            part = FunnelCounts()
            part.add_amounts("rule", documents_in=len(numbers[start : start + 7]))
            part.add_drops(row(number) for number in numbers[start : start + 7])
            whole.merge_counts(FunnelCounts(part.to_dict()))
        stage = whole.build_funnel(["rule"])[0]
        assert stage.documents_in == 20
        assert (stage.dropped[0].documents, stage.dropped[0].bytes) == (
            20,
            2 * sum(range(500, 520)),
        )
        assert [example.url for example in stage.dropped[0].examples] == ["u500", "u501", "u502"]
        assert len(stage.dropped[0].examples[0].excerpt) == EXAMPLE_CHARACTERS
        expected = expected or stage
        assert stage == expected


def test_an_excerpt_ends_at_two_thousand_characters_and_bytes_count_the_whole_text() -> None:
    dropped = row(5_000)
    assert (len(dropped["text"]), dropped["bytes"]) == (2_000, 10_000)
