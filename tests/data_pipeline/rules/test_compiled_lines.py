"""The compiled core counts the lines and paragraphs that Python counts."""

import random

import pytest

from llmsys.data_pipeline.core.native import CoreUnavailableError, NativeCore
from llmsys.data_pipeline.rules.datatrove_repetition import measure_repeated_lines
from llmsys.data_pipeline.rules.gopher_quality import _DATATROVE, measure_line_marks
from llmsys.data_pipeline.rules.rule import DocumentBatch, WordSplitters
from tests.helpers.hostile_texts import SPACES, list_hostile_texts
from tests.helpers.native_core import needs_compiler, use_core

pytestmark = needs_compiler

PIECES = [
    "a line", "a line", "- point", "• point", "\u3000- point", "more...", "more…", "more... ",
    "more ..", "é", "中文", "", "-", "...", "‐", "*", "\r\n", "\n", "\n\n", "\n\n\n", " \n \n",
    "\n", "\n\n", *SPACES,
]  # fmt: skip


def list_line_texts(seed: int) -> list[str]:
    source = random.Random(seed)
    few = ["a line", "a line", "- point", "more...", "\n\n", "\n\n", "\n\n\n", "\n"]
    texts = [
        "".join(source.choices(pieces, k=source.choice((0, 1, 3, 30))))
        for pieces in (PIECES, few)
        for _ in range(500)
    ]
    return [
        "",
        "\n",
        "\n\n",
        "a\n",
        "\na",
        "\na\n",
        " ",
        *texts,
        *list_hostile_texts(seed, 50, "en"),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_lines_are_those_of_python(
    built_core: NativeCore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    batch = DocumentBatch(list_line_texts(seed), WordSplitters())
    found = []
    for core in (built_core, CoreUnavailableError("off")):
        use_core(monkeypatch, core)
        found.append(measure_repeated_lines(batch) | measure_line_marks(batch, _DATATROVE))
    assert list(found[0]) == list(found[1])
    for name, shares in found[0].items():
        assert shares.tolist() == found[1][name].tolist(), name
        assert (shares > 0).sum() > 50, name
