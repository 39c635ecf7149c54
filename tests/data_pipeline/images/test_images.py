"""Labelled images become pairs of token sequences: bytes of pixels, and the number of the label."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsys.config.run import RunConfig
from llmsys.data.sequence_pairs import SequencePairs, open_pairs
from llmsys.data_pipeline.inspection.verify_dataset import verify_dataset
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import Manifest
from llmsys.errors import DataError
from tests.helpers.tiny_images import build_images, write_image_folder, write_images


def prepare(tmp_path: Path, source: Path, **data: Any) -> Manifest:
    settings = {
        "kind": "images", "folder": tmp_path / "data", "executor": {"kind": "inline"},
        "inputs": [source],
        "heldout_inputs": [source], "image_size": 8, "num_channels": 1,
    }  # fmt: skip
    return prepare_dataset(
        RunConfig.model_validate({"data": settings | data, "tokenizer": {"kind": "none"}})
    )


def read_rows(pairs: SequencePairs) -> list[tuple[list[int], int]]:
    rows = range(len(pairs))
    return [
        (pairs.sources.get_tokens(row).tolist(), int(pairs.targets.get_tokens(row)[0]))
        for row in rows
    ]


@pytest.mark.parametrize("channels", [1, 3])
def test_arrays_and_files_give_the_same_images(tmp_path: Path, channels: int) -> None:
    """In the order of the arrays or paths; numbers are labels in the order of their values."""
    pytest.importorskip("PIL")
    write_images(tmp_path / "images.npz", channels=channels)
    write_image_folder(tmp_path / "images", channels=channels)
    manifest = prepare(tmp_path, tmp_path / "images.npz", num_channels=channels, shard_images=5)
    assert manifest.labels == ("2", "7", "10")
    assert manifest.splits["train_source"].num_files == 3
    rows = read_rows(open_pairs(tmp_path / "data", "train"))
    images, labels = build_images(channels=channels)
    assert rows == [
        (image.transpose(2, 0, 1).ravel().tolist(), manifest.labels.index(label))
        for image, label in zip(images, labels, strict=True)
    ]
    assert verify_dataset(tmp_path / "data", 2).findings == []
    again = prepare(tmp_path / "again", tmp_path / "images", num_channels=channels)
    assert again.labels == manifest.labels
    assert sorted(read_rows(open_pairs(tmp_path / "again" / "data", "train"))) == sorted(rows)


def test_files_are_resized_and_unreadable_ones_counted(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    write_image_folder(tmp_path / "images", size=16)
    (tmp_path / "images" / "2" / "zz.png").write_bytes(b"no image")
    manifest = prepare(tmp_path, tmp_path / "images")
    assert set(open_pairs(tmp_path / "data", "train").sources.lengths.tolist()) == {64}
    # of both splits
    assert [(one.documents_in, one.documents_out) for one in manifest.funnel] == [(26, 24)]
    assert sum(file.rows for file in manifest.dropped.files) == 2


def test_a_second_run_reuses_the_first(tmp_path: Path) -> None:
    write_images(tmp_path / "images.npz")
    first = prepare(tmp_path, tmp_path / "images.npz")
    file = tmp_path / "data" / "tokens" / "train-00000.arrow"
    written = file.stat().st_mtime_ns
    assert prepare(tmp_path, tmp_path / "images.npz") == first
    assert file.stat().st_mtime_ns == written


def test_inputs_of_another_form_are_rejected(tmp_path: Path) -> None:
    write_images(tmp_path / "images.npz")
    np.savez(tmp_path / "floats.npz", images=np.zeros((2, 8, 8)), labels=np.zeros(2))
    np.savez(tmp_path / "bare.npz", images=np.zeros((2, 8, 8), np.uint8))
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts" / "a").mkdir(parents=True)
    (tmp_path / "texts" / "a" / "one.txt").write_text("text")
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "images.npz",
            {"image_size": 16},
            "images of \\(8, 8, 1\\) pixels, but data.image_size=16",
        ),
        ("images.npz", {"labels": ["2", "7"]}, "has the label '10', but the labels are 2, 7"),
        (
            "images.npz",
            {"heldout_inputs": []},
            "data.heldout_inputs is empty. Name folders or files",
        ),
        ("floats.npz", {}, "Save uint8 images"),
        ("bare.npz", {}, "has no array 'labels"),
        ("none.npz", {}, "cannot be read as .npz"),
        ("empty", {}, "has no images. Give a folder with one subfolder"),
        ("texts", {}, "one.txt is none of .png"),
    ]
    for name, changes, message in cases:
        with pytest.raises(DataError, match=message):
            prepare(tmp_path, tmp_path / name, **changes)
