"""Groups of documents are exact by any column, however many values it has."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmsys.data_pipeline.inspection import document_groups
from llmsys.data_pipeline.inspection.document_groups import group_documents
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import ConfigError, DataError
from llmsys.launch.main import main
from tests.data_pipeline.pipelines.test_input_columns import make_rows
from tests.helpers.tiny_crawl import build_tiny_config

ROWS = make_rows(60)
for number, row in enumerate(ROWS):
    row |= {
        "url": f"https://h{number % 7}.site{number % 3}.co.uk/{number}",
        "score": number / 2,
        "votes": number % 4,
        "licence": f"cc{number % 5}" if number % 11 else None,
        "date": f"202{number % 3}-05-01",
    }
IS_KEPT = [bool(number % 5) for number in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("groups")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "a.jsonl").write_text(lines + "no object\n" * 3)
    near = {"minhash": {"kind": "none"}}
    config = build_tiny_config(folder / "data", [f"{folder}/a.jsonl"], deduplicate=near)
    prepare_dataset(config, until="documents")
    return folder / "data"


def count(values: list[str]) -> dict[str, tuple[int, int, int]]:
    """Kept documents, their bytes, and dropped documents by value: the oracle."""
    kept, sizes, gone = Counter[str](), Counter[str](), Counter[str]()
    for value, row, is_kept in zip(values, ROWS, IS_KEPT, strict=True):
        if is_kept:
            kept[value] += 1
            sizes[value] += len(row["text"])
        else:
            gone[value] += 1
    return {value: (kept[value], sizes[value], gone[value]) for value in {*values}}


EXPECTED = {
    "host": [f"h{number % 7}.site{number % 3}.co.uk" for number in range(60)],
    "domain": [f"site{number % 3}.co.uk" for number in range(60)],
    "licence": [row["licence"] or "(none)" for row in ROWS],
    "votes": [str(row["votes"]) for row in ROWS],
    "url": [row["url"] for row in ROWS],
}


@pytest.mark.parametrize("most", [1 << 19, 5])
@pytest.mark.parametrize("column", list(EXPECTED))
def test_groups_are_exact_in_one_pass_and_in_many(
    folder: Path, column: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_groups, "MAX_VALUES", most)
    found = group_documents(folder, column, 1_000)
    groups = {one.value: (one.documents, one.bytes, one.dropped) for one in found.groups}
    assert groups == count(EXPECTED[column])
    assert found.num_groups == len(groups)
    assert found.documents == sum(IS_KEPT)
    few = group_documents(folder, column, 2)
    assert (few.groups, few.num_groups) == (found.groups[:2], found.num_groups)


def test_numbers_have_ten_ranges_and_columns_of_documents_alone_no_drops(folder: Path) -> None:
    found = group_documents(folder, "score", 20)
    assert found.num_groups == 10
    assert sum(one.documents for one in found.groups) == sum(IS_KEPT)
    assert sum(one.dropped or 0 for one in found.groups) == 60 - sum(IS_KEPT)
    # 0 to 29.5 in steps of 2.95, with six values each
    assert {one.documents + (one.dropped or 0) for one in found.groups} == {6}
    years = group_documents(folder, "year", 20)
    assert {one.dropped for one in years.groups} == {None}
    assert {one.value for one in years.groups} == {"2020", "2021", "2022"}


def test_the_command_prints_groups_and_names_the_columns(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(folder), "--by", "domain", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "the 2 of 3 with the most documents; --limit N shows more" in out
    assert "48 documents, " in out
    assert main(["inspect", str(folder), "--by", "domain", "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {one["value"] for one in shown["groups"]} == {*EXPECTED["domain"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_groups, "MAX_VALUES", 0)
        with pytest.raises(DataError, match=r"host has more than 0 values.*another column"):
            group_documents(folder, "host", 5)
    with pytest.raises(ConfigError, match=r"--by nothing is no column of .*host.*licence"):
        group_documents(folder, "nothing", 5)
