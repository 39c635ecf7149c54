"""`pip install llmsys` without extras prepares data, prices runs and reports; what needs more says
which extra has it. Packages that no dependency of the plain install needs are hidden.
"""

import json
import os
import random
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from llmsys.errors import EXTRAS

HIDE = """
import importlib.machinery, importlib.metadata, json, os, sys
absent = json.loads(open(os.environ["ABSENT"]).read())
modules, packages = set(absent["modules"]), set(absent["packages"])

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in modules:
            return None
        return super().find_spec(name, path, target)

sys.meta_path = [
    Finder if one is importlib.machinery.PathFinder else one for one in sys.meta_path
]
find = importlib.metadata.Distribution.from_name.__func__

def from_name(cls, name):
    if name.lower().replace("_", "-") in packages:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(cls, name)

importlib.metadata.Distribution.from_name = classmethod(from_name)
"""


def get_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


def list_plain_packages(repository: Path) -> set[str]:
    """The dependencies of the plain install, and theirs."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    found = {"llmsys", "pip", "setuptools"}
    waiting = [get_name(one) for one in project["dependencies"]]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of another system or version of Python
        waiting += [get_name(one) for one in needs if "extra ==" not in one]
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("hidden")
    plain = list_plain_packages(repository)
    installed = {get_name(one.metadata["Name"]) for one in metadata.distributions()}
    absent = {
        "packages": sorted(installed - plain),
        "modules": sorted(
            module
            for module, packages in metadata.packages_distributions().items()
            if not {get_name(one) for one in packages} & plain
        ),
    }
    assert {*EXTRAS, "spacy", "transformers", "s3fs"} <= {*absent["modules"]}
    (folder / "absent.json").write_text(json.dumps(absent))
    (folder / "sitecustomize.py").write_text(HIDE)
    return os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{repository}",
        "ABSENT": str(folder / "absent.json"),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    (folder / "texts").mkdir()
    source = random.Random(0)
    words = [
        "".join(source.choices("abcdefghijklmnop", k=source.randint(2, 9))) for _ in range(900)
    ]
    rows = (json.dumps({"text": " ".join(source.choices(words, k=90))}) for _ in range(400))
    (folder / "texts" / "a.jsonl").write_text("\n".join(rows))
    return folder


def run_verb(
    words: str, environment: dict[str, str], place: Path
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "llmsys.launch.main", *words.split()],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        "init texts",
        "prepare my.yaml data.executor.workers=1",
        "report my.yaml",
        "inspect runs/texts-data",
        "show my.yaml",
        "list",
        "estimate my.yaml --device rtx-4090",
        "plan train/demo gpus=2 device=rtx-4090",
        "scale budget=1e21 unique_tokens=2e9",
    ],
)
def test_data_are_prepared_and_runs_are_priced(
    words: str, environment: dict[str, str], place: Path
) -> None:
    """In this order: each uses the files of those before."""
    result = run_verb(words, environment, place)
    assert result.returncode == 0, result.stderr[-2_000:]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("train my.yaml --prepare", "train"),
        ("train my.yaml engine.kind=deepspeed", "train"),
        ("init texts --minutes 1 --output b.yaml", "train"),
        ("demo", "train"),
        ("estimate my.yaml --my-machine", "train"),
        ("doctor parity --processes 1,2", "train"),
        ("dryrun train/demo nodes=1:2 device=h100-sxm", "train"),
    ],
)
def test_what_needs_more_names_its_extra(
    words: str, extra: str, environment: dict[str, str], place: Path
) -> None:
    result = run_verb(words, environment, place)
    assert result.returncode == 2, result.stderr[-2_000:]
    assert "Traceback" not in result.stderr
    assert f"pip install 'llmsys[{extra}]'" in result.stderr
    assert not (place / "b.yaml").exists()


def test_every_extra_that_a_message_names_has_its_package(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, extra in EXTRAS.items():
        assert package in {get_name(one) for one in extras[extra]}
        assert package not in {get_name(one) for one in project["dependencies"]}
