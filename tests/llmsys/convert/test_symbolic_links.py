"""A conversion writes into its destination and copies nothing that a link leads to, whatever the
source says.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llmsys.convert.from_hugging_face import convert_from_hugging_face
from llmsys.convert.safetensors_folder import INDEX
from llmsys.convert.to_hugging_face import convert_to_hugging_face
from llmsys.errors import CheckpointError, ConfigError
from llmsys.launch.main import main
from llmsys.train.checkpoint_average import average_checkpoints
from llmsys.train.checkpoint_load import load_tensors, read_tensor_metadata
from llmsys.train.checkpoint_write import publish_weights, save_tensors
from tests.helpers.transformers_models import build

pytest.importorskip("transformers")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    build("llama").save_pretrained(tmp_path / "a" / "theirs", max_shard_size="5KB")
    return tmp_path / "a" / "theirs"


@pytest.fixture
def ours(theirs: Path, tmp_path: Path) -> Path:
    return convert_from_hugging_face(theirs, tmp_path / "b" / "ours")


def list_tree(folder: Path) -> list[tuple[str, int]]:
    return sorted(
        (str(path.relative_to(folder)), path.lstat().st_mtime_ns) for path in folder.rglob("*")
    )


def refuse(source: Path, tmp_path: Path) -> None:
    """Convert into a folder of its own; nothing may change anywhere but there."""
    (tmp_path / "c").mkdir()
    before = list_tree(tmp_path)
    for words in ([], ["--dry-run"]):
        assert main(["convert", str(source), str(tmp_path / "c" / "out"), *words]) == 2
    assert list_tree(tmp_path) == before


def change_record(ours: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = ours / "hugging_face" / "record.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))


def _rename(where: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: record["files"].update(dict.fromkeys(record["files"], where))


RECORDS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a parent": (_rename("../escaped.safetensors"), "would be written to '../escaped.safetensors'"),
    "absolute": (
        _rename("/tmp/escaped.safetensors"),
        "would be written to '/tmp/escaped.safetensors'",
    ),
    "a folder": (_rename("x/escaped.safetensors"), "would be written to 'x/escaped.safetensors'"),
    "no weights": (_rename("config.json"), "would be written to 'config.json'"),
    "no text": (_rename(3), "files of"),  # type: ignore[arg-type]
    "one name twice": (
        lambda record: record["names"].update(dict.fromkeys(record["names"], "x")),
        "two tensors have the same name",
    ),
    "an index of others": (
        lambda record: record.update(index='{"weight_map": {"x": "/etc/x.safetensors"}}'),
        "'/etc/x.safetensors' is not the name of a safetensors file in its folder",
    ),
    "an index too many": (
        lambda record: record.update(index='{"weight_map": {"x": "y.safetensors"}}'),
        "its index names files that it does not have",
    ),
    "a name too few": (lambda record: record["names"].popitem(), "does not name"),
    "a file too few": (lambda record: record.update(files={}, index=None), "does not name"),
    "a list": (lambda record: record.update(copies=[]), "record.json cannot be used"),
    "no names": (lambda record: record.pop("names"), "'names' is missing"),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_record_that_leads_outside_is_refused(
    ours: Path, tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, said = RECORDS[case]
    change_record(ours, change)
    refuse(ours, tmp_path)
    message = capsys.readouterr().err
    assert said in message
    assert (
        "Do not trust this run folder, or remove its hugging_face/ folder to convert the weights "
        "alone."
    ) in message


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", INDEX, "folder"])
def test_small_files_that_are_links_or_weights_are_refused(
    ours: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("secret")
    file = ours / "hugging_face" / name
    if name == "notes.txt":
        file.symlink_to(tmp_path / "secret")
    elif name == "folder":
        file.mkdir()
    else:
        file.write_text("x")
    refuse(ours, tmp_path)
    message = capsys.readouterr().err
    assert str(file) in message
    assert (
        "is not a regular file" if name in ("notes.txt", "folder") else "would replace the weights"
    ) in message


def test_a_link_for_the_folder_of_originals_is_refused(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ours / "hugging_face").rename(tmp_path / "elsewhere")
    (ours / "hugging_face").symlink_to(tmp_path / "elsewhere")
    refuse(ours, tmp_path)
    assert "hugging_face is a link, and its target would be copied" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["../x.safetensors", "/x.safetensors", "x.bin", "..", 7])
def test_an_index_names_files_of_its_own_folder_alone(
    theirs: Path, tmp_path: Path, file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    index = json.loads((theirs / INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = file
    (theirs / INDEX).write_text(json.dumps(index))
    refuse(theirs, tmp_path)
    assert (
        f"{file!r} is not the name of a safetensors file in its folder" in capsys.readouterr().err
    )


def test_links_out_of_a_hugging_face_folder_are_not_copied(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").write_text("secret")
    (theirs / "notes.txt").symlink_to(tmp_path / "secret")
    (theirs / "README.md").symlink_to(theirs / "config.json")
    (theirs / "record.json").write_text("{}")
    kept = convert_from_hugging_face(theirs, tmp_path / "ours") / "hugging_face"
    assert not (kept / "notes.txt").exists()
    assert (kept / "README.md").read_text() == (theirs / "config.json").read_text()
    assert (
        f"{theirs / 'notes.txt'} is left out: it is a link to {tmp_path / 'secret'}" in caplog.text
    )


def test_links_of_the_cache_of_the_hub_are_copied(theirs: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(theirs.iterdir())):
        (blobs / str(number)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    kept = convert_from_hugging_face(snapshot, tmp_path / "ours") / "hugging_face"
    assert (kept / "config.json").read_text() == (theirs / "config.json").read_text()
    back = convert_to_hugging_face(kept.parent, tmp_path / "back")
    assert {file.name for file in back.iterdir()} == {file.name for file in theirs.iterdir()}


@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_written_through_a_link(theirs: Path, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"link is a link\. Name the target folder"):
        convert_from_hugging_face(theirs, tmp_path / "link")
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("x")
    (tmp_path / ".ours.partial").symlink_to(tmp_path / "target")  # where a conversion is prepared
    convert_from_hugging_face(theirs, tmp_path / "ours")
    assert [file.name for file in (tmp_path / "target").iterdir()] == ["mine"]


def test_a_mean_is_converted_without_writing_into_the_run(ours: Path, tmp_path: Path) -> None:
    first = ours / "checkpoints" / "step-00000000"
    tensors = {
        name: torch.empty(one.shape, dtype=one.dtype)
        for name, one in read_tensor_metadata(first).items()
    }
    load_tensors(tensors, first)
    shifted = {name: one + 1 if one.is_floating_point() else one for name, one in tensors.items()}
    publish_weights(ours / "checkpoints", lambda folder: save_tensors(shifted, folder), 10)
    with (ours / "config.yaml").open("a") as config:
        config.write("checkpoint:\n  average_last: 2\n")
    before = list_tree(ours)
    convert_to_hugging_face(ours, tmp_path / "mean")
    assert main(["convert", str(ours), str(tmp_path / "listed"), "--dry-run"]) == 0
    assert list_tree(ours) == before
    made = average_checkpoints(ours, 2)
    convert_to_hugging_face(made, tmp_path / "made")
    for file in sorted((tmp_path / "made").glob("*.safetensors")):
        assert (tmp_path / "mean" / file.name).read_bytes() == file.read_bytes()
    publish_weights(ours / "checkpoints", lambda folder: save_tensors(shifted, folder), 20)
    (ours / "checkpoints" / "step-00000020" / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"metadata\.json is missing"):
        convert_to_hugging_face(ours, tmp_path / "damaged")
