"""Laws of a dataset in object storage: the bytes of a local one, its manifest written last, and
kills cost nothing.
"""

from pathlib import Path
from typing import Any

import pytest

from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import DataError
from llmsys.storage.object_lock import ObjectLock
from llmsys.storage.object_store import ObjectFolder, RemoteObject, open_object_folder
from tests.helpers.fake_s3 import FakeS3
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl, read_public_files

URL = "s3://crawl/data"


class KilledError(Exception):
    """A kill: it is no error that anything handles."""


def list_writes(s3: FakeS3) -> list[str]:
    return [key.replace("data/", "") for key in s3.written if "/.lock/" not in key]


def read_objects(s3: FakeS3) -> dict[str, bytes]:
    reports = ("data/events.jsonl", "data/.lock/")
    return {
        key.removeprefix("data/"): data
        for key, data in s3.objects.items()
        if not key.startswith(reports)
    }


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_crawl(tmp_path_factory.mktemp("crawl"), files=2, pages=6)


def test_objects_are_the_files_of_a_local_dataset_whatever_kills_the_upload(
    crawl: Path, object_storage: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, remote = object_storage, build_tiny_config(URL, crawl)
    local = prepare_dataset(build_tiny_config(tmp_path / "data", crawl))
    expected = read_public_files(tmp_path / "data")
    upload, count = ObjectFolder.upload, 0

    def upload_or_die(self: ObjectFolder, path: Path, name: str) -> RemoteObject:
        nonlocal count
        count += 1
        if count == 5:
            raise KilledError
        return upload(self, path, name)

    monkeypatch.setattr(ObjectFolder, "upload", upload_or_die)
    monkeypatch.setattr("llmsys.storage.folder_upload.MAX_TRANSFERS", 1)
    with pytest.raises(KilledError):
        prepare_dataset(remote)
    killed = list_writes(s3)
    assert 4 <= len(killed) < len(expected) - 1
    assert "manifest.json" not in read_objects(s3)
    assert prepare_dataset(remote) == local
    assert read_objects(s3) == expected
    # What was uploaded before the kill was not uploaded again, and the manifest came last of the
    # dataset.
    writes = list_writes(s3)
    assert sorted(writes) == sorted([*expected, "events.jsonl"])
    assert writes[-2:] == ["manifest.json", "events.jsonl"]
    s3.written.clear()
    assert prepare_dataset(remote) == local
    assert list_writes(s3) == []
    _check_another_version(s3, crawl, tmp_path)


def _check_another_version(s3: FakeS3, crawl: Path, tmp_path: Path) -> None:
    """The next version of the same folder: its manifest goes first and comes last, and nothing
    old is left.
    """
    changed: dict[str, Any] = {
        "tokens": {"shard_tokens": 900, "batch_tokens": 300},
        "documents": {"num_shards": 1},
    }
    prepare_dataset(build_tiny_config(URL, crawl, **changed))
    prepare_dataset(build_tiny_config(tmp_path / "changed", crawl, **changed))
    assert read_objects(s3) == read_public_files(tmp_path / "changed")
    writes = list_writes(s3)
    assert (writes[0], writes[-2]) == ("-manifest.json", "manifest.json")
    assert "-documents/part-00001.arrow" in writes
    # An object that somebody deleted is uploaded again, on another machine all that are not known
    # there.
    del s3.objects["data/tokens/train.index"]
    prepare_dataset(build_tiny_config(URL, crawl, **changed))
    assert read_objects(s3) == read_public_files(tmp_path / "changed")


def test_a_preparation_that_lost_its_lock_publishes_nothing(
    crawl: Path, object_storage: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_over(self: ObjectFolder, path: Path, name: str) -> RemoteObject:
        open_object_folder(URL).create(".lock/00000002", b"{}")
        return upload(self, path, name)

    upload = ObjectFolder.upload
    monkeypatch.setattr(ObjectFolder, "upload", take_over)
    with pytest.raises(DataError, match="s3://crawl/data was taken over by another command"):
        prepare_dataset(build_tiny_config(URL, crawl), until="documents")
    assert "data/manifest.json" not in object_storage.objects
    monkeypatch.setattr(ObjectLock, "_may_displace", lambda self, current: True)
    monkeypatch.setattr(ObjectFolder, "upload", upload)
    prepare_dataset(build_tiny_config(URL, crawl), until="documents")
    assert "data/manifest.json" in object_storage.objects
