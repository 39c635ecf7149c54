"""Laws of what is shipped: the wheel holds the code and the configs and works from any folder;
--help is light.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "deepspeed",
    "accelerate",
    "transformers",
    "pyarrow",
    "spacy",
    "numpy",
    "plotly",
    "pydantic",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=repository, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("llmsys-*.whl")))


def test_wheel_holds_one_top_level_package_and_the_configs(
    wheel: zipfile.ZipFile, repository: Path
) -> None:
    names = set(wheel.namelist())
    # Other people's `launch` or `data_pipeline` must not be shadowed.
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"llmsys"}
    assert {"llmsys/launch/train.py", "llmsys/data_pipeline/rules/chain.py"} <= names
    configs = {
        path.relative_to(repository).as_posix() for path in (repository / "configs").rglob("*.yaml")
    }
    # Templates lie next to the code that fills them in.
    templates = {
        path.relative_to(repository).as_posix()
        for pattern in ("llmsys/*/templates/*.html", "launch/*/templates/*.yaml")
        for path in repository.glob(pattern)
    }
    assert {"llmsys/report/templates/page.html", "launch/launchers/templates/kubernetes.yaml"} <= (
        templates
    )
    assert {f"llmsys/{name.removeprefix('llmsys/')}" for name in templates} <= names
    assert configs
    assert {f"llmsys/{name}" for name in configs} <= names


def test_wheel_has_the_licence_and_the_command(wheel: zipfile.ZipFile) -> None:
    metadata = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "LICENSE" in metadata
    assert "llmsys = llmsys.launch.entry:main" in wheel.read(metadata["entry_points.txt"]).decode()


def test_the_installed_package_finds_its_configs_from_any_folder(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    wheel.extractall(tmp_path / "installed")
    code = (
        "import llmsys; print(llmsys.__file__); from llmsys.launch.main import main; "
        "main(['show', 'train/demo'])"
    )
    (tmp_path / "elsewhere").mkdir()
    code += (
        "; from llmsys.launch.commands.demo import list_crawl_overrides; "
        "print(*list_crawl_overrides())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "elsewhere", capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")}, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert str(tmp_path / "installed") in result.stdout.splitlines()[0]
    assert "hidden_size" in result.stdout
    shards = json.loads(result.stdout.splitlines()[-1].removeprefix("data.inputs="))
    assert [Path(shard).parent for shard in shards] == [
        tmp_path / "installed" / "llmsys" / "sample_crawl"
    ] * 2


def test_the_wheel_with_the_sample_crawl_stays_small(wheel: zipfile.ZipFile) -> None:
    # 6.8 MB of them are the crawl.
    assert sum(entry.compress_size for entry in wheel.infolist()) < 11_000_000


def loaded_by(code: str, repository: Path) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running `code`."""
    report = "print(*{name.partition('.')[0] for name in __import__('sys').modules})"
    program = f"try:\n    {code}\nexcept SystemExit:\n    pass\n{report}"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, capture_output=True, text=True, check=True
    )
    return set(result.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    ["import llmsys.launch.main", "import llmsys.launch.main; llmsys.launch.main.main(['--help'])"],
)
def test_help_loads_nothing_heavy(code: str, repository: Path) -> None:
    loaded = loaded_by(code, repository)
    assert "llmsys" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_estimate_loads_no_torch(repository: Path) -> None:
    loaded = loaded_by(
        "import llmsys.launch.main; llmsys.launch.main.main(['estimate', 'train/demo', '--json'])",
        repository,
    )
    assert "llmsys" in loaded
    assert loaded.isdisjoint({"torch", "deepspeed", "accelerate", "transformers", "spacy"})
