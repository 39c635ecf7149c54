"""Laws of token files with page tables: what was written is read, damage is named, and few files
are open.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from llmsys.dataset import token_shards, token_stream
from llmsys.dataset.checked_file import CheckedFile
from llmsys.dataset.paged_token_shards import PagedTokenShards, require_paged
from llmsys.dataset.token_split import read_token_index
from llmsys.errors import DataError
from tests.helpers.token_files import write_paged_dataset

DOCUMENTS = [[5, 6, 2], [2], [9, 8, 7, 6, 5, 4, 2], [65535, 2], [11, 12, 13, 2]]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_paged_dataset(tmp_path, DOCUMENTS, rows_per_file=3)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of 2.4 MB with 600 pages: three batches of two documents."""
    documents = [
        [*np.random.default_rng(number).integers(3, 60_000, 200_000).tolist(), 2]
        for number in range(6)
    ]
    return write_paged_dataset(tmp_path, documents, rows_per_file=6)


def open_paged(folder: Path) -> PagedTokenShards:
    return require_paged(token_shards.open_tokens(folder, "train"))


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def read_everything(folder: Path) -> list[list[int]]:
    tokens = open_paged(folder)
    assert tokens.lengths.tolist() == [len(document) for document in DOCUMENTS]
    assert tokens.text_bytes.tolist() == [3 * len(document) for document in DOCUMENTS]
    return [tokens.get_tokens(number).tolist() for number in range(tokens.num_documents)]


def test_what_was_written_is_read(dataset: Path) -> None:
    tokens = open_paged(dataset)
    assert read_everything(dataset) == DOCUMENTS
    assert (tokens.num_documents, tokens.num_tokens, tokens.num_text_bytes) == (5, 17, 51)
    stream = [token for document in DOCUMENTS for token in document]
    for begin in range(17):
        for end in range(begin + 1, 18):
            assert tokens.stream.read_range(begin, end).tolist() == stream[begin:end]
    assert tokens.get_lineage(3) == {
        "id": f"{3:032x}",
        "file": "crawl/a.warc.gz",
        "offset": 300,
        "url_hash": 3,
    }
    assert tokens.select_documents("url_hash", 4, 1) == [1, 4]
    assert tokens.read_leading_sizes(4)[0].tolist() == [3, 1]
    with pytest.raises(IndexError, match="document 5 of a split of 5"):
        tokens.get_tokens(5)
    assert token_shards.verify_checksums(dataset).fingerprint == tokens.fingerprint


def test_every_flipped_bit_of_a_file_and_its_table_is_noticed_where_it_is_read(
    dataset: Path,
) -> None:
    for name in ("train-00001.arrow", "train-00001.pages", "train.index"):
        path = dataset / "tokens" / name
        whole = path.read_bytes()
        for place in range(0, len(whole), 5 if name.endswith("arrow") else 23):
            path.write_bytes(
                whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :]
            )
            with pytest.raises(DataError, match=name.partition(".")[0]):
                read_everything(dataset)
        path.write_bytes(whole)
    assert read_everything(dataset) == DOCUMENTS


def test_a_damaged_page_is_named_and_the_others_are_read(large: Path) -> None:
    path = large / "tokens" / "train-00000.arrow"
    tokens = open_paged(large)
    before = tokens.stream.read_range(0, 1000).tolist()
    flip(path, 1_000_123)
    tokens = open_paged(large)
    assert tokens.stream.read_range(0, 1000).tolist() == before
    with pytest.raises(
        DataError,
        match=r"train-00000\.arrow, page 244 \(bytes 999,424 to 1,003,520\): .* damaged .* Delete "
        r"the file",
    ):
        tokens.stream.read_range(499_000, 501_000)


def test_a_damaged_side_column_is_named_when_it_is_asked_for_and_not_before(dataset: Path) -> None:
    path = dataset / "tokens" / "train-00001.arrow"
    flip(path, path.read_bytes().index(b"crawl/a.warc.gz"))
    tokens = open_paged(dataset)
    # A small file has its tokens on the same page.
    assert tokens.get_tokens(0).tolist() == DOCUMENTS[0]
    for ask in (lambda: tokens.get_lineage(3), lambda: tokens.select_documents("file", "x")):
        with pytest.raises(DataError, match=r"train-00001\.arrow, page 0 .*: its checksum differs"):
            ask()


def test_a_window_touches_at_most_twice_its_bytes(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[int] = []

    def count_bytes(handle: int, size: int, place: int) -> bytes:
        data = read(handle, size, place)
        touched.append(len(data))
        return data

    read = os.pread
    monkeypatch.setattr(os, "pread", count_bytes)
    tokens = open_paged(large)
    size = 16_385
    for start in range(1_000, 1_200_000 - size, 97_001):
        tokens.stream.read_range(start, start + size)
        tokens.stream.find_document_ends(start, start + size)
    windows = len(range(1_000, 1_200_000 - size, 97_001))
    assert windows * 2 * size <= sum(touched) <= 2 * windows * 2 * size


def test_files_are_opened_when_they_are_read_and_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_stream, "MAX_OPEN_FILES", 3)
    monkeypatch.setattr(token_stream, "MAX_EAGER_FILES", 2)
    monkeypatch.setattr(token_stream, "MAX_CACHED_ENDS", 4)
    documents = [[number, number + 1, 2] for number in range(3, 43)]
    folder = write_paged_dataset(tmp_path, documents, rows_per_file=2)
    before = len(os.listdir("/proc/self/fd"))
    tokens = open_paged(folder)
    assert len(os.listdir("/proc/self/fd")) == before
    for _ in range(2):
        assert [tokens.get_tokens(number).tolist() for number in range(40)] == documents
        assert len(os.listdir("/proc/self/fd")) == before + 2 * 3
    assert tokens.stream._num_ends <= 4 + 2


def test_a_missing_file_and_another_index_are_named(dataset: Path) -> None:
    index = dataset / "tokens" / "train.index"
    whole = index.read_bytes()
    token_shards.write_token_index(index, [])
    with pytest.raises(
        DataError,
        match=r"train\.index: its digest is \w+, expected from the manifest: \w+: the file",
    ):
        open_paged(dataset)
    index.unlink()
    with pytest.raises(
        DataError, match=r"train\.index is missing, but the manifest lists it\. Run llmsys prepare"
    ):
        open_paged(dataset)
    index.write_bytes(whole)
    for name in ("train-00001.pages", "train-00001.arrow"):
        (dataset / "tokens" / name).unlink()
        with pytest.raises(
            DataError, match=rf"{name} is missing, but the manifest lists it\. Run llmsys prepare"
        ):
            open_paged(dataset)


def test_a_file_cut_at_any_length_is_refused(dataset: Path) -> None:
    split = token_shards.load_manifest(dataset).splits["train"]
    assert split.index is not None
    entry = read_token_index(dataset, split.index).get_entry(1)
    path = dataset / "tokens" / entry.name
    for length in range(entry.size - 1, -1, -101):
        os.truncate(path, length)
        with pytest.raises(
            DataError,
            match=rf"train-00001\.arrow has {length:,} bytes, expected from the manifest:",
        ):
            CheckedFile(path, entry)
