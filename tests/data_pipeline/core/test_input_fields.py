"""Counts of fields are exact for frequent names and bounded for any others; cells and types are
exact.
"""

import json

import pyarrow as pa
import pytest

from llmsys.data_pipeline.core.input_columns import InputColumns
from llmsys.data_pipeline.core.input_fields import (
    FIELDS,
    FieldCounts,
    choose_type,
    decode_fields,
    encode_fields,
    get_kind,
)


def test_a_shard_with_ten_thousand_names_reports_the_256_with_most_values() -> None:
    counts = FieldCounts()
    for row in range(100):
        fields = {f"key {row} {number}": number for number in range(100)} | {"often": row}
        counts.add_cells([encode_fields(fields)], [row])
    plain = counts.to_dict("a.jsonl")
    assert len(plain["names"]) == 256
    assert plain["names"]["often"]["integer"] == [100, 0, "0"]
    counted = sum(found[0] for kinds in plain["names"].values() for found in kinds.values())
    assert counted + plain["left_out"] == 100 * 101
    assert json.loads(json.dumps(plain)) == plain


def test_counts_of_many_files_are_bounded_and_keep_what_is_frequent() -> None:
    total = FieldCounts()
    for file in range(60):
        counts = FieldCounts()
        fields = {f"key {file} {number}": number for number in range(200)} | {"often": str(file)}
        counts.add_cells([encode_fields(fields)] * 2, [0, 1])
        total.merge_counts(counts.to_dict(f"{file}.jsonl"))
        assert len(total.list_names()) <= 4_096
    name, kinds = total.list_names()[0]
    assert (name, kinds) == ("often", {"string": [120, 0, '"0"', "0.jsonl"]})
    counted = sum(found[0] for _, kinds in total.list_names() for found in kinds.values())
    assert counted + total.num_left_out == 60 * 201 * 2


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 2], "int64"),
        ([1, -2, 1 << 62], "int64"),
        ([1, 1 << 63], "uint64"),
        ([-1, -2, 1 << 63], "int64"),
        ([1, 2, 0.5], "double"),
        ([1 << 60, 1 << 61, 0.5], "int64"),
        (["a", "b", 1], "large_string"),
        (["a", 1, 2], "int64"),
        (["a", 1], "int64"),
        ([True, True, 1], "bool"),
        ([None, None], "large_string"),
        ([{"json": []}, "a", {"json": {}}], "json"),
        ([{"date32[day]": 1}], "date32[day]"),
        ([10**30], "large_string"),
    ],
)
def test_the_type_is_the_one_that_holds_most_values(values: list[object], expected: str) -> None:
    counts: dict[str, int] = {}
    for value in values:
        if value is not None:
            counts[get_kind(value)] = counts.get(get_kind(value), 0) + 1
    assert choose_type(counts) == expected


@pytest.mark.parametrize("kind", ["timestamp[us, tz=Nowhere/At_All]", "timestamp[s]"])
def test_times_that_no_calendar_has_are_kept_as_text(kind: str) -> None:
    cells = pa.array([encode_fields({"a": {kind: 1 << 62}})], pa.large_string())
    batch = pa.record_batch({FIELDS: cells})
    found = InputColumns((), has_more=True).unpack_batch(batch).column("more_fields")[0].as_py()
    assert str(1 << 62) in json.loads(found)["a"]
    typed = InputColumns((("a", "a", kind),)).unpack_batch(batch)
    assert typed.column("a").cast(pa.int64()).to_pylist() == [1 << 62]


def test_cells_keep_what_utf8_cannot_hold() -> None:
    fields = {"nul\0": "a\0b", "half\ud800": "\udfff", "": 10**100, "n": {"json": [None, {"": 0}]}}
    cell = encode_fields(fields)
    assert cell is not None
    assert cell.isascii()
    assert decode_fields(cell) == fields
    assert encode_fields({}) is None
    assert decode_fields(None) == {}
