"""Rows of CSV and TSV are documents with their columns, or losses with their places."""

import bz2
import csv
import gzip
import io
import json
import lzma
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.core.csv_types import TEXT
from llmsys.data_pipeline.core.input_fields import FIELDS, decode_fields
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.page_reader import read_pages
from tests.helpers.tiny_crawl import build_tiny_config, write_sentences

LIMIT = 1_000
PACK: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def read(path: Path, **config: Any) -> tuple[list[dict[str, Any]], list[tuple[int, str]]]:
    """The rows of a file with their further fields, and the places and reasons of its losses."""
    rows: list[dict[str, Any]] = []
    losses: list[tuple[int, str]] = []
    for batch in read_pages(str(path), max_page_bytes=LIMIT, config=ReadConfig(**config)):
        for row in batch.pages.to_pylist():
            fields = {
                name: value[TEXT] if isinstance(value, dict) else value
                for name, value in decode_fields(row.pop(FIELDS, None)).items()
            }
            rows.append({key: row[key] for key in ("offset", "text", "url", "date")} | fields)
        losses += [(skip.offset, skip.reason) for skip in batch.skipped]
    return rows, losses


def read_content(
    folder: Path, content: bytes, name: str = "a.csv", **config: Any
) -> tuple[list[str], list[tuple[int, str]]]:
    (folder / name).write_bytes(content)
    rows, losses = read(folder / name, **config)
    return [row["text"] for row in rows], losses


@pytest.mark.parametrize("packed", PACK)
def test_rows_are_those_of_the_csv_module_with_every_column(tmp_path: Path, packed: str) -> None:
    """The oracle writes the file and does not share the reader's lines or places."""
    choose = random.Random(1)
    pieces = ["a", "é", '"', ",", "\n", "\r\n", " ", "x" * 40, "“", "\t"]
    written = io.StringIO(newline="")
    writer = csv.writer(written)
    writer.writerow(["url", "text", "score", "note"])
    rows = []
    places = []
    for number in range(300):
        text = "".join(choose.choices(pieces, k=choose.randrange(1, 12))) + "."
        note = "".join(choose.choices(pieces, k=choose.randrange(0, 3)))
        places.append(len(written.getvalue().encode()))
        writer.writerow([f"https://a.org/{number}", text, choose.random(), note])
        rows.append((text, note))
    path = tmp_path / f"a.csv{packed}"
    path.write_bytes(PACK[packed](written.getvalue().encode()))
    found, losses = read(path)
    assert losses == []
    assert [(row["text"], row.get("note", "")) for row in found] == rows
    assert [row["offset"] for row in found] == places
    assert [row["url"] for row in found] == [f"https://a.org/{number}" for number in range(300)]
    assert all(isinstance(row["score"], str) for row in found)


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("a.tsv", b"id\ttext\n1\tone, two\n", ["one, two"]),
        ("a.tab.gz", gzip.compress(b"id\ttext\n1\tone\n", mtime=0), ["one"]),
        ("a.csv", b"id;text\n1;one, two\n", ["one, two"]),
        ("a.csv", b"id|text\r\n1|one\r\n\r\n2|two", ["one", "two"]),
        ("a.csv", b'\xef\xbb\xbf"text",id\none,1\n', ["one"]),
        ("a.csv", b"text\none\n", ["one"]),
        ("a.csv", b'text,id\n5" nail,1\n"a"b,2\n', ['5" nail', "ab"]),
        ("A.CSV", b"text\none\n", ["one"]),
        ("a.csv", b",text\n0,one\n", ["one"]),
        ("a.csv", b'text,id\n"one\ntwo",1', ["one\ntwo"]),
        (
            "a.csv",
            b"text,id\n" + "é".encode() * 400 + b"\xe9 one,1\n",
            [f"{'é' * 400}\ufffd one"],
        ),
    ],
)
def test_headers_delimiters_and_quotes(
    tmp_path: Path, name: str, content: bytes, texts: list[str]
) -> None:
    assert read_content(tmp_path, content, name) == (texts, [])


LOSSES: dict[str, tuple[bytes, list[str], list[tuple[int, str]]]] = {
    "fields": (
        b"text,id\none,1\ntwo\nthree,3,4\nfour,4\n",
        ["one", "four"],
        [(14, "1 fields, and the header has 2"), (18, "3 fields, and the header has 2")],
    ),
    "an open quote": (
        b'text,id\none,1\n"two,2\nthree,3\nfour,4\n',
        ["one", "three", "four"],
        [(14, "a quote without end")],
    ),
    "a long text": (
        b"text,id\n" + b"x" * 1001 + b",1\ntwo,2\n",
        ["two"],
        [(8, "longer than 1000 bytes")],
    ),
    "a long line": (
        b"text,id\n" + b"x" * 70_000 + b",1\ntwo,2\n",
        ["two"],
        [(8, "a line longer than 67536 bytes")],
    ),
    "a carriage return": (
        b"text,id\na\rb,1\ntwo,2\n",
        ["two"],
        [(8, "not CSV: a carriage return in a field without quotes")],
    ),
    "other bytes": (b"text,id\n\xff\xfe\xfd\xfc,1\ntwo,2\n", ["two"], [(8, "not UTF-8")]),
    "no text": (
        b"body,id\none,1\n",
        [],
        [
            (
                0,
                "no text in field 'text': text is in 'body', 'id' (data.read.text_field names the "
                "field); the first row is the header",
            )
        ],
    ),
    "two of a name": (b"text,text\n", [], [(0, "the header has two columns 'text': rename one")]),
    "an open header": (
        b'"text,id\none,1\n',
        [],
        [(0, "a quote without end; it is the header, without which no row is read")],
    ),
    "UTF-16": (
        "text\none\n".encode("utf-16"),
        [],
        [
            (
                0,
                "UTF-16: convert it, such as with iconv -f UTF-16 -t UTF-8; it is the header, "
                "without which no row is read",
            )
        ],
    ),
    "nothing": (b"", [], [(0, "empty file")]),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_damaged_row_is_a_loss_with_its_place_and_the_next_one_is_read(
    case: str, tmp_path: Path
) -> None:
    content, texts, losses = LOSSES[case]
    assert read_content(tmp_path, content) == (texts, losses)


def test_damage_in_the_compression_loses_the_rows_that_it_cuts(tmp_path: Path) -> None:
    members = [
        gzip.compress(part)
        for part in (b'text,id\none,1\n"two\n', b'too",2\nthree,3\n', b"four,4\nfive,5\n")
    ]
    broken = bytearray(members[1])
    broken[12] ^= 0xFF
    texts, losses = read_content(tmp_path, members[0] + bytes(broken) + members[2], "a.csv.gz")
    assert texts[0] == "one"
    assert texts[-2:] == ["four", "five"]
    assert "three" not in texts
    assert {offset for offset, _ in losses} >= {14}


def test_other_columns_may_be_left_out_or_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"body,link,kind,score\none,https://a.org,web,3\n")
    names = {"text_field": "body", "url_field": "link"}
    whole, _ = read(tmp_path / "a.csv", **names)
    assert whole[0] | {} == {
        "offset": 21, "text": "one", "url": "https://a.org", "date": "", "kind": "web",
        "score": "3",
    }  # fmt: skip
    some, _ = read(tmp_path / "a.csv", keep_fields=("score",), **names)
    assert "kind" not in some[0]
    none, _ = read(tmp_path / "a.csv", keep_fields="none", **names)
    assert "score" not in none[0]


@pytest.mark.parametrize("line", [b'"x","y\n', b'"\n', b'a,"b\n'], ids=["both", "quote", "later"])
def test_quotes_without_end_cost_no_more_than_a_few_times_the_file(
    line: bytes, tmp_path: Path
) -> None:
    """Counts the lines that the csv module is given: time says nothing on a busy machine."""
    from llmsys.data_pipeline.readers import csv_rows

    content = b"text,id\n" + line * 30_000
    given = 0
    plain = csv_rows._LineFeed._take_line

    def count(feed: Any) -> None:
        nonlocal given
        given += 1
        plain(feed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_rows._LineFeed, "_take_line", count)
        read_content(tmp_path, content)
    # Sixteen times at most 67,536 bytes are read again.
    assert given <= 30_001 + 17 * 67_536 // len(line) + 17


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    row = b'"' + b"a text\n" * 120 + b'",1\n'

    def measure_peak(rows: int) -> int:
        (tmp_path / "a.csv").write_bytes(b"text,id\n" + row * rows)
        tracemalloc.start()
        for _ in read_pages(str(tmp_path / "a.csv"), max_page_bytes=LIMIT):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    measure_peak(10)
    assert measure_peak(2_000) < 2 * measure_peak(500)


def test_a_dataset_of_csv_is_that_of_the_same_rows_as_json_lines(tmp_path: Path) -> None:
    choose = random.Random(2)
    rows = [
        {"text": " ".join(write_sentences(choose, 6)), "url": f"https://a.org/{number}",
            "kind": choose.choice(["web", "wiki"])}
        for number in range(30)
    ]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with (tmp_path / "b.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["url", "kind", "text"])
        writer.writeheader()
        writer.writerows(rows)
    found = []
    for name in ("a.jsonl", "b.csv"):
        config = build_tiny_config(tmp_path / f"data-{name}", [str(tmp_path / name)])
        manifest = prepare_dataset(config, "documents")
        assert manifest.read.skipped == ()
        assert [column.column for column in manifest.input_columns] == ["kind"]
        table = pa.concat_tables(
            pa.ipc.open_file(path).read_all()
            for path in sorted((tmp_path / f"data-{name}" / "documents").glob("*.arrow"))
        )
        found.append(table.drop_columns(["file", "offset"]).sort_by("id").to_pylist())
    assert found[0] == found[1]
    assert len(found[0]) > 20
