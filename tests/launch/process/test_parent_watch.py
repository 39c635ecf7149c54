"""Laws of llmsys.launch.process.parent_watch: whoever is named in LLMSYS_PARENT takes everything
that watches it along.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from llmsys.launch.process.parent_watch import VARIABLE, build_child_environment, die_with_parent
from tests.helpers.process import PATIENCE_SECONDS, has_ended, wait_for_pid, wait_until

WATCHER = """
import os, sys, time
from pathlib import Path
from llmsys.launch.process.parent_watch import die_with_parent
die_with_parent()
Path(sys.argv[1]).write_text(f"{os.getpid()}\\n")
time.sleep(600)
"""
# A launcher in between, as torchrun is one: it does not watch anything and does not end by itself.
PARENT = """
import subprocess, sys, time
from llmsys.launch.process.parent_watch import build_child_environment
launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:3]])"
command = [sys.executable, "-c", launcher, sys.argv[1], sys.argv[2]]
subprocess.Popen(command, env=build_child_environment())
time.sleep(600)
"""


def python(
    code: str, *arguments: str, env: dict[str, str] | None = None, cwd: Path
) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, cwd=cwd)


def test_grandchild_behind_a_launcher_ends_when_the_parent_is_killed(
    tmp_path: Path, repository: Path
) -> None:
    parent = python(PARENT, WATCHER, str(tmp_path / "pid"), cwd=repository)
    grandchild = wait_for_pid(tmp_path / "pid")
    assert not has_ended(grandchild)
    parent.kill()  # and not waited for: a zombie counts as gone
    wait_until(lambda: has_ended(grandchild), "the grandchild lives on")
    parent.wait()


def test_a_bare_pid_is_watched_too(tmp_path: Path, repository: Path) -> None:
    with python("import time; time.sleep(600)", cwd=repository) as parent:
        watcher = python(
            WATCHER,
            str(tmp_path / "pid"),
            env={**os.environ, VARIABLE: str(parent.pid)},
            cwd=repository,
        )
        wait_for_pid(tmp_path / "pid")
        assert watcher.poll() is None
        parent.kill()
        assert watcher.wait(timeout=PATIENCE_SECONDS) == 1


@pytest.mark.parametrize(
    "value",
    [
        f"{os.getpid()}:{psutil.Process().create_time() - 1000}",
        "0:0",
        "not a number",
        f"{2**22 + 1}",
    ],
    ids=[
        "the number belongs to another process now",
        "no such process",
        "not a number",
        "no such bare number",
    ],
)
def test_a_parent_that_is_gone_ends_the_process_before_it_does_anything(
    value: str, tmp_path: Path, repository: Path
) -> None:
    watcher = python(
        WATCHER, str(tmp_path / "pid"), env={**os.environ, VARIABLE: value}, cwd=repository
    )
    assert watcher.wait(timeout=PATIENCE_SECONDS) == 1
    assert not (tmp_path / "pid").exists()


def test_without_the_variable_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = threading.active_count()
    die_with_parent()
    assert threading.active_count() == before


def test_the_environment_names_this_process_and_keeps_the_rest() -> None:
    environment = build_child_environment({"HOME": "/home/someone", VARIABLE: "1:2.0"})
    pid, _, created = environment.pop(VARIABLE).partition(":")
    assert (int(pid), float(created)) == (os.getpid(), psutil.Process().create_time())
    assert environment == {"HOME": "/home/someone"}
