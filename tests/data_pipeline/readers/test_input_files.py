"""Laws of inputs: paths, URLs, patterns and lists name files; a file elsewhere is known,
retried, and read the same.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry  # type: ignore[import-untyped]

from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers import input_stream as source_module
from llmsys.data_pipeline.readers.input_files import (
    compute_input_identity,
    find_inputs,
    get_input_name,
    get_input_size,
)
from llmsys.data_pipeline.readers.input_stream import open_input_stream
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.dataset.token_shards import read_batches, verify_checksums
from llmsys.errors import DataError
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl
from tests.helpers.warc_records import compress_members, format_page


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waits: list[float] = []
    monkeypatch.setattr(source_module, "sleep", waits.append)
    return waits


def test_patterns_urls_and_lists_name_files_once_and_in_order(tmp_path: Path, memory: Any) -> None:
    for name in ("b.warc", "a.warc", "c[1].warc"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "folder.warc").mkdir()
    memory.pipe("/crawl/1.warc", b"x")
    listed = tmp_path / "list.txt"
    listed.write_text(f"# two\n{tmp_path}/a.warc\n\nmemory://crawl/*.warc\n")
    found = find_inputs(
        [f"@{listed}", f"{tmp_path}/*.warc", f"{tmp_path}/./a.warc", f"{tmp_path}/c[1].warc"]
    )
    names = ["a.warc", "b.warc", "c[1].warc", "folder.warc"]
    assert found == [*(f"{tmp_path}/{name}" for name in names), "memory:///crawl/1.warc"]
    assert [get_input_name(path) for path in found[-2:]] == ["folder.warc", "1.warc"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("memory://none/*.warc", "no file matches 'memory://none/*.warc'. Correct the address."),
        ("nosuch://x/y", "nosuch://x/y cannot be read"),
        ("@{folder}/no.txt", "the list '@{folder}/no.txt' cannot be read"),
        ("@{folder}/loop.txt", "is nested in 8 lists"),
        ("@{folder}/bad.txt", "bad.txt, line 2: no file matches"),
    ],
)
def test_an_input_that_names_nothing_is_refused_with_its_place(
    tmp_path: Path, pattern: str, message: str
) -> None:
    (tmp_path / "loop.txt").write_text(f"@{tmp_path}/loop.txt\n")
    (tmp_path / "bad.txt").write_text(f"\n{tmp_path}/nothing.warc\n")
    with pytest.raises(DataError) as caught:
        find_inputs([pattern.format(folder=tmp_path)])
    assert message.format(folder=tmp_path) in str(caught.value)


def test_a_storage_whose_package_is_missing_is_refused_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)  # another test may have used it
    with pytest.raises(
        DataError,
        match=r"s3://bucket/\*.warc.gz needs a package that is not installed.*pip install "
        r"'llmsys\[s3\]'",
    ):
        find_inputs(["s3://bucket/*.warc.gz"])


def test_a_remote_file_has_an_identity_that_changes_with_it(tmp_path: Path, memory: Any) -> None:
    journal = Journal(tmp_path)
    memory.pipe("/x/a.warc", b"one")
    first = compute_input_identity(journal, "memory://x/a.warc")
    assert first == compute_input_identity(journal, "memory://x/a.warc") != ""
    assert get_input_size("memory://x/a.warc") == 3
    memory.pipe("/x/a.warc", b"two!")
    assert compute_input_identity(journal, "memory://x/a.warc") != first
    assert compute_input_identity(journal, "memory://x/none.warc") == ""


class Failing:
    """A storage of which the reads at some positions fail so many times."""

    def __init__(self, opened: Any, failures: dict[int, int]) -> None:
        self.opened, self.failures = opened, failures
        self.size, self.version = opened.size, opened.version

    def read_block(self, position: int, size: int) -> bytes:
        for place in self.failures:
            if position <= place < position + size and self.failures[place]:
                self.failures[place] -= 1
                raise ConnectionError("the connection was reset")
        data: bytes = self.opened.read_block(position, size)
        return data

    def close(self) -> None:
        self.opened.close()


@pytest.mark.parametrize(
    ("times", "pages", "waits"), [(4, 300, [0.5, 1, 2, 4]), (5, None, [0.5, 1, 2, 4])]
)
def test_a_storage_that_fails_is_tried_again_with_back_off_and_then_counted(
    memory: Any,
    monkeypatch: pytest.MonkeyPatch,
    no_waiting: list[float],
    times: int,
    pages: int | None,
    waits: list[float],
) -> None:
    content = b"".join(compress_members(*map(format_page, range(300))))
    memory.pipe("/x/a.warc.gz", content)
    failures = {len(content) - 10: times}
    place = source_module._RemoteFile
    monkeypatch.setattr(
        source_module, "_RemoteFile", lambda url, **more: Failing(place(url, **more), failures)
    )
    batches = list(read_pages("memory://x/a.warc.gz", max_page_bytes=10_000))
    assert no_waiting[:4] == waits
    skips = [skip for batch in batches for skip in batch.skipped]
    if pages is not None:
        assert sum(batch.pages.num_rows for batch in batches) == pages
        assert skips == []
    else:
        assert [(skip.reason, skip.is_retryable) for skip in skips] == [
            ("unreadable after 5 tries: the connection was reset", True)
        ]


def test_a_file_that_could_not_be_read_is_read_again_by_the_next_run(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, no_waiting: list[float]
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=2, pages=6)
    for path in crawl.iterdir():
        memory.pipe(f"/x/{path.name}", path.read_bytes())
    config = build_tiny_config(tmp_path / "data", ["memory://x/*.gz"], documents={"num_shards": 1})
    place = source_module._RemoteFile
    with monkeypatch.context() as patch:
        broken = {100: 1_000}
        patch.setattr(
            source_module,
            "_RemoteFile",
            lambda url, **_: Failing(place(url), broken if url.endswith("1.warc.gz") else {}),
        )
        first = prepare_dataset(config, until="documents")
    assert [skip.reason for skip in first.read.skipped] == [
        "unreadable after 5 tries: the connection was reset"
    ]
    assert prepare_dataset(config, until="documents").read.skipped == ()


def test_a_source_that_ends_early_is_an_error_and_not_the_end(
    memory: Any, monkeypatch: pytest.MonkeyPatch, no_waiting: list[float]
) -> None:
    memory.pipe("/x/a", b"0123456789")
    place = source_module._RemoteFile

    class Short(Failing):
        def read_block(self, position: int, size: int) -> bytes:
            return super().read_block(position, size)[: 6 - position] if position < 6 else b""

    monkeypatch.setattr(
        source_module, "_RemoteFile", lambda url, **more: Short(place(url, **more), {})
    )
    with (
        open_input_stream("memory://x/a", 2) as source,
        pytest.raises(OSError, match="the file ends at byte 6 of 10"),
    ):
        source.read_block(0, 10)


def documents(rows: int) -> pa.Table:
    return pa.table({"text": [f"Document {number} of a few. " * 40 for number in range(rows)]})


def write_documents(path: Path, rows: int) -> None:
    table = documents(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=50, compression="none")
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        path.write_bytes(b"".join(compress_members(*map(format_page, range(rows)))))


@pytest.mark.parametrize("name", ["a.warc.gz", "a.jsonl", "a.parquet", "a.arrow"])
def test_a_file_rewritten_while_it_is_read_is_read_again_by_the_next_run(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    write_documents(path, 500)
    size, time = path.stat().st_size, path.stat().st_mtime_ns
    batches = read_pages(str(path), max_page_bytes=10_000, batch_pages=10)
    count = next(batches).pages.num_rows
    with path.open("r+b") as file:
        file.write(b"x")  # as long as before, and all but one byte the same
    os.utime(path, ns=(time + 1, time + 1))
    rest = list(batches)
    (skip,) = [skip for batch in rest for skip in batch.skipped]
    assert (skip.reason, skip.is_retryable) == (
        "unreadable after 1 try: the file changed while it was read",
        True,
    )
    assert 0 <= skip.offset <= size
    assert count + sum(batch.pages.num_rows for batch in rest) < 500


def test_a_file_whose_name_passes_to_another_while_it_is_read_is_read_as_it_was(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.jsonl"
    write_documents(path, 500)
    batches = read_pages(str(path), max_page_bytes=10_000, batch_pages=10)
    first = next(batches)
    (tmp_path / "b.jsonl").write_text("{}\n")
    os.replace(tmp_path / "b.jsonl", path)
    texts = [text for batch in (first, *batches) for text in batch.pages["text"].to_pylist()]
    assert texts == documents(500)["text"].to_pylist()


def test_documents_are_copied_to_other_formats_that_can_be_read_again(tmp_path: Path) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=1, pages=6)
    copies = {"num_shards": 1, "export_formats": ["parquet", "jsonl.zst"]}
    prepare_dataset(build_tiny_config(tmp_path / "a", crawl, documents=copies), until="documents")
    manifest = verify_checksums(tmp_path / "a")
    names = ["part-00000.parquet", "part-00000.jsonl.zst"]
    assert [(file.name, file.rows) for file in manifest.exports.files] == [
        (name, 6) for name in names
    ]
    wanted = identities(tmp_path / "a")
    for name in (*names, "part-00000.arrow"):
        prepare_dataset(
            build_tiny_config(tmp_path / name, [f"{tmp_path}/a/documents/{name}"]),
            until="documents",
        )
        assert identities(tmp_path / name) == wanted


def identities(folder: Path) -> list[tuple[str, ...]]:
    files = sorted((folder / "documents").glob("*.arrow"))
    rows = [row for file in files for batch in read_batches(file) for row in batch.to_pylist()]
    return sorted((row["id"], row["url"], row["date"], row["text"]) for row in rows)


def test_the_fields_of_documents_are_a_choice(tmp_path: Path) -> None:
    from llmsys.config.cleaning import ReadConfig

    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"body": {"raw": "Text."}, "meta": {"link": "http://x"}, "n": 5, "date": None})
        + "\n"
    )
    config = ReadConfig(text_field="body.raw", url_field="meta.link", id_field="n")
    (batch,) = read_pages(str(path), max_page_bytes=100, config=config)
    row = batch.pages.to_pylist()[0]
    assert (row["text"], row["url"], row["id"], row["date"]) == ("Text.", "http://x", "5", "")
