"""The lines of docs/your-crawl.md open documents/ and dropped/ in the libraries that they name, and
exports have FineWeb's names and the number of tokens.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from llmsys.data_pipeline.inspection.export_dropped import export_dropped_documents
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.token_shards import open_tokens
from llmsys.launch.main import main
from tests.data_pipeline.pipelines.test_input_columns import make_rows, read_files, write_lines
from tests.helpers.paths import ROOT
from tests.helpers.tiny_crawl import build_tiny_config

FOLDER = "runs/mine-data/"
READ: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "pyarrow": lambda opened: opened.to_table().to_pylist(),
    "duckdb": lambda opened: [
        dict(zip(opened.columns, row, strict=True)) for row in opened.fetchall()
    ],
    "polars": lambda opened: opened.collect().to_dicts(),
    "datasets": lambda opened: opened.to_list(),
}


def find_line(library: str) -> str:
    """The last line of the page's block that opens documents/ with a library."""
    page = (ROOT / "docs" / "your-crawl.md").read_text()
    section = page.partition("One line opens")[2]
    (block,) = re.findall(rf"```python\nimport {library}\b.*?\n\n?(.*?)\n```", section, re.DOTALL)
    return str(block).splitlines()[-1]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("open")
    rows = make_rows(40)
    for number, row in enumerate(rows):
        row |= {"score": number / 4, "tags": ["a", number], "licence": "cc\0by", "language": "x"}
    rows[3]["score"] = "n/a"
    write_lines(folder / "a.jsonl", rows)
    config = build_tiny_config(folder / "data", [str(folder / "a.jsonl")])
    prepare_dataset(config, until="documents")
    return folder


@pytest.mark.parametrize("room", ["documents", "dropped"])
@pytest.mark.parametrize("library", list(READ))
def test_one_line_of_the_page_opens_every_row(
    prepared: Path, library: str, room: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    if library == "datasets":
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", prepared / "cache")
    line = find_line(library)
    assert line.count(FOLDER + "documents") == 1
    line = line.replace(FOLDER + "documents", f"{prepared}/data/{room}")
    names: dict[str, Any] = {}
    exec(f"import {library}\nimport pyarrow.dataset\nopened = {line}", names)
    found = {row["id"]: row for row in READ[library](names["opened"])}
    expected = read_files(prepared / "data", room).to_pylist()
    assert found == {row["id"]: row for row in expected}
    assert len(expected) > 5


def test_exports_have_the_names_of_fineweb_and_the_number_of_tokens(tmp_path: Path) -> None:
    rows = make_rows(30)
    for row in rows:
        row["score"] = 1
    folder = tmp_path / "CC-MAIN-2024-10"
    folder.mkdir()
    write_lines(folder / "a.jsonl", rows)
    documents = {
        "num_shards": 2,
        "export_formats": ["parquet", "jsonl.zst"],
        "export_columns": "fineweb",
    }
    config = build_tiny_config(tmp_path / "data", [f"{folder}/a.jsonl"], documents=documents)
    prepare_dataset(config)
    tables = [
        pq.read_table(path) for path in sorted((tmp_path / "data/documents").glob("*.parquet"))
    ]
    exported = {row["id"]: row for row in pa.concat_tables(tables).to_pylist()}
    kept = read_files(tmp_path / "data", "documents").to_pylist()
    counts: dict[str, int] = {}
    for split in ("train", "heldout"):
        shards = open_tokens(tmp_path / "data", split)
        for path in (tmp_path / "data/tokens").glob(f"{split}-*.arrow"):
            for row in pa.ipc.open_file(path).read_all().to_pylist():
                counts[row["id"]] = len(row["tokens"]) - 1  # the end token
        assert shards.num_documents > 0
    assert exported == {
        row["id"]: {
            **{"file_path" if name == "file" else name: value for name, value in row.items()},
            "dump": "CC-MAIN-2024-10",
            "token_count": counts[row["id"]],
        }
        for row in kept
    }
    lines = b"".join(
        zstandard.ZstdDecompressor().stream_reader(path.open("rb")).read()
        for path in sorted((tmp_path / "data/documents").glob("*.jsonl.zst"))
    )
    assert {row["id"]: row for row in map(json.loads, lines.splitlines())} == exported


def test_documents_without_tokens_are_exported_with_a_null_count(tmp_path: Path) -> None:
    rows = [row | {"file_path": "theirs", "dump": "d", "token_count": 7} for row in make_rows(9)]
    write_lines(tmp_path / "a.jsonl", rows)
    documents = {"num_shards": 1, "export_formats": ["parquet"], "export_columns": "fineweb"}
    config = build_tiny_config(tmp_path / "data", [f"{tmp_path}/a.jsonl"], documents=documents)
    prepare_dataset(config, until="documents")
    found = pq.read_table(tmp_path / "data/documents/part-00000.parquet").to_pylist()
    wanted = {"file_path": "theirs", "dump": "d", "input_token_count": 7, "token_count": None}
    for row in found:
        assert wanted.items() <= row.items()
        assert row["file"] == f"{tmp_path}/a.jsonl"
    assert len(found) > 5


def test_times_that_python_cannot_hold_pass_every_reader_of_dropped_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = make_rows(10)
    table = pa.Table.from_pylist(rows)
    table = table.append_column("nanos", pa.array(range(1, 11), pa.timestamp("ns")))
    table = table.append_column("far", pa.array([1 << 40] * 10, pa.timestamp("s")))
    table = table.append_column(
        "zone", pa.array([86_400_000_000] * 10, pa.timestamp("us", "No/Where"))
    )
    table = table.append_column("raw", pa.array([b"\xff"] * 10))
    pq.write_table(table, tmp_path / "a.parquet")
    write_lines(tmp_path / "eval.jsonl", [{"text": rows[1]["text"]}])
    sets = [{"name": "e", "files": [f"{tmp_path}/eval.jsonl"], "query_fields": ["text"]}]
    config = build_tiny_config(
        tmp_path / "data",
        [f"{tmp_path}/a.parquet"],
        decontaminate={"kind": "ngram", "sets": sets},
        documents={"num_shards": 1, "export_formats": ["jsonl.zst"]},
    )
    prepare_dataset(config, until="documents")
    dropped = read_files(tmp_path / "data", "dropped").sort_by("offset")
    assert dropped.column("rule").to_pylist().count("decontaminate") == 1
    assert dropped.column("nanos").cast(pa.int64()).to_pylist() == [1, 2, 6]
    assert main(["inspect", f"{tmp_path}/data", "--dropped", "all"]) == 0
    assert "3 of 3 dropped documents" in capsys.readouterr().out
    export_dropped_documents(tmp_path / "data", {}, tmp_path / "dropped.parquet")
    exported = pq.read_table(tmp_path / "dropped.parquet").sort_by("offset")
    assert set(dropped.column("zone").to_pylist()) == {"1970-01-02 00:00:00.000000Z No/Where"}
    for name in ("nanos", "raw"):
        assert exported.column(name).equals(dropped.column(name))
    export_dropped_documents(tmp_path / "data", {}, tmp_path / "dropped.jsonl")
    shown = [json.loads(line) for line in (tmp_path / "dropped.jsonl").read_text().splitlines()]
    assert {row["raw"] for row in shown} == {"/w=="}
    assert {row["far"] for row in shown} == {f"{(1 << 40) * 1000} timestamp[ms]"}
    assert "1970-01-01 00:00:00.000000001" in {row["nanos"] for row in shown}
