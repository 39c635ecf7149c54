"""Laws of object storage: what passes is waited for, what does not is named, and one writer
holds a folder.
"""

import socket
from pathlib import Path

import pytest
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from llmsys.errors import DataError
from llmsys.storage import object_lock, object_store
from llmsys.storage.folder_upload import UploadRecord, list_changed, upload_files
from llmsys.storage.object_lock import ObjectLock
from llmsys.storage.object_store import ObjectFolder, open_object_folder
from tests.helpers import fake_s3
from tests.helpers.fake_s3 import FakeS3

URL = "s3://crawl/data"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that were waited between tries, none of which pass."""
    found: list[float] = []
    monkeypatch.setattr(object_store, "sleep", found.append)
    monkeypatch.setattr(S3FileSystem, "retries", 1)  # which waits too
    return found


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_lock, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(object_lock, "RENEWAL_SECONDS", 0.05)


def test_throttling_for_minutes_is_waited_for_with_growing_pauses_and_then_named(
    object_storage: FakeS3, waits: list[float]
) -> None:
    folder = open_object_folder(URL)
    folder.write_bytes("a", b"bytes")
    object_storage.failures = {"data/a": [503] * 6, "PUT data/b": [503] * 2}
    assert folder.find_bytes("a") == b"bytes"
    assert waits == [0.5, 1, 2, 4, 8, 16]
    folder.write_bytes("b", b"more")
    assert object_storage.objects["data/b"] == b"more"
    object_storage.failures = {"data/a": [503] * 10_000}
    waits.clear()
    with pytest.raises(
        DataError, match=r"s3://crawl/data/a could not be reached for 3\d\d s: .*SlowDown.*continue"
    ):
        folder.find_bytes("a")
    assert 300 <= sum(waits) < 335


def test_a_server_that_never_answers_is_given_up_after_half_a_minute(
    object_storage: FakeS3, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # it does not listen
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{taken.getsockname()[1]}")
        S3FileSystem.clear_instance_cache()
        with pytest.raises(
            DataError,
            match=r"s3://crawl/data/a could not be reached for 3\d s, and never answered: .*"
            r"Correct the address of the storage \(AWS_ENDPOINT_URL_S3 ",
        ):
            ObjectFolder(URL).find_bytes("a")
    assert 30 <= sum(waits) < 60


def test_a_server_that_answered_once_is_waited_for_although_its_connection_is_lost(
    object_storage: FakeS3, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ObjectFolder(URL)
    assert folder.find_bytes("a") is None
    tries: list[str] = []

    def fail(path: str) -> bytes:
        tries.append(path)
        if len(tries) < 9:
            raise ConnectionResetError(104, "Connection reset by peer")
        return b"bytes"

    monkeypatch.setattr(folder._files, "cat_file", fail)
    assert folder.find_bytes("a") == b"bytes"
    assert sum(waits) > 60


def test_credentials_that_expired_end_the_command_at_once_with_what_to_do(
    object_storage: FakeS3, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = open_object_folder(URL)
    folder.write_bytes("a", b"bytes")
    object_storage.failures = {"data/a": [403], "PUT data/b": [403]}
    for request in (lambda: folder.read_range("a", 0, 2), lambda: folder.write_bytes("b", b"")):
        with pytest.raises(
            DataError,
            match=r"was refused: .*AccessDenied.*expired ones must be renewed.*AWS_SESSION_TO",
        ):
            request()
    monkeypatch.setattr(fake_s3, "ACCESS_KEY", "another")
    with pytest.raises(DataError, match=r"s3://crawl/data was refused: InvalidAccessKeyId"):
        folder.list_objects()
    assert waits == []


@pytest.mark.parametrize("server", ["object_storage", "moto_storage"])
def test_one_of_two_writers_creates_an_object_and_the_bytes_are_its_own(
    server: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(server)
    folder = open_object_folder(URL)
    assert folder.create("manifest.json", b"1")
    assert not folder.create("manifest.json", b"2")
    assert folder.find_bytes("manifest.json") == b"1"
    assert folder.find_bytes("absent") is None
    assert folder.find_object("absent") is None


@pytest.mark.usefixtures("moto_storage")
def test_objects_of_a_server_that_is_not_ours_are_written_listed_read_by_ranges_and_deleted(
    tmp_path: Path,
) -> None:
    folder, content = open_object_folder(URL), bytes(range(256)) * 1_000
    (tmp_path / "file").write_bytes(content)
    uploaded = folder.upload(tmp_path / "file", "tokens/a")
    folder.write_bytes("b", b"first")
    folder.write_bytes("b", b"other")
    assert list(folder.list_objects()) == ["b", "tokens/a"]
    assert folder.list_objects("tokens") == {"tokens/a": uploaded}
    assert (uploaded.size, folder.find_bytes("b")) == (len(content), b"other")
    assert folder.read_range("tokens/a", 300, 310) == content[300:310]
    assert folder.read_range("tokens/a", len(content) - 5, len(content) + 5) == content[-5:]
    folder.download("tokens/a", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == content
    for _ in range(2):
        folder.delete("b")
    assert list(folder.list_objects()) == ["tokens/a"]
    with pytest.raises(FileNotFoundError):
        folder.read_range("b", 0, 1)
    with pytest.raises(
        DataError, match=r"s3://nowhere/data/b cannot be written: .*Create the bucket, then run"
    ):
        open_object_folder("s3://nowhere/data").write_bytes("b", b"")


def test_a_file_is_uploaded_again_when_it_or_its_object_changed(
    object_storage: FakeS3, tmp_path: Path
) -> None:
    folder = open_object_folder(URL)
    names = ["a", "b", "c"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    upload_files(tmp_path, folder, names, UploadRecord(tmp_path))
    record = UploadRecord(tmp_path)
    assert list_changed(record, names, folder.list_objects()) == []
    (tmp_path / "a").write_bytes(b"longer")
    object_storage.objects["data/b"] = b"x"
    del object_storage.objects["data/c"]
    assert list_changed(record, names, folder.list_objects()) == names


@pytest.mark.usefixtures("hasty")
def test_a_lock_is_for_one_command_and_names_its_holder(
    object_storage: FakeS3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = open_object_folder(URL)
    with ObjectLock(folder, tmp_path / "a") as lock:
        # It is renewed, so the other one sees that its holder lives.
        with pytest.raises(
            DataError,
            match=r"crawl/data is being written by process \d+ on host .*two commands cannot",
        ):
            ObjectLock(folder, tmp_path / "b").__enter__()
        lock.require_held()
    caplog.clear()
    with ObjectLock(folder, tmp_path / "b") as lock:
        assert "waiting" not in caplog.text, "it was released"
        assert [key for key in object_storage.objects if ".lock" in key] == ["data/.lock/00000002"]


class LockClock:
    """The time that a lock sees: it passes while the lock sleeps, and ends the test where that
    takes too long.
    """

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        assert self.seconds < 1000 + 2 * object_lock.LEASE_SECONDS, (
            "the lock of a dead holder is never taken over"
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> LockClock:
    """Give locks a clock that does not run by itself, and no renewals: their holders are dead."""
    clock = LockClock()
    monkeypatch.setattr(object_lock, "time", clock)
    monkeypatch.setattr(ObjectLock, "_write_renewals", lambda self: None)
    return clock


def test_a_lock_of_the_dead_is_taken_over_once_its_lease_has_ended(
    object_storage: FakeS3, tmp_path: Path, clock: LockClock
) -> None:
    folder = open_object_folder(URL)
    dead = ObjectLock(folder, tmp_path / "a").__enter__()
    assert clock.seconds == 1000, "a free lock is not waited for"
    other = ObjectLock(folder, tmp_path / "b").__enter__()
    waited = clock.seconds - 1000
    assert (
        object_lock.LEASE_SECONDS
        <= waited
        < object_lock.LEASE_SECONDS + 2 * object_lock.POLL_SECONDS
    )
    other.require_held()
    # One that was displaced publishes nothing.
    with pytest.raises(
        DataError, match=r"was taken over by another command, because this one did not answer"
    ):
        dead.require_held()
    # The same local folder: its own lock is held, so the holder is dead. Nothing is waited for.
    clock.seconds = 1000
    third = ObjectLock(folder, tmp_path / "b").__enter__()
    assert clock.seconds == 1000
    with pytest.raises(DataError, match="was taken over"):
        other.require_held()
    for lock in (dead, other, third):
        lock.__exit__()
    assert b'"released": true' in object_storage.objects["data/.lock/00000003"]
