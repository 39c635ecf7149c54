"""Laws of the input's further fields: every value of a row is in documents/ or dropped/, typed
where one type holds it, and what does not fit is named.

The oracle is the rows that the tests write.
"""

import datetime
import decimal
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmsys.config.cleaning import ReadConfig
from llmsys.data_pipeline.dedup import keys
from llmsys.data_pipeline.pipelines import gather_stage
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.input_files import may_have_fields
from llmsys.dataset.manifest import Manifest
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl, write_sentences

Row = dict[str, Any]


def make_rows(count: int, seed: int = 0) -> list[Row]:
    """Rows that stay, and every fifth is too short to stay."""
    choose = random.Random(seed)
    return [
        {
            "id": f"{seed}-{number:04d}",
            "text": " ".join(write_sentences(choose, 16)) if number % 5 else f"Short {number}.",
        }
        for number in range(count)
    ]


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(folder: Path, inputs: Sequence[Path], **data: Any) -> Manifest:
    config = build_tiny_config(folder, [str(path) for path in inputs], **data)
    return prepare_dataset(config, until="documents")


def read_files(folder: Path, room: str) -> pa.Table:
    files = sorted((folder / room).glob("*.arrow"))
    return pa.concat_tables(pa.ipc.open_file(path).read_all() for path in files)


def collect_rows(folder: Path, names: Sequence[str]) -> dict[str, Row]:
    """The columns of every document, kept or dropped, by id."""
    tables = [read_files(folder, room).select(["id", *names]) for room in ("documents", "dropped")]
    return {row.pop("id"): row for table in tables for row in table.to_pylist()}


def test_fields_of_lines_are_typed_columns_of_kept_and_dropped_documents(tmp_path: Path) -> None:
    rows = make_rows(40)
    for number, row in enumerate(rows):
        row |= {
            "score": number / 4,
            "votes": number - 7,
            "licence": f"cc-{number % 3}",
            "new": True,
        }
        row |= {"tags": [number, {"a": None}], "ratio": number if number % 2 else number + 0.5}
        row |= {"hash": (1 << 63) + number}
        if number >= 25:
            row["late"] = f"since {number}"
        if number % 4 == 0:
            row["votes"] = None
    write_lines(tmp_path / "a.jsonl", rows)
    manifest = prepare(tmp_path / "data", [tmp_path / "a.jsonl"])
    types = {
        "score": pa.float64(),
        "votes": pa.int64(),
        "licence": pa.large_string(),
        "new": pa.bool_(),
        "tags": pa.large_string(),
        "ratio": pa.float64(),
        "hash": pa.uint64(),
        "late": pa.large_string(),
    }
    found = collect_rows(tmp_path / "data", list(types))
    assert len(found) == len(rows)
    assert read_files(tmp_path / "data", "dropped").num_rows >= len(rows) // 5
    for row in rows:
        expected = {name: row.get(name) for name in types}
        expected["tags"] = json.dumps(row["tags"], separators=(",", ":"))
        assert found[row["id"]] == expected
    for room in ("documents", "dropped"):
        schema = read_files(tmp_path / "data", room).schema
        assert {name: schema.field(name).type for name in types} == types
        assert "more_fields" not in schema.names
        assert "fields" not in schema.names
    assert manifest.column_notes == ()
    assert {one.column: (one.type, one.values) for one in manifest.input_columns}["votes"] == (
        "int64",
        30,
    )


def test_columns_of_parquet_keep_their_times_decimals_and_bytes(tmp_path: Path) -> None:
    rows = make_rows(12)
    moment = datetime.datetime(2024, 5, 1, 12, 30, 1, 5, tzinfo=datetime.UTC)
    columns: dict[str, tuple[pa.DataType, Sequence[Any], pa.DataType]] = {
        "seen": (pa.timestamp("us", "UTC"), [moment] * 11 + [None], pa.timestamp("us", "UTC")),
        "nanos": (pa.timestamp("ns"), range(12), pa.timestamp("ns")),
        "day": (pa.date32(), [datetime.date(1969, 7, 20)] * 12, pa.date32()),
        "price": (
            pa.decimal128(12, 3),
            [decimal.Decimal("-1.005")] * 12,
            pa.decimal128(12, 3),
        ),
        "raw": (pa.binary(), [b"\xff\0", b""] * 6, pa.large_binary()),
        "word": (pa.dictionary(pa.int8(), pa.string()), ["a", "b"] * 6, pa.large_string()),
        "small": (pa.int8(), range(-6, 6), pa.int64()),
        "half": (pa.float32(), [0.1] * 12, pa.float64()),
        "none": (pa.int64(), [None] * 12, pa.large_string()),
    }
    table = pa.table(
        {
            "id": [row["id"] for row in rows],
            "text": [row["text"] for row in rows],
            **{name: pa.array(values, kind) for name, (kind, values, _) in columns.items()},
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table.set_column(0, "id", pa.array([f"b{n}" for n in range(12)])))
    exact = {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}
    for name in ("a.parquet", "b.arrow"):
        folder = tmp_path / name[0]
        prepare(folder, [tmp_path / name], deduplicate=exact)
        parts = [read_files(folder, room) for room in ("documents", "dropped")]
        wide = pa.concat_tables(part.select(["offset", *columns]) for part in parts)
        wide = wide.sort_by("offset")
        for column, (kind, values, wanted) in columns.items():
            expected = pa.array(values, kind)
            if pa.types.is_dictionary(kind):
                expected = expected.dictionary_decode()
            if column == "none":
                expected = pa.nulls(12, pa.large_string())
            assert wide.schema.field(column).type == wanted
            assert wide.column(column).combine_chunks() == expected.cast(wanted)


def test_a_type_that_changes_between_shards_loses_nothing_and_is_named(tmp_path: Path) -> None:
    first, second = make_rows(20), make_rows(6, seed=1)
    for number, row in enumerate(first):
        row["score"] = number
    for row in second:
        row["score"] = "n/a"
    second[3]["score"] = {"mean": 0.5}
    write_lines(tmp_path / "a.jsonl", first)
    write_lines(tmp_path / "b.jsonl", second)
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    manifest = prepare(tmp_path / "data", inputs)
    found = collect_rows(tmp_path / "data", ["score", "more_fields"])
    for row in first:
        assert found[row["id"]] == {"score": row["score"], "more_fields": None}
    for row in second:
        assert found[row["id"]]["score"] is None
        assert json.loads(found[row["id"]]["more_fields"]) == {"score": row["score"]}
    assert manifest.column_notes == (
        f'field "score": 5 values are of kind string, such as "n/a" in {tmp_path}/b.jsonl at 0, '
        "but most are int64. The column has nulls there, and more_fields has the values as JSON. "
        "Write one type in all files, or leave the field out of data.read.keep_fields.",
        f'field "score": 1 values are of kind json, such as {{"mean": 0.5}} in {tmp_path}/b.jsonl '
        f"at {sum(len(json.dumps(row)) + 1 for row in second[:3])}, but most are int64. The column "
        "has nulls there, and more_fields has the values as JSON. Write one type in all files, or "
        "leave the field out of data.read.keep_fields.",
    )


def test_a_field_named_like_a_column_of_the_pipeline_is_renamed_and_named(tmp_path: Path) -> None:
    rows = make_rows(10)
    names = {
        "language": "input_language",
        "Offset": "input_Offset",
        "reason": "input_reason",
        "gopher_quality.words": "input_gopher_quality.words",
        "input_language": "input_input_language",
        "more_fields": "input_more_fields",
        "fields": "input_fields",
        "nul\0": "nul",
        "half\ud800": "half?",
        "": "input_",
    }
    # a free name stays where it is
    names |= {"input_language": "input_language", "language": "input_input_language"}
    for number, row in enumerate(rows):
        row |= {name: f"{name!r} {number}" for name in names}
    write_lines(tmp_path / "a.jsonl", rows)
    manifest = prepare(tmp_path / "data", [tmp_path / "a.jsonl"])
    found = collect_rows(tmp_path / "data", list(names.values()))
    for number, row in enumerate(rows):
        assert found[row["id"]] == {new: f"{name!r} {number}" for name, new in names.items()}
    assert (
        'field "language" is the column input_input_language: a column of documents/ or dropped/ '
        "has its name, or no table can have it. Rename the field in the files if you want another "
        "name."
    ) in manifest.column_notes
    assert len(manifest.column_notes) == len(names) - 1


def test_hostile_names_and_values_are_kept_in_bounded_columns(tmp_path: Path) -> None:
    rows = make_rows(30)
    for number, row in enumerate(rows):
        row |= {f"key {number} {name}": name for name in range(400)} if number % 5 else {}
        row["often"] = number
    rows[3]["half"] = "\ud800 and \0"
    rows[4]["x" * 100_000] = 1
    rows[6]["large"] = "y" * 10_000_000
    rows[7]["huge"] = 10**300
    rows[8]["nan"] = [float("nan"), float("inf")]
    write_lines(tmp_path / "a.jsonl", rows)
    manifest = prepare(tmp_path / "data", [tmp_path / "a.jsonl"])
    assert len(manifest.input_columns) == 256
    schema = read_files(tmp_path / "data", "documents").schema
    names = [one.column for one in manifest.input_columns]
    assert {*names, "more_fields"} <= set(schema.names)
    found = collect_rows(tmp_path / "data", [*names, "more_fields"])
    for row in rows:
        cells = found[row["id"]]
        more = json.loads(cells.pop("more_fields") or "{}")
        whole = {name: value for name, value in cells.items() if value is not None} | more
        expected = {name: value for name, value in row.items() if name not in ("id", "text")}
        if "nan" in expected:
            shown = whole.pop("nan")
            assert (json.loads(shown) if isinstance(shown, str) else shown) == ["nan", "inf"]
            del expected["nan"]
        assert whole == expected
    assert any("values of fields have no column" in note for note in manifest.column_notes)


def test_only_the_fields_of_a_list_are_kept_and_a_missing_one_is_named(tmp_path: Path) -> None:
    rows = make_rows(8)
    for number, row in enumerate(rows):
        row |= {"score": number, "meta": {"source": "web", "n": number}, "other": 1}
    write_lines(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        folder = tmp_path / name[0]
        wanted = ["score", "meta.source", "licence"]
        manifest = prepare(folder, [tmp_path / name], read={"keep_fields": wanted})
        found = collect_rows(folder, ["score", "meta.source"])
        assert [found[row["id"]]["score"] for row in rows] == list(range(8))
        assert {row["meta.source"] for row in found.values()} == {"web"}
        assert "other" not in read_files(folder, "documents").schema.names
        assert manifest.column_notes == (
            'data.read.keep_fields names "licence", which no document has; found: '
            '"meta.source", "score". Correct the name, or leave it out.',
        )
        none = prepare(tmp_path / f"{name}-none", [tmp_path / name], read={"keep_fields": "none"})
        assert none.input_columns == ()


def test_what_url_id_and_date_cannot_show_stays_a_field(tmp_path: Path) -> None:
    rows = make_rows(6)
    for row in rows:
        row |= {"url": {"host": "a"}, "date": True, "meta": {"text": row["text"], "n": 1}}
        row["id"] += "x" * 300
        del row["text"]
    write_lines(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        folder = tmp_path / name[0]
        prepare(folder, [tmp_path / name], read={"text_field": "meta.text"})
        columns = ["input_id", "input_url", "input_date", "meta"]
        found = collect_rows(folder, columns)
        assert sorted(map(str, found.values())) == sorted(
            str(
                {
                    "input_id": row["id"],
                    "input_url": '{"host":"a"}',
                    "input_date": True,
                    "meta": '{"n":1}',
                }
            )
            for row in rows
        )


def test_damage_to_a_further_column_costs_no_document(tmp_path: Path) -> None:
    rows = make_rows(200)
    table = pa.Table.from_pylist([row | {"zzz": row["id"] * 50} for row in rows])
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    place = pq.ParquetFile(path).metadata.row_group(0).column(2)
    content = bytearray(path.read_bytes())
    content[place.data_page_offset + place.total_compressed_size - 3] ^= 0xFF
    path.write_bytes(content)
    manifest = prepare(tmp_path / "data", [path])
    found = collect_rows(tmp_path / "data", [])
    assert set(found) == {row["id"] for row in rows}
    assert manifest.read.skipped == ()
    (note,) = manifest.read.noted
    assert note.reason.startswith("further fields are not readable: ")
    assert note.count == len(rows)


def test_blocks_of_crawls_and_of_rows_meet_in_one_dataset(tmp_path: Path) -> None:
    rows = make_rows(10, seed=9)
    for row in rows:
        row["score"] = 1
    write_lines(tmp_path / "z.jsonl", rows)
    crawl = make_crawl(tmp_path / "crawl", files=1)
    inputs = [*crawl.iterdir(), tmp_path / "z.jsonl"]
    prepare(tmp_path / "both", inputs)
    table = read_files(tmp_path / "both", "documents")
    scores = dict(
        zip(table.column("id").to_pylist(), table.column("score").to_pylist(), strict=True)
    )
    assert {scores[row["id"]] for row in rows if row["id"] in scores} == {1}
    assert None in scores.values()
    alone = prepare(tmp_path / "alone", [*crawl.iterdir()])
    assert alone.input_columns == ()
    names = read_files(tmp_path / "alone", "documents").schema.names
    assert [name for name in table.schema.names if name != "score"] == names


@pytest.mark.parametrize("stage", ["decontaminate", "repeated"])
def test_later_stages_keep_the_fields_of_what_they_drop(tmp_path: Path, stage: str) -> None:
    rows = make_rows(24)
    for number, row in enumerate(rows):
        row["day"] = number
    if stage == "decontaminate":
        write_lines(tmp_path / "eval.jsonl", [{"text": rows[n]["text"]} for n in (1, 7, 13)])
        own: Row = {
            "decontaminate": {
                "kind": "ngram",
                "sets": [
                    {
                        "name": "eval",
                        "files": [str(tmp_path / "eval.jsonl")],
                        "query_fields": ["text"],
                    }
                ],
            }
        }
    else:
        rows[2]["text"] = rows[1]["text"]
        own = {"deduplicate": {"repeated_segments": {"kind": "sentences"}}}
    write_lines(tmp_path / "a.jsonl", rows)
    prepare(tmp_path / "data", [tmp_path / "a.jsonl"], **own)
    found = collect_rows(tmp_path / "data", ["day"])
    assert {name: row["day"] for name, row in found.items()} == {
        row["id"]: row["day"] for row in rows
    }


def test_columns_are_the_same_when_blocks_are_gathered_by_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [*make_crawl(tmp_path / "crawl", files=1).iterdir()]
    for number in range(4):
        rows = make_rows(8, seed=number + 5)
        for row in rows:
            row["score"] = number if number % 2 else str(number)
        inputs.append(tmp_path / f"{number}.jsonl")
        write_lines(inputs[-1], rows)
    plain = prepare(tmp_path / "plain", inputs)
    monkeypatch.setattr(keys, "FILES_PER_GROUP", 2)
    monkeypatch.setattr(gather_stage, "FILES_PER_GROUP", 2)
    grouped = prepare(tmp_path / "grouped", inputs)
    assert (tmp_path / "grouped" / "work" / "gather.kept.packs").is_dir()
    assert grouped == plain


def test_a_renamed_field_makes_only_later_stages_again(tmp_path: Path) -> None:
    rows = make_rows(6)
    write_lines(tmp_path / "a.jsonl", [row | {"score": 1} for row in rows])
    before = prepare(tmp_path / "data", [tmp_path / "a.jsonl"])
    write_lines(tmp_path / "a.jsonl", [row | {"mark": 1} for row in rows])
    after = prepare(tmp_path / "data", [tmp_path / "a.jsonl"])
    assert [one.column for one in before.input_columns] == ["score"]
    assert [one.column for one in after.input_columns] == ["mark"]
    assert set(read_files(tmp_path / "data", "documents").column("mark").to_pylist()) == {1}


def test_text_that_is_not_utf8_is_kept_as_bytes(tmp_path: Path) -> None:
    rows = make_rows(8)
    broken = pa.array([b"caf\xe9"] * 8, pa.binary()).view(pa.string())
    table = pa.Table.from_pylist(rows).append_column("place", broken)
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    prepare(tmp_path / "data", [tmp_path / "a.arrow"])
    found = collect_rows(tmp_path / "data", ["place"])
    assert {row["place"] for row in found.values()} == {b"caf\xe9"}


def test_batches_end_by_the_bytes_of_texts_and_fields(tmp_path: Path) -> None:
    rows = [row | {"large": "x" * 400_000} for row in make_rows(20)]
    write_lines(tmp_path / "a.jsonl", rows)
    documents = {"num_shards": 1, "batch_bytes": 1 << 20}
    prepare(tmp_path / "data", [tmp_path / "a.jsonl"], documents=documents)
    file = pa.ipc.open_file(tmp_path / "data" / "documents" / "part-00000.arrow")
    sizes = [file.get_batch(number).num_rows for number in range(file.num_record_batches)]
    assert sum(sizes) > 9
    assert max(sizes) == 3


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.warc.gz", False),
        ("s3://bucket/a.WET.zst", False),
        ("a.arc", False),
        ("a.jsonl.gz", True),
        ("a.gz", True),
        ("a.parquet", True),
    ],
)
def test_names_of_crawl_files_tell_that_there_are_no_fields(path: str, expected: bool) -> None:
    assert may_have_fields(path, ReadConfig()) == expected
    assert not may_have_fields(path, ReadConfig(keep_fields="none"))


def test_a_name_of_more_than_128_characters_has_no_column(tmp_path: Path) -> None:
    names = ["y" * 128, "x" * 129]
    rows = [row | {name: number for number, name in enumerate(names)} for row in make_rows(6)]
    write_lines(tmp_path / "a.jsonl", rows)
    manifest = prepare(tmp_path / "data", [tmp_path / "a.jsonl"])
    assert [one.column for one in manifest.input_columns] == names[:1]
    found = collect_rows(tmp_path / "data", [names[0], "more_fields"])
    for row in found.values():
        assert row == {names[0]: 0, "more_fields": json.dumps({names[1]: 1}, separators=(",", ":"))}
