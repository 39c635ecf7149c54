"""Laws of atomic writes: private modes hold from the first byte on."""

import os
from pathlib import Path

import pytest

from llmsys.storage.atomic_write import PRIVATE, write_bytes_atomically


def test_private_files_are_never_readable_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
