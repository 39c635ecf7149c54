"""Laws of folder locks: a file system that cannot lock is named with a way out."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from llmsys.errors import DataError
from llmsys.storage.folder_lock import lock_folder
from llmsys.storage.mount import find_mount


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_flock_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = (
        rf"{tmp_path} lies on \S+ mounted at /.*, where flock does not work "
        rf"\({os.strerror(number)}\)"
    )
    with pytest.raises(DataError, match=message) as said, lock_folder(tmp_path):
        pass
    assert "Mount it with locks (Lustre: -o flock; NFS: version 4" in str(said.value)
    assert "or name a folder on another file system (run.folder, data.folder)" in str(said.value)


def test_the_mount_of_a_folder_is_the_innermost_and_latest(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/a / ext4 rw 0 0\nx /data autofs rw 0 0\nx:/y /data nfs rw 0 0\nz /data/my\\040own "
        "lustre rw 0 0\n"
    )
    assert find_mount(Path("/data/run"), mounts) == ("nfs", "/data")
    assert find_mount(Path("/data/my own/run"), mounts) == ("lustre", "/data/my own")
    assert find_mount(Path("/database"), mounts) == ("ext4", "/")
    assert find_mount(Path("/data"), tmp_path / "none") == ("a file system", "an unknown place")
