"""A run folder has the files that its model needs, and those of the model that it continues."""

import json
from pathlib import Path

import pytest

from llmsys.config.export.kept_folder import find_run_of_checkpoint
from llmsys.config.run import RunConfig
from llmsys.train.chat_data import get_template_folder
from llmsys.train.run_data import get_configured_tokenizer_path, get_tokenizer_path
from llmsys.train.run_files import keep_run_files

TEMPLATE = "chat_template.jinja"


def build_config(folder: Path, **sections: object) -> RunConfig:
    values: dict[str, object] = {
        "run": {"name": "one", "folder": str(folder / "run")},
        "data": {"kind": "crawl", "folder": str(folder / "data")},
    }
    return RunConfig.model_validate(values | sections)


def write_file(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """An imported run, with the model of `build_config`."""
    record = {"model": build_config(tmp_path).model.model_dump(mode="json")}
    write_file(tmp_path / "start" / "hugging_face" / "record.json", json.dumps(record))
    write_file(tmp_path / "start" / "hugging_face" / "LICENSE", "as you like")
    write_file(tmp_path / "start" / "tokenizer" / "tokenizer.model", "pieces")
    return tmp_path / "start"


def keep(config: RunConfig) -> None:
    tokenizer = get_configured_tokenizer_path(config)
    keep_run_files(config, tokenizer, config.data.folder / "tokenizer" / TEMPLATE)


def test_the_copy_counts_from_the_first_checkpoint_on(tmp_path: Path) -> None:
    config = build_config(tmp_path)
    made = write_file(tmp_path / "data" / "tokenizer" / "tokenizer.model", "pieces")
    write_file(made.parent / TEMPLATE, "hello")
    keep(config)
    kept = tmp_path / "run" / "tokenizer" / "tokenizer.model"
    assert kept.read_text() == "pieces"
    # A run that has not begun may get another tokenizer.
    assert get_tokenizer_path(config) == made
    made.write_text("other pieces")
    keep(config)
    assert kept.read_text() == "other pieces"
    (tmp_path / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert get_tokenizer_path(config) == kept
    assert get_template_folder(config) == kept.parent
    assert (kept.parent / TEMPLATE).read_text() == "hello"


def test_a_run_without_the_files_of_its_config_keeps_its_own(tmp_path: Path) -> None:
    kept = write_file(tmp_path / "run" / "tokenizer" / "tokenizer.model", "pieces")
    keep(build_config(tmp_path))
    assert kept.read_text() == "pieces"


def test_a_run_that_continues_an_import_keeps_its_small_files(start: Path, tmp_path: Path) -> None:
    tokenizer = {"kind": "file", "path": str(start / "tokenizer" / "tokenizer.model")}
    keep(build_config(tmp_path, tokenizer=tokenizer, train={"init_from": str(start)}))
    assert (tmp_path / "run" / "hugging_face" / "LICENSE").read_text() == "as you like"
    assert (tmp_path / "run" / "hugging_face" / "record.json").is_file()


@pytest.mark.parametrize("other", ["model", "tokenizer", "record"])
def test_files_of_another_model_or_tokenizer_are_not_kept(
    start: Path, tmp_path: Path, other: str
) -> None:
    tokenizer = start / "tokenizer" / "tokenizer.model"
    sections: dict[str, object] = {"train": {"init_from": str(start)}}
    match other:
        case "model":
            model = build_config(tmp_path).model.model_dump(mode="json")
            sections["model"] = model | {"num_hidden_layers": model["num_hidden_layers"] + 1}
        case "tokenizer":
            tokenizer = write_file(tmp_path / "mine.model", "other pieces")
        case _:
            (start / "hugging_face" / "record.json").write_text("[")
    sections["tokenizer"] = {"kind": "file", "path": str(tokenizer)}
    keep(build_config(tmp_path, **sections))
    assert not (tmp_path / "run" / "hugging_face").exists()


def test_links_of_an_import_are_kept_as_links(start: Path, tmp_path: Path) -> None:
    secret = write_file(tmp_path / "secret", "private")
    (start / "hugging_face" / "NOTICE").symlink_to(secret)
    tokenizer = {"kind": "file", "path": str(start / "tokenizer" / "tokenizer.model")}
    keep(build_config(tmp_path, tokenizer=tokenizer, train={"init_from": str(start)}))
    assert (tmp_path / "run" / "hugging_face" / "NOTICE").is_symlink()


def test_a_checkpoint_is_of_the_run_whose_folder_it_is_in(tmp_path: Path) -> None:
    saved = tmp_path / "run" / "checkpoints" / "step-00000004"
    saved.mkdir(parents=True)
    assert find_run_of_checkpoint(saved) == tmp_path / "run"
    assert find_run_of_checkpoint(Path(f"{tmp_path / 'run'}@4")) == tmp_path / "run"
    assert find_run_of_checkpoint(tmp_path / "run") == tmp_path / "run"
