"""The differences of two datasets are those of their files; the oracle compares whole tables."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmsys.data_pipeline.inspection import dataset_differences
from llmsys.data_pipeline.inspection.dataset_differences import (
    compare_datasets,
    format_dataset_differences,
)
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import DataError
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl

STRICT = [
    {"kind": "gopher_quality", "min_words": 190},
    {"kind": "c4", "min_sentences": 2},
]
LOOSE = [{"kind": "gopher_quality", "min_words": 20, "min_stop_words": 1}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("datasets")
    make_crawl(folder / "crawl", files=3)
    inputs = [str(folder / "crawl" / "*.warc.gz")]
    for name, rules in (("strict", STRICT), ("loose", LOOSE)):
        config = build_tiny_config(folder / name, inputs, rules=rules)
        prepare_dataset(config, until="documents")
    return folder / "strict", folder / "loose"


def read_rows(folder: Path, room: str) -> dict[str, dict[str, Any]]:
    tables = [pa.ipc.open_file(path).read_all() for path in (folder / room).glob("*.arrow")]
    return {row["id"]: row for table in tables for row in table.to_pylist() if row["id"]}


def test_documents_of_one_dataset_are_counted_by_the_test_of_the_other(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare_datasets(*folders, examples=2)
    kept = [read_rows(folder, "documents") for folder in folders]
    dropped = [read_rows(folder, "dropped") for folder in folders]
    shared = kept[0].keys() & kept[1].keys()
    assert found.both == len(shared) > 0
    changed = sum(kept[0][name]["text"] != kept[1][name]["text"] for name in shared)
    assert found.changed == changed
    for place, other in ((0, 1), (1, 0)):
        side = found.sides[place]
        own = sorted(kept[place].keys() - shared)
        assert side.documents == len(kept[place])
        assert side.num_own == len(own)
        reasons = Counter(
            (
                dropped[other][name]["stage"],
                dropped[other][name]["rule"],
                dropped[other][name]["test"],
            )
            for name in own
        )
        assert {(one.stage, one.rule, one.test): one.documents for one in side.groups} == reasons
        assert sum(one.bytes for one in side.groups) == sum(
            len(kept[place][name]["text"].encode()) for name in own
        )
        for group in side.groups:
            names = [
                name
                for name in own
                if dropped[other][name]["rule"] == group.rule
                and dropped[other][name]["test"] == group.test
            ]
            assert [one.id for one in group.examples] == names[:2]
            for one in group.examples:
                row = dropped[other][one.id]
                assert (one.url, one.reason) == (row["url"], row["reason"])
    assert found.sides[1].num_own > 3
    # the size of parts changes nothing
    monkeypatch.setattr(dataset_differences, "PART_DOCUMENTS", 3)
    assert compare_datasets(*folders, examples=2) == found


def test_the_table_names_tests_and_examples(folders: tuple[Path, Path]) -> None:
    text = format_dataset_differences(compare_datasets(*folders, examples=1))
    assert f"in {folders[1]} only; {folders[0]} dropped them by" in text
    assert "gopher_quality (words)" in text
    assert " < 190" in text


def test_a_dataset_equals_itself_and_others_have_nothing_in_common(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    same = compare_datasets(folders[1], folders[1], examples=1)
    assert (same.changed, same.sides[0].groups, same.sides[1].groups) == (0, (), ())
    assert same.both == same.sides[0].documents
    rows = [{"text": text} for text in ("A text of another crawl.", "And one more of it.")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = build_tiny_config(tmp_path / "data", [str(tmp_path / "rows.jsonl")], rules=[])
    prepare_dataset(config, until="documents")
    with pytest.raises(DataError, match="have no page in common"):
        compare_datasets(folders[0], tmp_path / "data", examples=1)
