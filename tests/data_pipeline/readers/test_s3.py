"""Laws of reading from S3, held against s3fs itself and a storage on this machine that fails
when it is told to.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmsys.data_pipeline.readers import input_stream as source_module
from llmsys.data_pipeline.readers.input_files import find_inputs
from llmsys.data_pipeline.readers.page_batch import SkippedRecord
from llmsys.data_pipeline.readers.page_reader import read_pages
from llmsys.errors import DataError
from tests.helpers import fake_s3
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.warc_records import compress_members, format_page

URL, KEY = "s3://crawl/2024/1.warc.gz", "2024/1.warc.gz"
PAGES = 400
CONTENT = b"".join(compress_members(*map(format_page, range(PAGES))))


@pytest.fixture(scope="module")
def storage() -> Iterator[FakeS3]:
    with FakeS3() as s3:
        yield s3


@pytest.fixture
def s3(storage: FakeS3, monkeypatch: pytest.MonkeyPatch) -> FakeS3:
    for name, value in storage.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(source_module, "sleep", lambda seconds: None)
    monkeypatch.setattr(source_module, "_READ_AHEAD", 1 << 14)
    storage.objects, storage.failures, storage.asked = {KEY: CONTENT}, {}, {}
    return storage


def read(path: str = URL) -> tuple[list[tuple[int, bytes]], list[SkippedRecord]]:
    batches = list(read_pages(path, max_page_bytes=10_000))
    rows = [row for batch in batches for row in batch.pages.to_pylist()]
    return [(row["offset"], row["payload"]) for row in rows], [
        skip for batch in batches for skip in batch.skipped
    ]


def here(folder: Path) -> list[tuple[int, bytes]]:
    path = folder / "1.warc.gz"
    path.write_bytes(CONTENT)
    return read(str(path))[0]


def test_patterns_and_lists_of_a_bucket_name_files_that_are_read_as_those_here(
    s3: FakeS3, tmp_path: Path
) -> None:
    s3.objects |= {
        "2024/a b/2.warc.gz": CONTENT,
        "2023/0.warc.gz": b"",
        "list.txt": b"s3://crawl/2023/*\n# none\n",
    }
    assert find_inputs(["s3://crawl/2024/**/*.gz", "@s3://crawl/list.txt"]) == [
        "s3://crawl/2023/0.warc.gz",
        URL,
        "s3://crawl/2024/a b/2.warc.gz",
    ]
    assert read() == (here(tmp_path), [])
    with pytest.raises(DataError, match="'s3://crawl/2024' is a folder, not a file"):
        find_inputs(["s3://crawl/2024"])
    with pytest.raises(DataError, match=r"no file matches 's3://elsewhere/\*'"):
        find_inputs(["s3://elsewhere/*"])


@pytest.mark.parametrize("failure", ["cut", 503])
def test_a_broken_connection_goes_on_where_it_broke_with_the_same_bytes(
    s3: FakeS3, tmp_path: Path, failure: str | int
) -> None:
    pages = read_pages(URL, max_page_bytes=10_000, batch_pages=10)
    first = next(pages)
    asked = len(s3.asked[KEY])
    s3.failures[KEY] = [failure] * 2
    rows = [row for batch in (first, *pages) for row in batch.pages.to_pylist()]
    assert [(row["offset"], row["payload"]) for row in rows] == here(tmp_path)
    assert s3.failures[KEY] == []
    assert asked > 0
    assert not any(part.startswith("bytes=0-") for part in s3.asked[KEY][asked:])


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        ({}, "unreadable after 1 try: NoSuchKey it is."),
        ({KEY: CONTENT[::-1]}, "unreadable after 2 tries: the file changed while it was read"),
    ],
    ids=["gone", "changed"],
)
def test_an_object_that_is_not_what_it_was_is_read_no_further_and_again_by_the_next_run(
    s3: FakeS3, later: dict[str, bytes], reason: str
) -> None:
    pages = read_pages(URL, max_page_bytes=10_000, batch_pages=10)
    count = next(pages).pages.num_rows
    s3.objects = later
    rest = list(pages)
    count += sum(batch.pages.num_rows for batch in rest)
    (skip,) = [skip for batch in rest for skip in batch.skipped]
    assert (skip.reason, skip.is_retryable) == (reason, True)
    assert 0 < skip.offset < len(CONTENT)
    assert 10 <= count < PAGES


def test_keys_that_are_refused_are_named_with_what_to_do(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_s3, "ACCESS_KEY", "another")
    for pattern in ("s3://crawl/*.gz", URL):
        with pytest.raises(
            DataError,
            match=r"cannot be listed: InvalidAccessKeyId.*Set credentials .*AWS_ACCESS_KEY_ID",
        ):
            find_inputs([pattern])
    assert read() == ([], [SkippedRecord(URL, 0, "unreadable file: Forbidden", is_retryable=True)])


def test_keys_that_expire_while_reading_cost_nothing_but_another_run(
    s3: FakeS3, tmp_path: Path
) -> None:
    pages = read_pages(URL, max_page_bytes=10_000, batch_pages=10)
    next(pages)
    s3.failures[KEY] = [403]
    assert [(skip.reason, skip.is_retryable) for batch in pages for skip in batch.skipped] == [
        ("unreadable after 1 try: AccessDenied it is.", True)
    ]
    assert read() == (here(tmp_path), [])
