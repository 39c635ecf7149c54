"""A dataset that begins with the tasks of another one is the dataset that it would have been."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.data import CrawlConfig
from llmsys.data_pipeline.pipelines import shared_work
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.pipelines.shared_work import list_shared_stages, take_over_tasks
from llmsys.data_pipeline.stages import changed_thresholds
from llmsys.dataset.token_shards import verify_checksums
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, make_crawl

NO_RULES: dict[str, Any] = {"rules": []}
NO_DUPLICATES: dict[str, Any] = {"deduplicate": {"minhash": {"kind": "none"}}}


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_crawl(tmp_path_factory.mktemp("crawl"))


@pytest.fixture(scope="module")
def whole(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "data"
    prepare_dataset(build_tiny_config(folder, crawl))
    return folder


def count_tasks(folder: Path) -> dict[str, int]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["event"] == "stage"]
    return {event["stage"]: event["tasks"] + event["eager"] for event in events}


def begin(folder: Path, source: Path, crawl: Path, **data: Any) -> CrawlConfig:
    config = build_tiny_config(folder, crawl, **data).data
    own = build_tiny_config(source, crawl).data
    assert isinstance(config, CrawlConfig)
    assert isinstance(own, CrawlConfig)
    take_over_tasks(source, folder, list_shared_stages(own, config))
    return config


@pytest.mark.parametrize(
    ("changes", "again"),
    [(NO_RULES, {"filter", "signatures"}), (NO_DUPLICATES, {"signatures"})],
    ids=["rules", "duplicates"],
)
def test_shared_stages_do_nothing_again_and_the_bytes_are_those_of_a_new_dataset(
    whole: Path, crawl: Path, tmp_path: Path, changes: dict[str, Any], again: set[str]
) -> None:
    before = hash_files(whole)
    begin(tmp_path / "shared", whole, crawl, **changes)
    prepare_dataset(build_tiny_config(tmp_path / "shared", crawl, **changes))
    prepare_dataset(build_tiny_config(tmp_path / "alone", crawl, **changes))
    tasks = count_tasks(tmp_path / "shared")
    assert tasks.get("extract", 0) == 0
    assert {stage for stage in ("filter", "signatures") if tasks.get(stage)} == again
    assert hash_files(tmp_path / "shared") == hash_files(tmp_path / "alone")
    # The other dataset has the same bytes, and its next run finds every task done.
    assert hash_files(whole) == before
    copy = shutil.copytree(whole, tmp_path / "copy")
    (copy / "events.jsonl").unlink()
    prepare_dataset(build_tiny_config(copy, crawl))
    assert not any(count_tasks(copy).values())
    verify_checksums(copy)


def test_other_thresholds_start_from_the_filtered_files_of_the_other_dataset(
    whole: Path, crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {"rules": [{"kind": "gopher_quality", "min_words": 60}]}
    taken = []
    take = changed_thresholds.take_over_rows

    def note_rows(*arguments: Any) -> Any:
        taken.append(take(*arguments))
        return taken[-1]

    monkeypatch.setattr(changed_thresholds, "take_over_rows", note_rows)
    begin(tmp_path / "shared", whole, crawl, **rules)
    prepare_dataset(build_tiny_config(tmp_path / "shared", crawl, **rules))
    assert len(taken) == 3
    assert all(taken)
    prepare_dataset(build_tiny_config(tmp_path / "alone", crawl, **rules))
    assert hash_files(tmp_path / "shared") == hash_files(tmp_path / "alone")


def test_packs_are_linked_and_copied_where_the_file_system_has_no_links(
    whole: Path, crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "linked", whole, crawl, **NO_RULES)
    (pack,) = (tmp_path / "linked").rglob("extracted.packs/*/*.pack")
    assert pack.stat().st_ino in {path.stat().st_ino for path in whole.rglob("*.pack")}

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    begin(tmp_path / "copied", whole, crawl, **NO_RULES)
    (copy,) = (tmp_path / "copied").rglob("extracted.packs/*/*.pack")
    assert copy.stat().st_ino != pack.stat().st_ino
    prepare_dataset(build_tiny_config(tmp_path / "copied", crawl, **NO_RULES))
    assert count_tasks(tmp_path / "copied").get("extract", 0) == 0


def test_other_texts_share_nothing_and_a_dataset_that_has_begun_is_left_alone(
    whole: Path, crawl: Path, tmp_path: Path
) -> None:
    config = begin(tmp_path / "other", whole, crawl, extract={"kind": "resiliparse"})
    other = build_tiny_config(tmp_path, crawl, url={"kind": "lists"}).data
    assert isinstance(other, CrawlConfig)
    assert not list_shared_stages(config, other)
    assert not list((tmp_path / "other").rglob("*.pack"))
    shutil.copytree(whole, tmp_path / "begun")
    before = hash_files(tmp_path / "begun")
    assert take_over_tasks(whole, tmp_path / "begun", ["split_inputs", "extract"]) == 0
    assert hash_files(tmp_path / "begun") == before


def test_what_a_killed_take_over_left_is_made_again(
    whole: Path, crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"

    class KilledError(BaseException):
        pass

    def kill(*_: object) -> int:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(shared_work, "_copy_records", kill)
        with pytest.raises(KilledError):
            begin(folder, whole, crawl, **NO_RULES)
    assert os.listdir(folder / "work")
    assert not (folder / "journal").exists()
    begin(folder, whole, crawl, **NO_RULES)
    prepare_dataset(build_tiny_config(folder, crawl, **NO_RULES))
    assert count_tasks(folder).get("extract", 0) == 0
