"""A checkpoint runs nothing when it is read: its metadata are JSON."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from llmsys import __version__
from llmsys.errors import CheckpointError, CheckpointFormatError
from llmsys.train.checkpoint_average import average_checkpoints
from llmsys.train.checkpoint_load import find_newest_checkpoint, load_tensors, read_tensor_metadata
from llmsys.train.checkpoint_metadata import METADATA
from llmsys.train.checkpoint_record import RECORD, find_checkpoint_error, read_record, write_record
from llmsys.train.checkpoint_storage import CheckpointStorageReader, read_tensors
from llmsys.train.checkpoint_write import publish_weights, save_tensors
from tests.helpers.checkpoints import Touch, pickle_touch, write_signed_record
from tests.helpers.interrupted_saves import save

# The metadata file of torch, a pickle, which can run code when it is read.
PICKLED = ".metadata"
TENSORS = {
    "parameter/w": torch.arange(12.0).reshape(3, 4),
    "buffer/n": torch.tensor(7),
    "buffer/e": torch.empty(0, 2),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return publish_weights(
        tmp_path / "run" / "checkpoints", lambda folder: save_tensors(TENSORS, folder), 10
    )


def read(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full_like(value, -1) for name, value in TENSORS.items()}
    load_tensors(tensors, checkpoint)
    return tensors


def assert_equal(found: dict[str, torch.Tensor]) -> None:
    for name, value in TENSORS.items():
        assert torch.equal(found[name], value), name


def change_metadata(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads((checkpoint / METADATA).read_text())
    change(values)
    (checkpoint / METADATA).write_text(json.dumps(values))
    write_signed_record(checkpoint, {"steps": 10, "run": {}, "weights_only": True})


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_pickled_metadata_is_written(tmp_path: Path, mode: str) -> None:
    save(tmp_path, 10, mode)
    written = tmp_path / "step-00000010"
    assert sorted(file.name for file in written.iterdir()) == ["__0_0.distcp", METADATA, RECORD]
    assert json.loads((written / METADATA).read_text())["tensors"]["parameter/w"]["shape"] == [
        64,
        64,
    ]


def test_what_is_written_is_read_with_types_and_shapes(checkpoint: Path) -> None:
    assert_equal(read(checkpoint))
    stored = read_tensor_metadata(checkpoint)
    assert {name: (one.shape, one.dtype) for name, one in stored.items()} == {
        name: (one.shape, one.dtype) for name, one in TENSORS.items()
    }


@pytest.mark.parametrize("name", [PICKLED, "__0.metadata"])
def test_a_pickle_next_to_the_metadata_is_never_read(
    checkpoint: Path, tmp_path: Path, name: str
) -> None:
    (checkpoint / name).write_bytes(pickle_touch(tmp_path / "ran"))
    write_signed_record(checkpoint, {"steps": 10, "run": {}, "weights_only": True})
    assert_equal(read(checkpoint))
    (checkpoint / METADATA).unlink()
    with pytest.raises(CheckpointError):
        read(checkpoint)
    with pytest.raises(CheckpointError):
        read_tensors({}, CheckpointStorageReader(checkpoint), alone=True)
    assert not (tmp_path / "ran").exists()


def test_ctrl_c_while_a_checkpoint_is_read_is_not_taken_for_damage(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointStorageReader, "read_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        read(checkpoint)


@pytest.mark.parametrize("content", ["pickle", "bytes", "list"])
def test_tensor_files_that_hold_something_else_are_refused_and_not_run(
    checkpoint: Path, tmp_path: Path, content: str
) -> None:
    data = {
        "pickle": _save_tensors({"w": Touch(tmp_path / "ran")}),
        "bytes": b"x" * 400,
        "list": _save_tensors([1, 2]),
    }[content]
    (checkpoint / "__0_0.distcp").write_bytes(data)

    def move_chunk(values: dict[str, Any]) -> None:
        for entry in values["tensors"].values():
            for chunk in entry["chunks"]:
                chunk.update(begin=0, bytes=len(data))

    change_metadata(checkpoint, move_chunk)
    assert find_checkpoint_error(checkpoint) is None  # signed again: the digests are right
    with pytest.raises(
        CheckpointError, match=r"cannot be read: .*Use another checkpoint"
    ) as refusal:
        read(checkpoint)
    assert "weights_only" not in str(refusal.value)
    assert not (tmp_path / "ran").exists()


def _save_tensors(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an entry for torch to unpickle": (
        lambda one: one.update({"parameter/w": {"kind": "bytes"}}),
        "parameter/w: 'dtype' is missing",
    ),
    "a file of another folder": (
        lambda one: one["parameter/w"]["chunks"][0].update(file="../../x"),
        "parameter/w: '../../x' is not the name of a file in the checkpoint's folder",
    ),
    "an absolute file": (
        lambda one: one["parameter/w"]["chunks"][0].update(file="/etc/passwd"),
        "'/etc/passwd' is not the name of a file",
    ),
    "another dtype": (
        lambda one: one["parameter/w"].update(dtype="load"),
        "'load' is not a torch dtype",
    ),
    "a huge shape": (
        lambda one: one["parameter/w"].update(shape=[1 << 50]),
        "is not within [1125899906842624]",
    ),
    "a hole": (
        lambda one: one["parameter/w"]["chunks"][0].update(sizes=[2, 4]),
        "its chunks do not fill [3, 4]",
    ),
    "a negative offset": (
        lambda one: one["parameter/w"]["chunks"][0].update(offsets=[-1, 0]),
        "are not counts",
    ),
    "bytes behind the end": (
        lambda one: one["parameter/w"]["chunks"][0].update(begin=1 << 40),
        "__0_0.distcp has no",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_metadata_that_point_elsewhere_are_refused(checkpoint: Path, case: str) -> None:
    change, said = HOSTILE[case]
    change_metadata(checkpoint, lambda values: change(values["tensors"]))
    assert find_checkpoint_error(checkpoint) is None
    with pytest.raises(CheckpointError) as refusal:
        read(checkpoint)
    assert said in str(refusal.value)
    assert str(refusal.value).startswith(f"{checkpoint / METADATA} cannot be read (")
    assert "Use another checkpoint." in str(refusal.value)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", '{"format_version": 9}', "\x80\x04."])
def test_metadata_that_are_none_are_refused(checkpoint: Path, text: str) -> None:
    (checkpoint / METADATA).write_text(text)
    with pytest.raises(CheckpointError, match=r"metadata\.json cannot be read"):
        read(checkpoint)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "", "..", "a\\b"])
def test_a_record_names_files_of_its_own_folder_alone(checkpoint: Path, name: str) -> None:
    record = read_record(checkpoint)
    write_record(checkpoint, {**record, "files": {**record["files"], name: "0"}})
    assert f"{name!r} is not the name of a file in its folder" in str(
        find_checkpoint_error(checkpoint)
    )


@pytest.mark.parametrize("version", [1, 2, 3, 9])
def test_a_checkpoint_of_another_format_is_refused_by_name_and_not_skipped(
    checkpoint: Path, tmp_path: Path, version: int
) -> None:
    """Versions up to 3 stored theirs as `format`; the metadata of version 1 were a pickle."""
    (checkpoint / PICKLED).write_bytes(pickle_touch(tmp_path / "ran"))
    record = {"steps": 10, "updates": 10, "run": {}, "files": {PICKLED: "0"}}
    key = "format" if version < 4 else "format_version"
    (checkpoint / RECORD).write_text(json.dumps({key: version, **record}))
    writer = "llmsys 0.1" if version < 4 else "a newer llmsys"
    for use in (
        lambda: find_newest_checkpoint(checkpoint.parent),
        lambda: average_checkpoints(checkpoint.parent.parent, 1),
        lambda: read_record(checkpoint),
    ):
        with pytest.raises(CheckpointFormatError) as refusal:
            use()
        assert str(refusal.value).startswith(
            f"{checkpoint} has checkpoint format {version}, written by {writer}; "
            f"llmsys {__version__} reads format 4. Read it with {writer}, or export its weights"
        )
    assert checkpoint.exists()
    assert not (tmp_path / "ran").exists()


def test_entries_that_are_no_tensors_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="note is not a tensor"):
        save_tensors({"note": "text"}, tmp_path)  # type: ignore[dict-item]


def test_torch_reads_a_checkpoint_through_the_reader(checkpoint: Path) -> None:
    tensors = {"parameter/w": torch.empty(3, 4)}
    dcp.load(tensors, storage_reader=CheckpointStorageReader(checkpoint), no_dist=True)
    assert torch.equal(tensors["parameter/w"], TENSORS["parameter/w"])
