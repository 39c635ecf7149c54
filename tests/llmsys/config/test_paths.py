"""The folder of a run, of a dataset or of a model is a config wherever a file of it is."""

from pathlib import Path

import pytest

from llmsys.config.loading.load import load_run_config, read_config
from llmsys.errors import ConfigError
from llmsys.launch.commands.inspect import resolve_dataset_folders
from llmsys.launch.main import main
from tests.helpers.example_run import write_dataset, write_run


def make_run(folder: str) -> None:
    """A run folder whose config.yaml was written for demo/run."""
    (write_run(Path(folder)) / "config.yaml").write_text(
        "format_version: 2\nrun: {name: demo, folder: demo/run}\n"
    )


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_folder_is_its_config_and_names_itself_where_it_was_moved() -> None:
    make_run("moved/run")
    config = load_run_config("moved/run", ["run.seed=3"])
    assert (config.run.name, config.run.folder, config.run.seed) == ("demo", Path("moved/run"), 3)
    assert read_config("moved/run").origins["run", "folder"] == "moved/run"
    assert load_run_config("moved/run/config.yaml").run.folder == Path("moved/run")
    # A copy of the file alone is a config like any other.
    Path("mine").mkdir()
    Path("mine/config.yaml").write_text(Path("moved/run/config.yaml").read_text())
    assert load_run_config("mine/config.yaml").run.folder == Path("demo/run")
    make_run("demo/run")
    assert read_config(str(Path("demo/run").absolute())).run.run.folder == Path("demo/run")


def test_a_dataset_folder_is_the_config_it_was_prepared_with() -> None:
    write_dataset(Path("made"))
    config = load_run_config("made", ["train.tokens=20_000"])
    assert (config.data.name, config.data.folder, config.train.tokens) == (
        "sample",
        Path("made"),
        20_000,
    )
    Path("mine.yaml").write_text("data: {base: made, name: mine}\n")
    assert load_run_config("mine.yaml").data.name == "mine"
    assert load_run_config("mine.yaml").data.folder == Path("made")
    Path("wrong.yaml").write_text("model: {base: made}\n")
    with pytest.raises(ConfigError, match=r"made/manifest\.json is a dataset, but model is not"):
        load_run_config("wrong.yaml")


def test_a_report_of_a_dataset_folder_has_no_run_of_another_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_dataset(Path("made"))
    make_run("runs/run")  # where a config without run.folder puts its run
    assert main(["report", "made"]) == 0
    assert capsys.readouterr().out == "made/report.html\n"


def test_the_datasets_of_a_run_folder_are_inspected() -> None:
    make_run("run")
    assert resolve_dataset_folders("run", []) == (Path("runs/data"),)
    assert resolve_dataset_folders("run", ["data.folder=made"]) == (Path("made"),)
    Path("made").mkdir()
    assert resolve_dataset_folders("made", []) == (Path("made"),)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("run/checkpoints/step-00000050", "is a checkpoint, not a run. Give its run folder: run"),
        ("files", "files is a folder without a config: it has no config.json (a model)"),
        ("configured", "Give the path of a file, such as configured/a.yaml"),
    ],
)
def test_another_folder_has_a_next_step(folder: str, message: str) -> None:
    make_run("run")
    for path in ("run/checkpoints/step-00000050", "files", "configured"):
        Path(path).mkdir(parents=True)
    Path("configured/a.yaml").write_text("run: {}\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config(folder)
    assert message in str(caught.value)


def test_a_manifest_of_something_else_is_named() -> None:
    Path("other").mkdir()
    Path("other/manifest.json").write_text('{"name": "an extension"}')
    with pytest.raises(ConfigError, match=r"other/manifest\.json is not the manifest of a dataset"):
        load_run_config("other")
