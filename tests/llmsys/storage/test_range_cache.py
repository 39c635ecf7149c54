"""Laws of remote tokens: the bits of a local dataset, read by ranges into a bounded cache,
damage and loss named.
"""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from llmsys.dataset import token_shards
from llmsys.dataset.manifest import load_manifest
from llmsys.dataset.paged_token_shards import PagedTokenShards, require_paged
from llmsys.errors import ConfigError, DataError
from llmsys.storage import object_store, range_cache
from llmsys.storage.folder_upload import UploadRecord, upload_files
from llmsys.storage.local_files import find_folder_url, parse_folder
from llmsys.storage.object_store import open_object_folder
from llmsys.storage.range_cache import BLOCK_BYTES, RangeCache
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.token_files import write_paged_dataset

URL = "s3://crawl/data"
DOCUMENTS = [
    [*np.random.default_rng(number).integers(3, 60_000, 90_000).tolist(), 2] for number in range(9)
]


@pytest.fixture
def remote(object_storage: FakeS3, tmp_path: Path) -> FakeS3:
    """A dataset of three files of 1.1 MB, five blocks each."""
    folder = write_paged_dataset(tmp_path / "data", DOCUMENTS, rows_per_file=3)
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    upload_files(folder, open_object_folder(URL), names, UploadRecord(folder))
    object_storage.asked.clear()
    return object_storage


def open_remote() -> PagedTokenShards:
    folder = parse_folder(URL)
    assert isinstance(folder, Path)
    return require_paged(token_shards.open_tokens(folder, "train"))


def copy_windows(shards: PagedTokenShards, begins: list[int], size: int = 4_000) -> Any:
    out = np.empty((len(begins), size), np.int64)
    shards.stream.copy_ranges(np.array(begins), size, out)
    return out


def read_here(tmp_path: Path) -> PagedTokenShards:
    return require_paged(token_shards.open_tokens(tmp_path / "data", "train"))


BEGINS = np.random.default_rng(0).integers(0, 9 * 90_001 - 4_000, 40).tolist()


def test_ranges_of_remote_files_have_the_bits_of_local_ones_and_are_fetched_once(
    remote: FakeS3, tmp_path: Path
) -> None:
    here, shards = read_here(tmp_path), open_remote()
    assert (copy_windows(shards, BEGINS) == copy_windows(here, BEGINS)).all()
    assert shards.get_lineage(7) == here.get_lineage(7)
    fetched = [
        *remote.asked.get("data/tokens/train-00001.arrow", []),
        *remote.asked["data/tokens/train-00001.pages"],
    ]
    # 540 kB of tokens and a page table.
    assert 3 <= len(fetched) <= 5
    asked = {key: list(ranges) for key, ranges in remote.asked.items()}
    # Another process of this host, later: nothing is fetched again, not even the manifest.
    range_cache.open_cache.cache_clear()
    assert (copy_windows(open_remote(), BEGINS) == copy_windows(here, BEGINS)).all()
    assert remote.asked == asked


def test_the_cache_keeps_its_limit_and_a_full_disk_costs_only_the_blocks(
    remote: FakeS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limit = 4 * BLOCK_BYTES
    monkeypatch.setenv("LLMSYS_CACHE_GIB", str(limit / 2**30))
    range_cache.open_cache.cache_clear()
    expected, blocks = copy_windows(read_here(tmp_path), BEGINS), tmp_path / "cache" / "blocks"
    shards = open_remote()
    for _ in range(2):
        assert (copy_windows(shards, BEGINS) == expected).all()
        assert 0 < sum(path.stat().st_size for path in blocks.iterdir()) <= limit

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for path in blocks.iterdir():
        path.unlink()
    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert (copy_windows(shards, BEGINS) == expected).all()
    (message,) = [
        record.getMessage() for record in caplog.records if "cannot keep" in record.getMessage()
    ]
    assert "No space left on device" in message
    assert "set LLMSYS_CACHE to another disk or LLMSYS_CACHE_GIB to less than" in message
    monkeypatch.setenv("LLMSYS_CACHE_GIB", "much")
    range_cache.open_cache.cache_clear()
    with pytest.raises(ConfigError, match="LLMSYS_CACHE_GIB=much is not a positive number"):
        range_cache.open_cache()


def test_the_blocks_used_longest_ago_are_removed_first(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 1_000)
    for number, name in enumerate("abcde"):
        cache.add_block(name, b"xxx")
        os.utime(tmp_path / name, ns=(number, number))
    assert cache.find_block("b") == b"xxx"  # which uses it
    cache.max_bytes = 12
    cache.remove_old_blocks()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "e"]


def test_a_sweep_leaves_blocks_that_are_being_written(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 0)
    for name in ("block", ".written.1.2.tmp", ".abandoned.1.2.tmp"):
        (tmp_path / name).write_bytes(b"xxx")
    os.utime(tmp_path / ".abandoned.1.2.tmp", (0, 0))
    cache.remove_old_blocks()
    assert [path.name for path in tmp_path.iterdir()] == [".written.1.2.tmp"]


def test_a_damaged_block_is_fetched_again(remote: FakeS3, tmp_path: Path) -> None:
    expected = copy_windows(read_here(tmp_path), BEGINS)
    assert (copy_windows(open_remote(), BEGINS) == expected).all()
    for path in (tmp_path / "cache" / "blocks").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert (copy_windows(open_remote(), BEGINS) == expected).all()


def test_an_object_that_was_replaced_or_is_gone_is_named(remote: FakeS3, tmp_path: Path) -> None:
    key = "data/tokens/train-00002.arrow"
    shards, whole = open_remote(), remote.objects[key]
    # Pages that were verified once are fetched again, and not trusted, when the cache lost them.
    assert shards.get_tokens(7).tolist() == DOCUMENTS[7]
    remote.objects[key] = whole[::-1]
    for path in (tmp_path / "cache" / "blocks").iterdir():
        path.unlink()
    match = (
        r"train-00002.arrow, page \d+ .* s3://crawl/data/tokens/train-00002.arrow has [\d,]+ "
        r"bytes, written 2024-05-01"
    )
    with pytest.raises(DataError, match=match + r".*: it may have been replaced"):
        shards.get_tokens(7)
    del remote.objects[key]
    with pytest.raises(
        DataError,
        match=r"s3://crawl/data/tokens/train-00002.arrow is missing, but the manifest lists",
    ):
        shards.get_tokens(7)
    remote.objects[key] = whole
    assert shards.get_tokens(7).tolist() == DOCUMENTS[7]
    remote.objects["data/tokens/train-00002.pages"] = bytes(4_096)
    for path in (tmp_path / "cache" / "blocks").iterdir():
        path.unlink()
    with pytest.raises(
        DataError, match=r"train-00002.pages, head: its checksum is .* it may have been replaced"
    ):
        open_remote()


def test_an_index_of_another_dataset_and_a_manifest_that_is_gone_are_named(
    remote: FakeS3, tmp_path: Path
) -> None:
    folder = parse_folder(URL)
    assert isinstance(folder, Path)
    assert find_folder_url(folder / "tokens") == f"{URL}/tokens"
    other = write_paged_dataset(tmp_path / "other", DOCUMENTS[:4], rows_per_file=2)
    remote.objects["data/tokens/train.index"] = (other / "tokens/train.index").read_bytes()
    with pytest.raises(
        DataError, match=r"train.index: its digest is \w+, expected from the manifest"
    ):
        open_remote()
    # Until the manifest changes, its files are not copied again.
    del remote.objects["data/manifest.json"]
    with pytest.raises(
        DataError,
        match=r"s3://crawl/data/manifest.json does not exist, so the dataset is incomplete",
    ):
        load_manifest(folder)


def test_a_lost_connection_is_asked_again(
    remote: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "sleep", lambda seconds: None)
    monkeypatch.setattr(S3FileSystem, "retries", 2)
    key = "data/tokens/train-00000.arrow"
    remote.failures = {key: ["cut", *[503] * 5], "data/tokens/train-00000.pages": ["cut"]}
    assert open_remote().get_tokens(0).tolist() == DOCUMENTS[0]
    assert remote.failures[key] == []
