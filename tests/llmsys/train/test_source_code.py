"""Laws of the record of the code: it is that of the package, wherever the command was typed."""

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

import llmsys
from llmsys.train.source_code import read_source


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", "-C", str(folder), *who, *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a package under version control."""
    package = tmp_path / "check out" / "llmsys"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    git(package.parent, "init", "-q")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-q", "-m", "first")
    return package


def test_a_checkout_is_its_commit_and_whether_it_was_changed(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "not the code")
    monkeypatch.chdir(other)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    commit = subprocess.run(
        ["git", f"--git-dir={checkout.parent}/.git", "rev-parse", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    source = read_source(checkout)
    assert (source["commit"], source["uncommitted_changes"]) == (commit, False)
    assert (source["version"], source["folder"]) == (llmsys.__version__, str(checkout.parent))
    (checkout / "new.py").touch()
    assert read_source(checkout)["uncommitted_changes"] is True


def test_an_environment_inside_a_repository_is_no_checkout(checkout: Path) -> None:
    installed = checkout.parent / ".venv" / "lib" / "llmsys"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    source = read_source(installed)
    assert (source["commit"], source["branch"], source["uncommitted_changes"]) == (None, None, None)
    assert source["version"] == llmsys.__version__


def test_a_package_installed_from_a_repository_has_the_commit_of_its_installer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str:
            assert name == "direct_url.json"
            return '{"url": "https://host/x", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}'

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed())
    monkeypatch.setattr("llmsys.train.source_code.PACKAGE", tmp_path)
    assert read_source(tmp_path)["commit"] == "abc123"
