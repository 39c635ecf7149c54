"""Laws of reading decisions: what a dataset says about a page, a drop or another threshold is
what was decided.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.inspection.dropped_documents import (
    find_dropped_documents,
    format_dropped_documents,
    parse_wanted,
)
from llmsys.data_pipeline.inspection.explain_page import explain_url, format_explanation
from llmsys.data_pipeline.inspection.export_dropped import export_dropped_documents
from llmsys.data_pipeline.inspection.threshold_sweep import format_sweep, sweep_threshold
from llmsys.data_pipeline.inspection.verify_dataset import verify_dataset
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import load_manifest
from llmsys.errors import ConfigError, DataError
from llmsys.launch.main import main
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl


def config(folder: Path, crawl: Path, words: int = 180) -> Any:
    rules = [{"kind": "gopher_quality", "min_words": words}]
    return build_tiny_config(folder, crawl, rules=rules, deduplicate={"minhash": {"kind": "none"}})


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_crawl(tmp_path_factory.mktemp("crawl"), files=2)


@pytest.fixture(scope="module")
def dataset(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> CrawlConfig:
    made = config(tmp_path_factory.mktemp("dataset") / "data", crawl)
    prepare_dataset(made, until="documents")
    assert isinstance(made.data, CrawlConfig)
    return made.data


def kept(folder: Path, crawl: Path, words: int) -> int:
    return sum(
        file.rows
        for file in prepare_dataset(config(folder, crawl, words), until="documents").documents.files
    )


def test_a_sweep_counts_what_another_threshold_keeps(
    dataset: CrawlConfig, crawl: Path, tmp_path: Path
) -> None:
    found = sweep_threshold(dataset.folder, "gopher_quality.min_words=150,180,190,100_000")
    assert (found.field, found.test, found.now) == ("gopher_quality.min_words", "words", (180,))
    looser, now, stricter, none = found.values
    assert (now.stay, now.might_return) == (found.documents, 0)
    assert none.stay == 0
    # The tiny crawl holds a copy of one page per file: of equal texts one stays, and all go by the
    # threshold together.
    assert stricter.stay == kept(tmp_path / "190", crawl, 190) < now.stay
    assert now.stay < kept(tmp_path / "150", crawl, 150) <= looser.stay + looser.might_return
    assert "at most" in format_sweep(found)
    assert [
        one.stay for one in sweep_threshold(dataset.folder, "language.min_score=0.5,1.0").values
    ] == [
        found.documents,
        0,
    ]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("gopher_quality.min_words", "Write rule.field=a,b,c"),
        (
            "c4.min_sentences=3",
            "without the rule c4. Its rules: gopher_quality; and language.min_score.",
        ),
        ("gopher_quality.min_wrds=3", "has no field min_wrds. Its thresholds: min_words,"),
        (
            "gopher_quality.min_words=-3",
            "gopher_quality.min_words=-3 is invalid: Input should be greater than",
        ),
        (
            "gopher_quality.min_words=180",
            "no test compares a stored statistic with gopher_quality.min_words",
        ),
    ],
)
def test_a_sweep_that_cannot_be_answered_says_why(
    dataset: CrawlConfig, question: str, answer: str
) -> None:
    with pytest.raises(DataError) as error:
        sweep_threshold(dataset.folder, question)
    assert answer in str(error.value)


def test_whole_dropped_documents_are_written_for_other_tools(
    dataset: CrawlConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["inspect", str(dataset.folder), "--dropped", "rule=gopher_quality,test=words"]
    assert main([*words, "--output", str(tmp_path / "dropped.jsonl"), "--json"]) == 0
    count = json.loads(capsys.readouterr().out)["documents"]
    rows = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    total, excerpts = find_dropped_documents(
        dataset.folder, parse_wanted("rule=gopher_quality,test=words"), count
    )
    assert len(rows) == count == total
    by_id = {row["id"]: row for row in rows}
    for excerpt in excerpts:
        row = by_id[excerpt["id"]]
        assert (row["value"], row["reason"]) == (excerpt["value"], excerpt["reason"])
        # the manifest counts the bytes of a whole text
        assert len(row["text"].encode()) == row["bytes"]
        assert row["text"].startswith(excerpt["text"][:100])
    assert main([*words, "--output", str(tmp_path / "dropped.parquet")]) == 0
    assert pq.read_table(tmp_path / "dropped.parquet").column("text").to_pylist() == [
        row["text"] for row in rows
    ]
    for name, problem in (
        ("dropped.csv", "ends in no format. Use .parquet"),
        ("dropped.jsonl", "exists already"),
    ):
        with pytest.raises(ConfigError, match=problem):
            export_dropped_documents(dataset.folder, {}, tmp_path / name)


def test_dropped_documents_are_shown_with_value_and_threshold(
    dataset: CrawlConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    total, rows = find_dropped_documents(
        dataset.folder, parse_wanted("rule=gopher_quality,test=words"), limit=2
    )
    assert total > len(rows) == 2
    assert all(row["value"] < row["threshold"] == 180 for row in rows)
    assert "gopher_quality: words, value" in format_dropped_documents(total, rows)
    assert main(["inspect", str(dataset.folder), "--dropped", "rule=language", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {row["test"] for row in shown["documents"]} == {"language"}
    with pytest.raises(
        DataError, match=r"has no dropped document with rule=nothing. It has: rule="
    ):
        find_dropped_documents(dataset.folder, {"rule": "nothing"}, 1)
    with pytest.raises(DataError, match=r"cannot be parsed\. Write all, or stage=, rule= or test="):
        parse_wanted("words")
    assert find_dropped_documents(dataset.folder, parse_wanted("all"), 1)[0] == sum(
        drop.documents for stage in load_manifest(dataset.folder).funnel for drop in stage.dropped
    )


def test_every_page_is_explained_as_it_was_decided(dataset: CrawlConfig) -> None:
    _, drops = find_dropped_documents(dataset.folder, {"stage": "gopher_quality"}, 1)
    (capture,) = explain_url(dataset, drops[0]["url"])
    assert [step[0] for step in capture.steps] == ["read", "extract", "language", "gopher_quality"]
    assert capture.steps[-1][1:] == ("dropped", drops[0]["reason"])
    assert capture.steps[2][2].startswith("en, score ")  # what was measured before it was dropped
    _, drops = find_dropped_documents(dataset.folder, {"stage": "exact_duplicates"}, 1)
    captures = explain_url(dataset, drops[0]["url"])
    last = next(one for one in captures if one.id == drops[0]["id"]).steps[-1]
    assert last == ("exact_duplicates", "dropped", drops[0]["reason"])
    stays = next(iter(explain_url(dataset, "https://example-0.org/3")))
    assert stays.steps[-1][0] in ("documents", "gopher_quality")
    assert "https://example-0.org/3\n  captured 2024-05-01" in format_explanation([stays])
    with pytest.raises(
        DataError, match=r"is not among the pages of .*\. Write the URL as in the crawl"
    ):
        explain_url(dataset, "https://nowhere.org/")


def test_a_page_is_explained_by_the_config_of_its_dataset(
    dataset: CrawlConfig, crawl: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, drops = find_dropped_documents(dataset.folder, {"stage": "gopher_quality"}, 1)
    file = tmp_path / "other.yaml"
    file.write_text(
        f"data:\n  kind: crawl\n  folder: {dataset.folder}\n  inputs: ['{crawl}/*.warc.gz']\n"
        f"  rules: [{{kind: gopher_quality, min_words: 1}}]\n"
    )
    assert main(["prepare", str(file), "--explain", drops[0]["url"]]) == 0
    said = capsys.readouterr()
    assert drops[0]["reason"] in " ".join(said.out.split())
    assert "was prepared with another config, which is used here: data." in said.out + said.err
    assert "data.rules.0.min_words was 180 and is 1" in said.out + said.err


def test_a_dataset_is_not_explained_by_what_an_unfinished_change_left(
    dataset: CrawlConfig, crawl: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(dataset.folder, tmp_path / "data"))
    with pytest.raises(DataError, match="no document is left"):
        prepare_dataset(config(folder, crawl, 100_000), until="documents")
    assert verify_dataset(folder, 0).findings == []
    with pytest.raises(
        DataError, match=r"cannot be explained now: .* Finish llmsys prepare CONFIG first\."
    ):
        explain_url(dataset.model_copy(update={"folder": folder}), "https://example-0.org/3")
    prepare_dataset(config(folder, crawl), until="documents")
    assert explain_url(dataset.model_copy(update={"folder": folder}), "https://example-0.org/3")


def test_what_is_neither_a_dataset_nor_a_config_is_called_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["inspect", "runs/nothing"]) == 2
    assert (
        "runs/nothing is not a dataset folder, and config 'runs/nothing'" in capsys.readouterr().err
    )
