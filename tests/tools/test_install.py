"""Laws of tools/install.py, with pip and venv played by a function that says what it was asked
for.
"""

import fcntl
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from tests.helpers.process import wait_until
from tools import install
from tools.install import LOCK, LOG, STATE, UNFINISHED, read_state, write_state


class Checkout:
    """A checkout in a temporary folder, and the commands that installing it ran."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.commands: list[str] = []
        self.asked_for = ""
        self.killed_at = ""
        (root / "pyproject.toml").write_text("[project]\n")
        (root / "constraints.txt").write_text("torch==2.13.0\n")

    def run(self, command: list[str], root: Path, lock: int, log: IO[str]) -> None:
        step = "venv" if "venv" in command else "pip"
        self.asked_for = command[-1]
        self.commands.append(step)
        if step == self.killed_at:
            raise SystemExit(137)
        if step == "venv":
            (self.venv / "bin").mkdir()
            (self.venv / "bin" / "python").write_text("#!/bin/sh\nexit 0\n")
            (self.venv / "bin" / "python").chmod(0o755)

    def install(self, *extras: str) -> list[str]:
        """The steps that one `make install` takes."""
        self.commands = []
        install.install_checkout(self.root, extras)
        return self.commands


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    checkout = Checkout(tmp_path)
    monkeypatch.setattr(install, "run_command", checkout.run)
    return checkout


def test_a_finished_install_does_nothing(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checkout.install() == ["venv", "pip"]
    capsys.readouterr()
    assert checkout.install() == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_file_is_installed_into_the_same_environment(
    name: str, checkout: Checkout
) -> None:
    checkout.install()
    (checkout.root / name).write_text("changed\n")
    assert checkout.install() == ["pip"]
    assert checkout.install() == []


@pytest.mark.parametrize("step", ["venv", "pip"])
def test_a_killed_install_is_made_again_from_nothing(step: str, checkout: Checkout) -> None:
    checkout.killed_at = step
    with pytest.raises(SystemExit):
        checkout.install()
    checkout.killed_at = ""
    (checkout.venv / "lib").mkdir()
    (checkout.venv / "lib" / "half_a_package.py").touch()
    assert checkout.install() == ["venv", "pip"]
    assert not (checkout.venv / "lib").exists()
    assert checkout.install() == []


def test_a_killed_renewal_is_made_again_from_nothing(checkout: Checkout) -> None:
    checkout.install()
    (checkout.root / "constraints.txt").write_text("torch==2.13.1\n")
    checkout.killed_at = "pip"
    with pytest.raises(SystemExit):
        checkout.install()
    checkout.killed_at = ""
    assert checkout.install() == ["venv", "pip"]


def test_an_environment_that_was_moved_is_made_again(checkout: Checkout) -> None:
    checkout.install()
    write_state(checkout.venv, read_state(checkout.venv)._replace(place="elsewhere"))
    assert checkout.install() == ["venv", "pip"]


def test_an_environment_whose_python_is_gone_is_made_again(checkout: Checkout) -> None:
    checkout.install()
    (checkout.venv / "bin" / "python").unlink()
    assert checkout.install() == ["venv", "pip"]


def test_a_state_that_cannot_be_read_counts_as_unfinished(checkout: Checkout) -> None:
    checkout.install()
    (checkout.venv / STATE).write_text("half")
    assert read_state(checkout.venv) == UNFINISHED


def test_an_extra_is_installed_once_and_remembered(checkout: Checkout) -> None:
    checkout.install()
    assert checkout.install("docs") == ["pip"]
    assert checkout.asked_for == ".[dev,test,track,docs]"
    assert checkout.install("docs") == checkout.install() == []
    (checkout.root / "constraints.txt").write_text("torch==2.13.1\n")
    assert checkout.install() == ["pip"]
    assert checkout.asked_for == ".[dev,test,track,docs]"


def test_progress_names_what_pip_does() -> None:
    log = "Obtaining file:///x\nCollecting torch==2.13.0 (from llmsys)\n"
    assert install.describe_progress("Obtaining file:///x\n") == ""
    assert install.describe_progress(log) == "1 packages found"
    log += "  Downloading https://example.org/torch-2.13.0-cp311.whl (183.2 MB)\n"
    assert (
        install.describe_progress(log) == "1 packages found, now torch-2.13.0-cp311.whl (183.2 MB)"
    )
    assert (
        install.describe_progress(log + "Installing collected packages: numpy, torch\n")
        == "writing 2 packages"
    )


def test_a_running_step_prints_its_progress(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "PROGRESS_SECONDS", 0.01)
    code = (
        "import os, time; print('Collecting numpy', flush=True)\nwhile not os.path.exists('go'): "
        "time.sleep(0.01)"
    )
    with (tmp_path / LOG).open("w") as log, (tmp_path / LOCK).open("w") as lock:
        step = threading.Thread(
            target=install.run_command,
            args=([sys.executable, "-c", code], tmp_path, lock.fileno(), log),
        )
        step.start()
        said = ""

        def is_shown() -> bool:
            nonlocal said
            said += capsys.readouterr().out
            return "install: 1 packages found (0 s)" in said

        wait_until(is_shown, "no progress was printed")
        (tmp_path / "go").touch()
        step.join()


def test_two_installs_wait_for_each_other(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.venv.mkdir()
    with (checkout.venv / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=checkout.install)
        second.start()
        said = ""

        def waits() -> bool:
            nonlocal said
            said += capsys.readouterr().out
            return "waiting for it" in said

        wait_until(waits, "the second install did not wait")
        assert checkout.commands == []
    second.join()
    assert checkout.commands == ["venv", "pip"]


def test_a_step_that_fails_shows_the_end_of_its_log_and_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "print('no space left'); raise SystemExit(3)"]
    said = pytest.raises(
        SystemExit, match=r"status 3; the whole log is .*then run `make install` again"
    )
    with (tmp_path / LOG).open("w") as log, (tmp_path / LOCK).open("w") as lock, said:
        install.run_command(command, tmp_path, lock.fileno(), log)
    assert capsys.readouterr().err == "no space left\n"


def test_an_install_compiles_the_checkout_and_what_every_command_imports(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (checkout.venv / "bin").mkdir(parents=True)
    (checkout.venv / "bin" / "python").symlink_to(sys.executable)
    site = checkout.venv / "lib" / "python3.11" / "site-packages"
    ours = [checkout.root / folder for folder in ("llmsys", "data_pipeline", "launch")]
    theirs = [site / "numpy", site / "numpy" / "tests", site / "torch"]
    for folder in (*ours, *theirs):
        folder.mkdir(parents=True)
        (folder / "module.py").write_text("VALUE = 1\n")
    install.compile_imported_modules(checkout.root)
    compiled = [folder for folder in (*ours, *theirs) if (folder / "__pycache__").is_dir()]
    assert compiled == [*ours, site / "numpy"]
