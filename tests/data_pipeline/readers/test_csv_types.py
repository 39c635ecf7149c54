"""Columns of CSV have the types that pyarrow infers for the whole input, however it is split."""

import csv
import io
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv as pyarrow_csv
from pydantic import ValidationError

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.core import input_fields
from llmsys.data_pipeline.core.csv_types import INFERRED, TEXT
from llmsys.data_pipeline.core.document_schema import build_document_schema
from llmsys.data_pipeline.core.input_columns import choose_columns
from llmsys.data_pipeline.core.input_fields import (
    FIELDS,
    FieldCounts,
    decode_fields,
    encode_fields,
    to_python_value,
)
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.dataset.manifest import Manifest
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, write_sentences

Rows = list[dict[str, str]]
LOOSE: dict[str, Any] = {"rules": [], "language": {"languages": [], "min_score": 0}}


def read_cells(path: Path, **config: Any) -> tuple[list[Any], list[tuple[int, str]]]:
    """The rows that rules see, and the places and reasons of losses."""
    found: list[Any] = []
    losses: list[tuple[int, str]] = []
    for batch in read_pages(str(path), max_page_bytes=1_000, config=ReadConfig(**config)):
        for row in batch.pages.to_pylist():
            cell = decode_fields(row[FIELDS])
            found.append({name: to_python_value(value) for name, value in cell.items()})
        losses += [(skip.offset, skip.reason) for skip in batch.skipped]
    return found, losses


def infer_column(texts: list[str]) -> pa.ChunkedArray:
    """Read a column by pyarrow alone."""
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_ALL).writerows([["a"], *[[text] for text in texts]])
    return pyarrow_csv.read_csv(
        io.BytesIO(written.getvalue().encode()),
        pyarrow_csv.ReadOptions(block_size=1 << 24),
        pyarrow_csv.ParseOptions(newlines_in_values=True),
    ).column("a")


TEXTS = """1;0;7;-3; 4 ;007;0x1F;+5;1e5;2.5;inf;nan;NA;null;true;FALSE;t;yes;2024-02-29;2023-02-29
10:00;10:00:01;2024-01-01 10:00:00;2024-01-01T10:00:00.25
2024-01-01T10:00:00Z;2024-01-01T10:00:00.5Z;2024-01-01T10:00:00+02:00
9999-12-31;9223372036854775807;9223372036854775808;1,5;a "b";é;\0;-0;1_0;Infinity;٣""".replace(
    "\n", ";"
).split(";")


def type_column(texts: list[str], files: int, shuffle: random.Random) -> pa.Array:
    """The column that texts become when they are in several files, in any order."""
    total = FieldCounts()
    parts = [(f"{n}.csv", texts[n::files]) for n in range(files)]
    for name, part in shuffle.sample(parts, files):
        counts = FieldCounts()
        for number, text in enumerate(part):
            counts.add_cells([encode_fields({"a": {TEXT: text}})], [number])
        total.merge_counts(counts.to_dict(name))
    columns = choose_columns(total, (), None).columns
    cells = [encode_fields({"a": {TEXT: text}}) for text in texts]
    batch = pa.record_batch({FIELDS: pa.array(cells, pa.large_string())})
    return columns.unpack_batch(batch).column("a")


def test_types_and_values_are_those_of_pyarrow_for_all_files_at_once() -> None:
    choose = random.Random(0)
    seen = set()
    cases = [[text] for text in TEXTS]
    cases += [choose.choices(TEXTS, k=choose.randrange(2, 4)) for _ in range(400)]
    for texts in cases:
        expected = infer_column(texts)
        found = type_column(texts, min(len(texts), choose.randrange(1, 4)), choose)
        seen.add(str(expected.type))
        if pa.types.is_null(expected.type):
            # Spellings of null alone stay texts: NA may be Namibia.
            assert found.to_pylist() == texts
        elif pa.types.is_string(expected.type):
            assert (found.type, found.to_pylist()) == (pa.large_string(), texts)
        else:
            assert found.type == expected.type, texts
            assert found.to_pylist() == expected.to_pylist()
    assert seen >= set(INFERRED)


def write_shards(folder: Path, scores: list[list[str]]) -> list[str]:
    """Write a file for each list of scores, with a document for each of them."""
    choose = random.Random(3)
    for number, column in enumerate(scores):
        with (folder / f"{number}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "score"])
            writer.writerows([" ".join(write_sentences(choose, 6)), score] for score in column)
    return [str(folder / f"{number}.csv") for number in range(len(scores))]


def prepare(folder: Path, inputs: list[str], **data: Any) -> tuple[Manifest, pa.Table]:
    config = build_tiny_config(folder, inputs, **(LOOSE | data))
    manifest = prepare_dataset(config, until="documents")
    tables = [
        pa.ipc.open_file(path).read_all() for path in sorted((folder / "documents").glob("*.arrow"))
    ]
    return manifest, pa.concat_tables(tables).sort_by(
        [("file", "ascending"), ("offset", "ascending")]
    )


@pytest.mark.parametrize(
    ("scores", "kind", "values"),
    [
        ([["1", "2"], ["3.5", ""]], pa.float64(), [1.0, 2.0, 3.5, None]),
        ([["1", "0"], ["true", "NA"]], pa.bool_(), [True, False, True, None]),
        ([["1", "2", "3"], ["4", "n.a."]], pa.large_string(), ["1", "2", "3", "4", "n.a."]),
    ],
    ids=["fractions", "booleans", "texts"],
)
def test_types_that_change_between_shards_give_one_column(
    tmp_path: Path, scores: list[list[str]], kind: pa.DataType, values: list[Any]
) -> None:
    inputs = write_shards(tmp_path, scores)
    manifest, table = prepare(tmp_path / "one", inputs)
    assert table.column("score").type == kind
    assert table.column("score").to_pylist() == values
    assert manifest.read.skipped == ()
    notes = [note for note in manifest.column_notes if "score" in note]
    if values[-1] == "n.a.":
        assert notes == [
            f"field \"score\": 4 of 5 texts are int64, but 'n.a.' in {inputs[1]} at "
            f"{Path(inputs[1]).read_bytes().rindex(10, 0, -1) + 1} is not, so the column has "
            "the texts as they are. Correct the file, or name the type in data.read.column_types: "
            "then such rows are left out and counted."
        ]
    else:
        assert notes == []
    executor = {"kind": "local", "workers": 2}
    prepare(tmp_path / "two", inputs[::-1], executor=executor)
    found = [hash_files(tmp_path / name) | {"manifest.json": ""} for name in ("one", "two")]
    assert found[0] == found[1]


def test_a_declared_type_refuses_rows_and_counts_them(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,score,day,code\n" + "a,1,2024-02-29,007\n" * 3)
    offsets = []
    for row in ("b,x,2024-02-29,1\n", "c,NA,,NA\n", "d,2,2023-02-29,2\n", "e,,2024-03-01,é\n"):
        offsets.append(path.stat().st_size)
        with path.open("a") as file:
            file.write(row)
    types = {"score": "float64", "day": "date32", "code": "string", "absent": "bool"}
    found, losses = read_cells(path, column_types=types)
    assert losses == [
        (offsets[0], "column 'score' is not float64, its type in data.read.column_types"),
        (offsets[2], "column 'day' is not date32, its type in data.read.column_types"),
    ]
    assert [row.get("score") for row in found] == [1.0, 1.0, 1.0, None, None]
    assert [str(row.get("day")) for row in found] == ["2024-02-29"] * 3 + ["None", "2024-03-01"]
    assert [row["code"] for row in found] == ["007"] * 3 + ["NA", "é"]
    plain, losses = read_cells(path)
    assert losses == []
    assert [row.get("score") for row in plain] == ["1", "1", "1", "x", "NA", "2", None]


def test_declared_types_are_columns_and_names_that_no_file_has_are_named(tmp_path: Path) -> None:
    inputs = write_shards(tmp_path, [["1", "2"], ["3", "zero"]])
    manifest, table = prepare(
        tmp_path / "one", inputs, read={"column_types": {"score": "float64", "scroe": "bool"}}
    )
    assert table.column("score").to_pylist() == [1.0, 2.0, 3.0]
    (skipped,) = manifest.read.skipped
    assert (skipped.file, skipped.count) == (inputs[1], 1)
    assert [note for note in manifest.column_notes if "column_types" in note] == [
        'data.read.column_types names "scroe", which no document has; found: "score". Correct '
        "the name, or leave it out."
    ]


def test_a_column_that_is_read_as_text_has_no_declared_type() -> None:
    with pytest.raises(ValidationError, match=r"int64 for 'id', which data.read.id_field reads"):
        ReadConfig(column_types={"id": "int64"})


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    hostile = ["9" * 500_000, "1" + "0" * 2_000, '"",\n"', "\0", "١٢٣", "1\n2", "=1+1", "N" * 1_025]
    for text in hostile:
        found = type_column(["1", text, "2"], 2, random.Random(0))
        assert (found.type, found.to_pylist()) == (pa.large_string(), ["1", text, "2"])


def test_texts_of_a_file_with_too_many_columns_are_kept(tmp_path: Path) -> None:
    """Such a file counts only some columns, and the type of another is chosen without it."""
    total = FieldCounts()
    wide = {f"c{number}": {TEXT: "1"} for number in range(300)}
    counts = FieldCounts()
    counts.add_cells([encode_fields(wide)] * 2 + [encode_fields({"z": {TEXT: "x"}})], [0] * 3)
    total.merge_counts(counts.to_dict("a.csv"))
    counts = FieldCounts()
    counts.add_cells([encode_fields({"z": {TEXT: "1"}})] * 5, range(5))
    total.merge_counts(counts.to_dict("b.csv"))
    columns = choose_columns(total, build_document_schema(()).names, None).columns
    cells = [encode_fields({"z": {TEXT: text}}) for text in ("1", "x", "2")]
    batch = columns.unpack_batch(pa.record_batch({FIELDS: pa.array(cells, pa.large_string())}))
    assert batch.column("z").to_pylist() == [1, None, 2]
    assert batch.column("more_fields").to_pylist() == [None, '{"z":"x"}', None]


def test_texts_that_wait_for_their_types_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(input_fields, "MOST_WAITING", 5_000)
    counts = FieldCounts()
    most = 0
    for row in range(40):
        cell = encode_fields({f"c{number}": {TEXT: "7" * 50} for number in range(20)})
        counts.add_cells([cell], [row])
        most = max(most, sum(len(text) for one, _ in counts._waiting.values() for text in one))
    assert 1_000 < most <= 5_000 + 20 * 50
    found = counts.to_dict("a.csv")["texts"]
    assert [found[f"c{number}"]["double"] for number in range(20)] == [[40]] * 20
