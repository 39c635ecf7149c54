"""Laws of rules with names: a kind that stands twice is two rules in funnel, columns, drops and
commands.
"""

from typing import Any

import pytest
from pydantic import ValidationError

from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.inspection.dropped_documents import find_dropped_documents
from llmsys.data_pipeline.inspection.explain_page import explain_url
from llmsys.data_pipeline.inspection.threshold_sweep import sweep_threshold
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.token_shards import read_schema
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl

RULES: list[dict[str, Any]] = [
    {"kind": "bad_words", "word_lists": [{"entries": ["copy"]}]},
    {"kind": "gopher_quality", "min_words": 30},
    {
        "kind": "bad_words",
        "name": "harvests",
        "word_lists": [{"entries": ["harvest", "Music"]}],
        "max_share": 0.03,
    },
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> CrawlConfig:
    crawl = make_crawl(tmp_path_factory.mktemp("crawl"), files=1)
    config = build_tiny_config(tmp_path_factory.mktemp("made") / "data", crawl, rules=RULES)
    prepare_dataset(config, until="documents")
    assert isinstance(config.data, CrawlConfig)
    return config.data


def test_two_rules_of_a_kind_are_counted_shown_and_swept_each_by_its_name(
    dataset: CrawlConfig,
) -> None:
    manifest = load_manifest(dataset.folder)
    gone = {stage.stage: stage.documents_in - stage.documents_out for stage in manifest.funnel}
    assert gone["bad_words"] == 1 <= gone["harvests"]
    columns = read_schema(next((dataset.folder / "documents").glob("*.arrow"))).names
    assert {"bad_words.share", "harvests.share"} < set(columns)
    assert {border.rule for border in manifest.thresholds} >= {"bad_words", "harvests"}
    now = sweep_threshold(dataset.folder, "harvests.max_share=0.02,1")
    assert now.values[0].stay < now.documents
    assert now.values[1].might_return == gone["harvests"]
    total, rows = find_dropped_documents(dataset.folder, {"rule": "harvests"}, 1)
    assert total == gone["harvests"]
    assert explain_url(dataset, rows[0]["url"])[0].steps[-1] == (
        "harvests",
        "dropped",
        rows[0]["reason"],
    )


def test_a_drop_by_a_list_names_what_was_found(dataset: CrawlConfig) -> None:
    _, (row,) = find_dropped_documents(dataset.folder, {"rule": "bad_words"}, 1)
    assert row["reason"] == f"bad_words: share of listed words {row['value']:.4g} > 0 (copy)"
    (border,) = [one for one in load_manifest(dataset.folder).thresholds if one.rule == "bad_words"]
    assert border.dropped.nearest[0].reason == row["reason"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("", ""),
            "bad_words is already the name of rules.0, .* Give it another name, such as name: "
            "bad_words_2",
        ),
        (
            ("", "c4"),
            "1.name: c4 is the name of a stage or of another kind of rule. Use another name",
        ),
        (("language", ""), "0.name: language is the name of a stage"),
        (("a.b", ""), "should match pattern"),
    ],
)
def test_a_name_that_could_mean_something_else_is_refused(
    names: tuple[str, str], message: str
) -> None:
    rules = [
        {"kind": "bad_words", "name": name, "word_lists": [{"entries": ["x"]}]} for name in names
    ]
    with pytest.raises(ValidationError, match=message):
        CrawlConfig.model_validate({"rules": rules})
