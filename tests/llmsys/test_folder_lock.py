"""Laws of locks and private files: no flock is named with a way out, and modes hold from the first byte."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from llmsys.atomic_write import PRIVATE, write_bytes_atomically
from llmsys.errors import DataError
from llmsys.folder_lock import find_mount, lock_folder


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_flock_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = rf"{tmp_path} lies on \S+ mounted at /.*, where flock does not work \({os.strerror(number)}\)"
    with pytest.raises(DataError, match=message) as said, lock_folder(tmp_path):
        pass
    assert "Mount it with locks (Lustre: -o flock; NFS: version 4" in str(said.value)
    assert "or name a folder on another file system (run.folder, data.folder)" in str(said.value)


def test_the_mount_of_a_folder_is_the_innermost_and_latest(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nx /data autofs rw 0 0\nx:/y /data nfs rw 0 0\nz /data/my\\040own lustre rw 0 0\n"
    )
    assert find_mount(Path("/data/run"), mounts) == ("nfs", "/data")
    assert find_mount(Path("/data/my own/run"), mounts) == ("lustre", "/data/my own")
    assert find_mount(Path("/database"), mounts) == ("ext4", "/")
    assert find_mount(Path("/data"), tmp_path / "none") == ("a file system", "an unknown place")


def test_private_files_are_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    replace = os.replace

    def look(source: Path, target: Path) -> None:
        seen.append(os.stat(source).st_mode & 0o777)
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    path = tmp_path / "environment.sh"
    path.write_text("old")
    write_bytes_atomically(path, b"new", PRIVATE)
    assert (seen, path.stat().st_mode & 0o777, path.read_bytes()) == ([0o600], 0o600, b"new")
