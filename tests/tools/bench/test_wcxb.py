"""The score, the pages and the interval of the public benchmark of page types."""

import gzip
import json
from pathlib import Path

import pytest

from tools.bench.wcxb import Score, compute_interval, print_part, read_pages, score_text


def test_words_count_as_often_as_they_occur() -> None:
    score = score_text("a a b", "A b c d")
    assert (score.precision, score.recall) == pytest.approx((2 / 3, 1 / 2))
    assert score.f1 == pytest.approx(4 / 7)
    assert score_text("", "") == Score(1, 1, 1)
    assert score_text("x", "").f1 == score_text("", "x").f1 == score_text("x", "y").f1 == 0


def write_page(folder: Path, number: int, label: dict[str, object]) -> None:
    for name in ("ground-truth", "html"):
        (folder / "dev" / name).mkdir(parents=True, exist_ok=True)
    described = {"_internal": {"page_type": {"primary": "forum"}}, "ground_truth": label}
    (folder / "dev" / "ground-truth" / f"{number}.json").write_text(json.dumps(described))
    (folder / "dev" / "html" / f"{number}.html.gz").write_bytes(gzip.compress(b"<p>post"))


def test_pages_without_a_labelled_text_are_left_out(tmp_path: Path) -> None:
    write_page(tmp_path, 1, {"main_content": "post"})
    write_page(tmp_path, 2, {"title": "t"})
    write_page(tmp_path, 3, {"main_content": None})
    (page,) = read_pages(tmp_path, "dev")
    assert (page.name, page.page_type, page.content, page.text) == (
        "1",
        "forum",
        b"<p>post",
        "post",
    )


def test_types_weigh_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    low, high = compute_interval([[1.0] * 50, [0.0, 1.0] * 4])
    assert 0.5 < low < 0.75 < high < 1
    write_page(tmp_path, 1, {"main_content": "post"})
    pages = read_pages(tmp_path, "dev")
    print_part(pages, {"ours": [Score(0.5, 0.25, 1.0)]})
    assert "| forum | 1 | 0.500 (0.250, 1.000) |" in capsys.readouterr().out
