"""Terminals that are narrow or plain, and a stdout that knows few characters."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from llmsys.report.run_record import read_run
from llmsys.report.terminal_view import format_run_view
from tests.helpers.example_run import write_run

PROGRAM = "import sys; from llmsys.launch.entry import main; sys.exit(main())"


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_line_about_a_run_is_wider_than_the_terminal(columns: int, tmp_path: Path) -> None:
    text = format_run_view(read_run(write_run(tmp_path / "run")), columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "memory" in text


@pytest.mark.parametrize(("terminal", "is_live"), [("xterm", True), ("dumb", False)])
def test_a_plain_terminal_gets_no_escapes(terminal: str, is_live: bool, tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "watch", "run"], stdout=theirs, stderr=theirs,
        cwd=tmp_path, env=os.environ | {"TERM": terminal},
    ) as process:  # fmt: skip
        os.close(theirs)
        found = b""
        # Linux ends a terminal without a writer with EIO
        with contextlib.suppress(OSError):
            while part := os.read(ours, 65536):
                found += part
        assert process.wait() == 0
    os.close(ours)
    assert (b"\033" in found) == is_live
    assert b"held out" in found


def test_a_character_that_stdout_does_not_know_is_escaped(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "watch", "run", "--once"], cwd=tmp_path,
        capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert rb"\u2588" in done.stdout
