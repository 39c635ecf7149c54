"""Laws of `data.sampling`: which documents the training tokens hold, and how often.

The oracle walks documents/ with dictionaries and hashes of its own.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from llmsys.config.loading.load import read_config
from llmsys.data_pipeline.pipelines import sampling_stages
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import Manifest, load_manifest
from llmsys.errors import ConfigError, DataError
from llmsys.launch.main import main
from tests.helpers.tiny_crawl import build_tiny_config, write_sentences

Row = dict[str, Any]
HELDOUT = 0.2


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Documents of few hosts, most of them of one, with scores, of which some are missing."""
    choose = random.Random(5)
    rows = []
    for number in range(160):
        host = choose.choice(["large.org", "large.org", "b.org", f"h{number}.org"])
        row: Row = {
            "id": f"doc-{number:04d}",
            "url": f"https://{host}/{number}" if number % 11 else "",
            "date": f"20{20 + number % 3}-05-01T00:00:00Z",
            "text": " ".join(write_sentences(choose, 14)),
            "licence": choose.choice(["cc-by", "cc-0", None]),
            "votes": choose.choice([None, *range(6)]),
            "new": number % 2 == 0,
        }
        rows.append(row)
    return rows


def prepare(
    folder: Path, rows: Sequence[Row], sampling: Sequence[Row], *, shards: int = 2, **data: Any
) -> Manifest:
    folder.mkdir(exist_ok=True)
    source = folder.parent / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = build_tiny_config(
        folder / "data",
        [str(source)],
        sampling=list(sampling),
        split={"heldout_fraction": HELDOUT},
        documents={"num_shards": shards},
        rules=[],
        **data,
    )
    return prepare_dataset(config)


def read_files(paths: Sequence[Path]) -> list[Row]:
    return [row for path in paths for row in pa.ipc.open_file(path).read_all().to_pylist()]


def count_ids(folder: Path, split: str) -> Counter[str]:
    """How often each document is in a split."""
    found = read_files(sorted((folder / "data" / "tokens").glob(f"{split}-*.arrow")))
    return Counter(row["id"] for row in found)


def draw(purpose: str, name: str, seed: int = 0) -> float:
    digest = blake2b(name.encode(), key=f"{purpose}:{seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def read_value(row: Row, column: str) -> str | None:
    if column == "host":
        return row["url"].removeprefix("https://").partition("/")[0] or None
    if column == "year":
        return str(row["date"])[:4]
    value = row[column]
    return None if value is None else str(value).lower() if value in (True, False) else str(value)


def compute_expected(folder: Path, sampling: Sequence[Row]) -> dict[str, int]:
    """The copies of each training document."""
    documents = read_files(sorted((folder / "data" / "documents").glob("*.arrow")))
    held = set(count_ids(folder, "heldout"))
    training = [row for row in documents if row["id"] not in held]
    weights = {}
    for row in training:
        weight = 1.0
        for rule in sampling:
            value = None if rule["kind"] == "cap" else read_value(row, rule["column"])
            if rule["kind"] == "values":
                named = {str(key).lower(): one for key, one in rule["weights"].items()}
                weight *= named.get(str(value), rule.get("other", 1.0))
            elif rule["kind"] == "buckets" and value is None:
                weight *= rule.get("missing", 1.0)
            elif rule["kind"] == "buckets":
                weight *= rule["weights"][sum(float(value or 0) >= e for e in rule["edges"])]
        weights[row["id"]] = weight
    stays = {row["id"] for row in training if weights[row["id"]] > 0}
    left = set(stays)
    for rule in sampling:
        if rule["kind"] == "cap":
            groups: dict[str, list[str]] = {}
            for row in training:
                value = read_value(row, rule["column"])
                if row["id"] in stays and value is not None:
                    groups.setdefault(value, []).append(row["id"])
            for names in groups.values():
                ordered = sorted(names, key=lambda name: draw("cap", name))
                left -= set(ordered[rule["max_documents"] :])
    return {
        name: copies
        for name in left
        if (
            copies := math.floor(weights[name])
            + (draw("sampling", name) < weights[name] - math.floor(weights[name]))
        )
    }


LICENCES = {"kind": "values", "column": "licence", "weights": {"cc-by": 2.5, "cc-0": 0.5}}
VOTES = {"kind": "buckets", "column": "votes", "edges": [1, 4], "weights": [0, 1, 3]}
HOSTS = {"kind": "cap", "column": "host", "max_documents": 7}
RULES: dict[str, list[Row]] = {
    "values": [LICENCES | {"other": 0.25}],
    "booleans and years": [
        {"kind": "values", "column": "new", "weights": {True: 0, False: 1.5}},
        {"kind": "values", "column": "year", "weights": {2020: 0, 2021: 2}},
    ],
    "buckets": [VOTES | {"missing": 0.5}],
    "caps": [HOSTS, {"kind": "cap", "column": "licence", "max_documents": 20}],
    "two caps on one column": [HOSTS, HOSTS | {"max_documents": 5}],
    "a cap on what weights leave": [
        {"kind": "values", "column": "new", "weights": {True: 0}},
        HOSTS | {"max_documents": 12},
    ],
    "all": [LICENCES, VOTES, HOSTS],
}


@pytest.mark.parametrize("sampling", RULES.values(), ids=list(RULES))
def test_each_document_is_as_often_in_the_tokens_as_its_columns_say(
    tmp_path: Path, rows: list[Row], sampling: list[Row]
) -> None:
    manifest = prepare(tmp_path / "a", rows, sampling)
    found = count_ids(tmp_path / "a", "train")
    expected = compute_expected(tmp_path / "a", sampling)
    assert 10 < len(expected) < 140
    assert found == expected
    # the tables
    assert [column.column for column in manifest.sampling] == [one["column"] for one in sampling]
    held = count_ids(tmp_path / "a", "heldout")
    tokens = manifest.splits["train"].tokens
    for column in manifest.sampling:
        assert sum(group.documents for group in column.groups) == len(rows) - len(held)
        assert sum(group.sampled_documents for group in column.groups) == found.total()
        assert sum(group.sampled_tokens for group in column.groups) == tokens
    # documents/ and the held-out split have each document once
    plain = prepare(tmp_path / "plain", rows, [])
    assert plain.documents == manifest.documents
    assert plain.splits["heldout"] == manifest.splits["heldout"]
    assert plain.sampling == ()


def test_files_ranges_and_order_of_documents_change_no_byte(
    tmp_path: Path, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = prepare(tmp_path / "one", rows, RULES["all"], shards=1)
    monkeypatch.setattr(sampling_stages, "RANGE_KEYS", 7)
    other = prepare(tmp_path / "other", rows, RULES["all"], shards=3)
    assert len(list((tmp_path / "other" / "data" / "work" / "sampling_cutoffs").iterdir())) > 5
    assert one.splits == other.splits
    assert one.sampling == other.sampling
    # the order decides the offsets of documents in their file, and nothing else
    turned = prepare(tmp_path / "turned", rows[::-1], RULES["all"])
    assert count_ids(tmp_path / "turned", "train") == count_ids(tmp_path / "one", "train")
    assert turned.sampling == one.sampling


def test_copies_are_shuffled_apart(tmp_path: Path, rows: list[Row]) -> None:
    prepare(tmp_path / "a", rows, [LICENCES | {"weights": {"cc-by": 3}}])
    paths = sorted((tmp_path / "a" / "data" / "tokens").glob("train-*.arrow"))
    names = [row["id"] for row in read_files(paths)]
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    gaps = [second - first for own in places.values() for first, second in pairwise(own)]
    assert len(gaps) > 50
    assert sum(gap == 1 for gap in gaps) < len(gaps) / 10


def test_another_weight_encodes_nothing_again(tmp_path: Path, rows: list[Row]) -> None:
    prepare(tmp_path / "a", rows, [LICENCES])
    encoded = tmp_path / "a" / "data" / "work" / "encoded"
    before = {path: path.stat().st_mtime_ns for path in encoded.iterdir()}
    prepare(tmp_path / "a", rows, [LICENCES | {"other": 2}])
    assert {path: path.stat().st_mtime_ns for path in encoded.iterdir()} == before
    assert count_ids(tmp_path / "a", "train") == compute_expected(
        tmp_path / "a", [LICENCES | {"other": 2}]
    )
    prepare(tmp_path / "a", rows, [])
    assert set(count_ids(tmp_path / "a", "train").values()) == {1}
    assert not list((tmp_path / "a" / "data" / "work").glob("sampl*/*"))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (LICENCES | {"column": "lisence"}, r"sampling\.0\.column=lisence is no column .* licence"),
        (VOTES | {"column": "licence"}, "buckets are ranges of numbers"),
    ],
)
def test_a_wrong_column_is_named_before_anything_is_encoded(
    tmp_path: Path, rows: list[Row], rule: Row, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(tmp_path / "a", rows, [rule])
    assert not (tmp_path / "a" / "data" / "work" / "encoded").exists()


def test_weights_that_leave_nothing_or_too_much_are_named(tmp_path: Path, rows: list[Row]) -> None:
    with pytest.raises(DataError, match="leaves no document to train on"):
        prepare(tmp_path / "a", rows, [LICENCES | {"weights": {"cc-by": 0}, "other": 0}])
    with pytest.raises(DataError, match=r"document doc-\d+ has a weight of 900 .* 100 is the most"):
        prepare(tmp_path / "b", rows, [LICENCES | {"weights": {"cc-by": 30}}] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edges": [4, 1]}, "do not rise"),
        ({"weights": [1, 2]}, "2 weights for 2 edges. Give 3"),
        ({"weights": [1, 2, -1]}, "the minimum is 0"),
        ({"weights": [1, 2, 101]}, "the maximum is 100"),
        ({"kind": "bins"}, "buckets"),
    ],
)
def test_wrong_rules_are_refused_with_the_config(tmp_path: Path, change: Row, message: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(yaml.safe_dump({"data": {"sampling": [VOTES | change]}}))
    with pytest.raises(ConfigError, match=message):
        read_config(str(path), [])


def test_prepare_prints_a_table_of_each_rule(
    tmp_path: Path, rows: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = prepare(tmp_path / "a", rows, [LICENCES, HOSTS])
    config = {
        "data": {"folder": str(tmp_path / "a" / "data")}
        | load_manifest(tmp_path / "a" / "data").config["data"],
        "tokenizer": manifest.config["tokenizer"],
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["prepare", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "licence " in printed
    assert "cc-by " in printed
    assert "above the cap " in printed
    assert main(["prepare", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sampling"]
    assert found[0]["groups"][0].keys() >= {"value", "tokens", "sampled_tokens"}
