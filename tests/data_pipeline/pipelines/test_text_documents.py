"""Laws of documents that come as text: units and names are theirs, and what is wrong with them
is said in full.
"""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmsys.data_pipeline.inspection.dropped_documents import (
    find_dropped_documents,
    format_dropped_documents,
)
from llmsys.data_pipeline.inspection.token_lineage import format_token_lineage, locate_token
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import DataError
from llmsys.launch.main import main
from llmsys.report.dataset_sections import build_dataset_numbers
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl, write_sentences


def make_texts(count: int = 24) -> list[str]:
    choose = random.Random(0)
    return [" ".join(write_sentences(choose, 16)) for _ in range(count)] + ["Too short to stay."]


def test_texts_are_counted_as_text_beside_pages_and_alone(tmp_path: Path) -> None:
    texts = make_texts()
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    alone = prepare_dataset(
        build_tiny_config(tmp_path / "alone", [f"{tmp_path}/a.parquet"]), until="documents"
    )
    size = sum(map(len, texts))
    assert (alone.read.given_text_bytes, alone.read.html_bytes) == (size, size)
    assert ("clean text", f"from {size / 1000:.1f} kB of text") in [
        (what, remark) for what, _, remark in build_dataset_numbers(alone)
    ]
    crawl = make_crawl(tmp_path / "crawl", files=1)
    both = prepare_dataset(
        build_tiny_config(tmp_path / "both", [f"{tmp_path}/a.parquet", f"{crawl}/*"]),
        until="documents",
    )
    assert both.read.given_text_bytes == size < both.read.html_bytes
    assert (
        prepare_dataset(
            build_tiny_config(tmp_path / "pages", crawl), until="documents"
        ).read.given_text_bytes
        == 0
    )


def test_a_document_without_url_is_not_called_gone_or_unread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"text": make_texts()}), tmp_path / "a.parquet")
    config = build_tiny_config(tmp_path / "data", [f"{tmp_path}/a.parquet"])
    prepare_dataset(config)
    place = locate_token(tmp_path / "data", "train:10")
    assert place.url == ""
    assert "  url     (it has none)  " in format_token_lineage(place)
    assert f"{tmp_path}/a.parquet at row " in format_token_lineage(place)
    for path in (tmp_path / "data" / "documents").iterdir():
        path.unlink()
    assert locate_token(tmp_path / "data", "train:10").url is None
    assert "(its document no longer exists)" in format_token_lineage(
        locate_token(tmp_path / "data", "train:10")
    )
    shown = format_dropped_documents(
        *find_dropped_documents(tmp_path / "data", {"rule": "gopher_quality"}, 1)
    )
    assert shown.startswith(f"(it has no URL)\n  {tmp_path}/a.parquet at row 24\n")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_file_without_the_text_field_names_the_fields_that_have_text(
    tmp_path: Path, name: str
) -> None:
    rows = [{"body": text, "n": 1, "meta": {"title": "x", "size": 2}} for text in make_texts(3)]
    table, path = pa.Table.from_pylist(rows), tmp_path / name
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    wanted = (
        r"no text in field 'text': text is in 'body', 'meta\.title' \(data\.read\.text_field "
        r"names the field\)"
    )
    with pytest.raises(DataError, match=wanted):
        prepare_dataset(build_tiny_config(tmp_path / "data", [str(path)]))
    found = prepare_dataset(
        build_tiny_config(tmp_path / "named", [str(path)], read={"text_field": "body"}),
        until="documents",
    )
    assert found.read.skipped == ()


def test_the_command_counts_documents_and_not_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"text": make_texts()}), tmp_path / "a.parquet")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"data:\n  kind: crawl\n  folder: {tmp_path}/data\n  inputs: [{tmp_path}/a.parquet]\n"
        f"  rules: [{{kind: gopher_quality, min_words: 30}}]\n  executor: {{kind: inline}}\n"
        f"  deduplicate: {{minhash: {{kind: none}}}}\n"
    )
    assert main(["prepare", str(file), "--until", "documents"]) == 0
    assert " of 25 documents kept, " in capsys.readouterr().out
