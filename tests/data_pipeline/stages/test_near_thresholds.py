"""Laws of the examples at the thresholds: the nearest of all documents, whatever files and
batches they lie in.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.custom_rules import FastTextClassifierConfig, PerplexityConfig
from llmsys.config.line_rules import C4Config
from llmsys.config.quality_rules import GopherQualityConfig, NativeTextConfig
from llmsys.data_pipeline.inspection.threshold_sweep import format_sweep, sweep_threshold
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.rules.chain import build_rule, list_thresholds
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.manifest_section import ThresholdReport
from llmsys.dataset.token_shards import read_batches
from llmsys.launch.main import main
from tests.helpers.tiny_crawl import (
    GERMAN,
    build_tiny_config,
    format_page,
    format_record,
    make_crawl,
)

LONG_WORDS = GERMAN.replace("Hund", "Donaudampfschifffahrtsgesellschaftskapitän")
SETTINGS: dict[str, Any] = {
    "rules": [{"kind": "gopher_quality", "min_words": 180}],
    "language": {"languages": ["en", "de"]},
    "deduplicate": {"minhash": {"kind": "none"}},
}


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_crawl(tmp_path_factory.mktemp("crawl"), files=2)
    (made / "german.warc.gz").write_bytes(
        format_record("https://example.de/", "2024-05-01T00:00:00Z", format_page([LONG_WORDS * 12]))
    )
    return made


@pytest.fixture(scope="module")
def folder(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dataset") / "data"
    prepare_dataset(build_tiny_config(made, crawl, **SETTINGS), until="documents")
    return made


def borders(folder: Path) -> tuple[ThresholdReport, ...]:
    return load_manifest(folder).thresholds


def one(found: tuple[ThresholdReport, ...], test: str, drops: str) -> ThresholdReport:
    return next(border for border in found if (border.test, border.drops) == (test, drops))


def rows(folder: Path, room: str) -> list[dict[str, Any]]:
    return [
        row
        for path in sorted((folder / room).glob("*.arrow"))
        for b in read_batches(path)
        for row in b.to_pylist()
    ]


def test_the_nearest_are_by_distance_and_then_by_id(folder: Path) -> None:
    border = one(borders(folder), "words", "below")
    assert border.thresholds == (180,)
    dropped = [row for row in rows(folder, "dropped") if row["test"] == "words"]
    kept = [row | {"value": row["gopher_quality.words"]} for row in rows(folder, "documents")]
    for side, documents in ((border.dropped, dropped), (border.kept, kept)):
        nearest = sorted(documents, key=lambda row: (abs(row["value"] - 180), row["id"]))[:3]
        assert [(near.id, near.url, near.value, near.reason) for near in side.nearest] == [
            (row["id"], row["url"], row["value"], row.get("reason", "")) for row in nearest
        ]
        assert all(
            near.excerpt == row["text"][:400] + "…"
            for near, row in zip(side.nearest, nearest, strict=True)
        )
        assert side.close == sum(abs(row["value"] - 180) <= 18 for row in documents)
        assert side.documents == len(documents)
    assert border.dropped.bytes == sum(row["bytes"] for row in dropped)
    assert 0 < border.dropped.close < border.dropped.documents
    assert border.kept.documents > 3


def test_each_document_is_held_against_the_thresholds_of_its_language(folder: Path) -> None:
    border = one(borders(folder), "mean word length", "above")
    assert border.thresholds == (10, 15)  # the published one, and that of the German profile
    (german,) = [row for row in rows(folder, "documents") if row["language"] == "de"]
    value = german["gopher_quality.mean_word_length"]
    other = [
        row["gopher_quality.mean_word_length"] for row in rows(folder, "documents") if row != german
    ]
    # nearest by the threshold of another language
    assert abs(value - 10) < min(abs(one - 10) for one in other)
    assert german["id"] not in {near.id for near in border.kept.nearest}


def test_a_sweep_says_where_languages_have_thresholds_of_their_own(folder: Path) -> None:
    found = sweep_threshold(folder, "gopher_quality.max_mean_word_length=3,10,15")
    assert found.now == (10, 15)
    assert "gopher_quality.max_mean_word_length is 10 to 15 by language" in format_sweep(found)
    assert found.values[0].stay == 0 < found.values[2].stay == found.documents


def test_files_batches_and_the_order_of_the_inputs_change_nothing(
    folder: Path, crawl: Path, tmp_path: Path
) -> None:
    inputs = [str(path) for path in sorted(crawl.glob("*.gz"), reverse=True)]
    settings = SETTINGS | {"documents": {"num_shards": 3, "batch_bytes": 2_000}}
    prepare_dataset(build_tiny_config(tmp_path / "other", inputs, **settings), until="documents")
    assert len(list((tmp_path / "other" / "documents").glob("*.arrow"))) == 3
    assert borders(tmp_path / "other") == borders(folder)


def test_the_page_shows_both_sides_from_the_manifest_alone(folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "data"
    alone.mkdir()
    shutil.copy(folder / "manifest.json", alone)
    output = tmp_path / "page.html"
    said = [
        "report",
        "data/sample",
        f"data.folder={alone}",
        f"run.folder={tmp_path / 'none'}",
        "--output",
    ]
    assert main([*said, str(output)]) == 0
    page = output.read_text()
    assert "words &lt; 180 is dropped" in page
    for side in (
        one(borders(folder), "words", "below").dropped,
        one(borders(folder), "words", "below").kept,
    ):
        assert all(near.url in page and near.excerpt in page for near in side.nearest)


def test_the_tests_of_a_rule_are_known_without_its_model() -> None:
    scores = list_thresholds(
        FastTextClassifierConfig(model=Path("no.bin"), label="good", min_score=0.4)
    )
    assert (scores[0].test, scores[0].drop_side, scores[0].threshold) == (
        "score of good",
        "below",
        0.4,
    )
    buckets = list_thresholds(
        PerplexityConfig(
            model=Path("no.arpa"),
            head_max_perplexity=100,
            tail_min_perplexity=200,
            keep=("middle",),
        )
    )
    assert [(one.drop_side, one.threshold) for one in buckets] == [("below", 100), ("above", 200)]
    for rule in (GopherQualityConfig(), C4Config(), NativeTextConfig(scripts=("Han",))):
        assert [*list_thresholds(rule)] == [*build_rule(rule).limits]
