"""A run that continues a Hugging Face model: its folder is whole wherever it is moved, and its
export is the original folder with other weights.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from llmsys.launch.main import main
from tests.helpers.json_tokenizers import write
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl
from tests.helpers.transformers_models import build

pytest.importorskip("transformers")

GENERATION = {"eos_token_id": [0, 2], "temperature": 0.7, "do_sample": True, "top_p": 0.9}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`theirs` (bf16), `start` (imported), `data`, `tuned` (continues it), and `settings.yaml`."""
    root = tmp_path_factory.mktemp("continued")
    size = len(write("gpt2", root / "theirs").get_vocab())
    model = build("gpt2")
    model.resize_token_embeddings(size)
    model.to(torch.bfloat16).save_pretrained(root / "theirs")
    (root / "theirs" / "generation_config.json").write_text(json.dumps(GENERATION))
    (root / "theirs" / "chat_template.jinja").write_text(TEMPLATE)
    (root / "theirs" / "LICENSE").write_text("as you like")
    assert main(["convert", str(root / "theirs"), str(root / "start")]) == 0
    values = yaml.safe_load((root / "start" / "config.yaml").read_text())
    values["run"] = {"name": "tuned", "folder": str(root / "tuned")}
    values["data"] = build_tiny_config(root / "data", make_crawl(root / "crawl")).data.model_dump(
        mode="json"
    )
    values["batch"] = {"sequence_length": 32, "sequences": 4}
    values["schedule"] = {"kind": "cosine", "warmup_tokens": 128}
    values["train"] = {"tokens": 512, "init_from": str(root / "start")}
    values["launch"] = {"processes": 1}
    (root / "settings.yaml").write_text(yaml.safe_dump(values))
    assert main(["prepare", str(root / "settings.yaml")]) == 0
    assert main(["train", str(root / "settings.yaml")]) == 0
    return root


def read_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != WEIGHTS}


def test_the_export_is_the_original_with_other_weights(root: Path, tmp_path: Path) -> None:
    assert main(["convert", str(root / "tuned"), str(tmp_path / "mine")]) == 0
    theirs, mine = read_files(root / "theirs"), read_files(tmp_path / "mine")
    assert json.loads(mine.pop("llmsys.json"))["run"] == "tuned"
    assert mine == theirs
    before, after = load_file(root / "theirs" / WEIGHTS), load_file(tmp_path / "mine" / WEIGHTS)
    assert {name: (value.dtype, value.shape) for name, value in before.items()} == {
        name: (value.dtype, value.shape) for name, value in after.items()
    }
    assert any(not torch.equal(value, after[name]) for name, value in before.items())


def test_a_dtype_that_is_asked_for_is_written_and_stated(root: Path, tmp_path: Path) -> None:
    command = ["convert", str(root / "tuned"), str(tmp_path / "wide"), "--dtype", "float32"]
    assert main(command) == 0
    assert {value.dtype for value in load_file(tmp_path / "wide" / WEIGHTS).values()} == {
        torch.float32
    }
    stated = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert stated["torch_dtype"] == "float32"
    assert "dtype" not in stated
    found = json.loads((tmp_path / "wide" / "generation_config.json").read_text())
    assert found == GENERATION


def test_a_run_of_another_model_gets_files_of_its_own(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "deeper"
    settings = [f"run.folder={folder}", "model.num_hidden_layers=3", "train.grow_model=true"]
    assert main(["train", str(root / "settings.yaml"), *settings]) == 0
    assert not (folder / "hugging_face").exists()
    assert (folder / "tokenizer" / "tokenizer.json").is_file()


def test_a_run_that_was_moved_alone_gives_the_same_bytes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    prompt = ["--prompt", "the", "generation.max_new_tokens=6", "generation.temperature=0"]

    def run_verbs(run: str, export: Path) -> tuple[str, dict[str, bytes]]:
        capfd.readouterr()
        assert main(["generate", run, *prompt]) == 0
        said = capfd.readouterr().out
        assert main(["convert", run.removesuffix("/config.yaml"), str(export)]) == 0
        written = {file.name: file.read_bytes() for file in export.iterdir()}
        written.pop("llmsys.json")  # names the folder of the run
        return said, written

    here = run_verbs(str(root / "tuned"), tmp_path / "before")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(root / "tuned", elsewhere / "copy")
    # what the run was made from and with is not there
    hidden = [(root / name, root / f"hidden-{name}") for name in ("tuned", "start", "data")]
    for place, away in hidden:
        place.rename(away)
    try:
        monkeypatch.chdir(elsewhere)
        assert run_verbs("copy", tmp_path / "after") == here
        assert run_verbs("copy/config.yaml", tmp_path / "again") == here
    finally:
        for place, away in hidden:
            away.rename(place)


def test_a_chat_template_that_was_trained_with_replaces_the_original(
    root: Path, tmp_path: Path
) -> None:
    run = tmp_path / "chatty"
    shutil.copytree(root / "tuned", run)
    ours = "{{ messages[0]['content'] }}"
    (run / "tokenizer" / "chat_template.jinja").write_text(ours)
    assert main(["convert", str(run), str(tmp_path / "mine")]) == 0
    assert (tmp_path / "mine" / "chat_template.jinja").read_text() == ours
    assert (tmp_path / "mine" / "LICENSE").is_file()
