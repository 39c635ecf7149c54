"""Laws of what is too large to be decoded: it is refused by its header, named with its rows, and
the rest is read.
"""

import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmsys.data_pipeline.readers import arrow as arrow_module
from llmsys.data_pipeline.readers import parquet as parquet_module
from llmsys.data_pipeline.readers import row_reader as columns_module
from llmsys.data_pipeline.readers.arrow import read_file_messages, read_stream_messages
from llmsys.data_pipeline.readers.input_stream import open_input_stream
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.data_pipeline.readers.parquet import compute_largest_page

SMALL = pa.table({"text": [f"Text {number}." for number in range(40)], "n": list(range(40))})
GIANT = pa.table({"text": ["long " * 20_000] * 30, "n": list(range(30))})  # 3 MB


def read(path: Path) -> tuple[list[int], list[tuple[int, str, int]]]:
    batches = list(read_pages(str(path), max_page_bytes=1_000_000))
    offsets = [row["offset"] for batch in batches for row in batch.pages.to_pylist()]
    return offsets, [
        (skip.offset, skip.reason, skip.count) for batch in batches for skip in batch.skipped
    ]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
def test_a_page_beyond_the_limit_costs_its_row_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, version: str
) -> None:
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(
        path, SMALL.schema, compression=codec, use_dictionary=False, data_page_version=version
    ) as writer:
        for table in (SMALL, GIANT, SMALL):
            writer.write_table(table)
    assert read(path) == (list(range(110)), [])
    monkeypatch.setattr(parquet_module, "MAX_PAGE_BYTES", 1_000_000)
    (page, _) = compute_largest_page(
        open_input_stream(str(path)), pq.ParquetFile(path).metadata.row_group(1).column(0), 128
    )
    assert 3_000_000 <= page < 3_010_000
    reason = f"a page of {page} bytes, more than 1000000: write smaller ones"
    assert read(path) == ([*range(40), *range(70, 110)], [(40, reason, 30)])


def test_rows_that_share_their_bytes_are_decoded_few_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(GIANT, path)  # a dictionary of one text
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    assert (
        compute_largest_page(open_input_stream(str(path)), column, 10_000)[1]
        == (64 << 20) // 100_004
    )
    assert read(path)[0] == list(range(30))


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_a_record_batch_beyond_the_limit_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str | None
) -> None:
    options = pa.ipc.IpcWriteOptions(compression=codec)
    file, stream = tmp_path / "a.arrow", tmp_path / "b.arrow"
    for path, make in ((file, pa.ipc.new_file), (stream, pa.ipc.new_stream)):
        with make(path, SMALL.schema, options=options) as writer:
            for table in (SMALL, GIANT, SMALL):
                writer.write_table(table)
        assert read(path) == (list(range(110)), [])
    sizes = [message.size for message in read_file_messages(open_input_stream(str(file)))]
    assert sizes == [
        message.size
        for message in read_stream_messages(open_input_stream(str(stream)))
        if message.is_batch
    ]
    assert 3_000_000 <= sizes[1] < 3_060_000
    monkeypatch.setattr(arrow_module, "_MAX_BATCH", 1_000_000)
    reason = f"a record batch of {sizes[1]} bytes, more than 1000000: write smaller ones"
    assert read(file) == ([*range(40), *range(70, 110)], [(40, reason, 30)])
    reason = f"{sizes[1]} bytes at once, more than 1000000: the rest of the stream is not read"
    assert read(stream) == (list(range(40)), [(40, reason, 1)])


def test_dictionaries_and_footers_beyond_the_limit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.arrow"
    table = pa.table({"text": GIANT["text"].dictionary_encode()})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    assert read(path) == (list(range(30)), [])
    monkeypatch.setattr(arrow_module, "_MAX_BATCH", 50_000)
    offsets, skips = read(path)
    assert (offsets, [(reason[:16], count) for _, reason, count in skips]) == (
        [],
        [("dictionaries of ", 30)],
    )
    pq.write_table(SMALL, tmp_path / "a.parquet")
    monkeypatch.setattr(parquet_module, "_MAX_FOOTER", 100)
    assert read(tmp_path / "a.parquet")[1][0][1].startswith("a parquet file with a footer of ")


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def lying(path: Path, table: pa.Table, rows: int) -> Path:
    """Write a table of 77 rows whose headers say another number."""
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        content = path.read_bytes()
        begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        footer = content[begin:-8].replace(varint(2 * 77), varint(2 * rows))
        path.write_bytes(
            content[:begin] + footer + len(footer).to_bytes(4, "little") + content[-4:]
        )
        return path
    with (pa.ipc.new_file if path.suffix == ".arrow" else pa.ipc.new_stream)(
        path, table.schema
    ) as writer:
        writer.write_table(table)
    path.write_bytes(path.read_bytes().replace(struct.pack("<q", 77), struct.pack("<q", rows)))
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.stream"])
def test_a_header_that_says_any_number_of_rows_makes_no_work_beyond_the_bytes_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(columns_module, "_FEW_ROWS", 1_000)
    for table in (
        pa.table({"n": list(range(77))}),
        pa.table({"text": pa.nulls(77), "n": list(range(77))}),
    ):
        assert sum(count for _, _, count in read(lying(tmp_path / name, table, 77))[1]) in (77, 1)
        path = lying(tmp_path / name, table, 1 << 62)
        offsets, skips = read(path)
        assert offsets == []
        assert 1 <= sum(count for _, _, count in skips) <= 2 * 8 * path.stat().st_size


def test_rows_without_bytes_end_and_those_before_them_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_module, "_FEW_ROWS", 1_000)
    table = pa.table({"text": pa.nulls(77)})
    path = lying(tmp_path / "a.arrow", table, 1 << 62)
    most = 8 * path.stat().st_size
    skips = read(path)[1]
    assert skips[0] == (0, "no text in field 'text'", 1)
    assert skips[-1][1] == f"more than {most} rows in a file of {path.stat().st_size} bytes"
    assert len(skips) == most // 128 * 128 + 1
