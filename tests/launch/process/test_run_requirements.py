"""What cannot train is refused before ranks start: layouts, steps that cannot be dealt, datasets
that are missing.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.errors import ConfigError, DataError, LayoutError
from llmsys.launch.process.run_requirements import require_datasets, require_layout
from tests.helpers.paths import ROOT

PROBE = """
import sys
from {module} import main
try:
    status = main({words!r})
except SystemExit as end:
    status = end.code
print(status, "torch" in sys.modules)
"""


def run_main(module: str, words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Call an entry point in a new process, and print its status and whether torch was imported."""
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module, words=words)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def test_a_layout_is_refused_without_torch_and_without_ranks(tmp_path: Path) -> None:
    words = ["train/demo", "launch.processes=3", "layout.expert=2", f"run.folder={tmp_path}"]
    done = run_main("llmsys.launch.main", ["train", *words])
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr.startswith("llmsys: error: expert=2 does not divide shard=3")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_of_any_launcher_refuse_a_layout_without_torch_and_one_says_so(
    tmp_path: Path, rank: str
) -> None:
    words = ["train/demo", "layout.expert=2", f"run.folder={tmp_path}"]
    done = run_main("llmsys.launch.train", words, RANK=rank, WORLD_SIZE="3")
    assert done.stdout.split() == ["2", "False"]
    assert ("expert=2 does not divide shard=3" in done.stderr) == (rank == "0")


def test_train_before_prepare_names_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "no data"
    words = ["train/demo", f"data.folder={folder}", f"run.folder={tmp_path / 'run'}"]
    done = run_main("llmsys.launch.main", ["train", *words])
    assert done.stdout.split() == ["2", "False"]
    assert done.stderr == (
        f"llmsys: error: {folder} is not a prepared dataset (manifest.json is missing), which "
        f"training needs. Prepare it first: llmsys prepare train/demo 'data.folder={folder}' "
        f"run.folder={tmp_path / 'run'}\n"
    )


def test_a_source_of_a_mixture_names_its_own_config(tmp_path: Path) -> None:
    sources = [{"folder": str(tmp_path / name)} for name in ("a", "b")]
    data = {"kind": "mixture", "sources": sources}
    config = RunConfig.model_validate({"data": data})
    with pytest.raises(DataError, match=f"data.folder={tmp_path / 'a'}: llmsys prepare CONFIG"):
        require_datasets(config, ["CONFIG"])


def test_evaluation_without_a_dataset_names_prepare_and_not_the_tokenizer(tmp_path: Path) -> None:
    from llmsys.train.run_data import open_run_data

    with pytest.raises(DataError, match="Run: llmsys prepare CONFIG"):
        open_run_data(load_run_config("train/demo", [f"data.folder={tmp_path}"]), "heldout")


def test_steps_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"batch.sequences=4 cannot be divided evenly over 3 data ranks"
    ):
        require_layout(load_run_config("train/demo", ["layout.expert=1"]), 3)
    bitwise = ["layout.expert=1", "train.reproducibility=bitwise", "train.threads_per_process=1"]
    with pytest.raises(ConfigError, match=r"train\.reproducibility=bitwise distributes"):
        require_layout(load_run_config("train/demo", [*bitwise, "batch.micro_sequences=1"]), 3)
    with pytest.raises(LayoutError, match="expert=2 does not divide"):
        require_layout(load_run_config("train/demo", []), 3)
    require_layout(load_run_config("train/demo", []), 2)
