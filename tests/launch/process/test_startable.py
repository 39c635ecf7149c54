"""What a run cannot do is said before its ranks start."""

from pathlib import Path

import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.errors import LlmsysError
from llmsys.launch.process.run_requirements import require_initial_weights, require_startable
from tests.helpers.mistaken_folders import build_finished_run
from tests.helpers.paths import CONFIGS


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a finished run and its dataset."""
    root = tmp_path_factory.mktemp("startable")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        (root / "configs").symlink_to(CONFIGS)
        build_finished_run(root)
        (root / "file").touch()
        (root / "model").mkdir()
        (root / "model" / "config.json").write_text("{}")
    return root


@pytest.mark.parametrize(("overrides", "says"), [
    (["optimizer.learning_rate=0.5"], "optimizer.learning_rate was 0.0004, now 0.5"),
    (["run.seed=3"], "seed was 0, now 3"),
    (["tokenizer.vocab_size=500"], "tokenizer.vocab_size=500, but prepared was prepared with 8192"),
    (["run.folder=file"], "run.folder=file: file is a file, not a folder"),
    (["run.folder=prepared"], "run.folder=prepared is a dataset folder"),
    (["run.folder=a", "train.init_from=none"], "train.init_from=none: none does not exist"),
    (["run.folder=a", "train.init_from=prepared"], "prepared has no checkpoint"),
    (["run.folder=a", "train.init_from=model"], "is a Hugging Face folder, not a run"),
    (["run.folder=a", "flops.device=h1000"], "Did you mean h100-pcie or h100-sxm"),
])  # fmt: skip
def test_what_does_not_fit_is_named(
    overrides: list[str], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = load_run_config("finished.yaml", overrides)
    with pytest.raises(LlmsysError, match=says):
        require_startable(config, ["finished.yaml", *overrides])


def test_the_same_run_and_a_new_one_may_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for overrides in ([], ["run.folder=new/run"], ["train.precision=auto"]):
        require_startable(load_run_config("finished.yaml", overrides), ["finished.yaml"])


def test_a_run_that_has_begun_may_outlive_what_it_began_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    require_initial_weights(load_run_config("finished.yaml", ["train.init_from=none"]))
