"""Laws of tokens for other trainers: each format has the ids of every document, as its own
library reads it.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.convert.token_formats import convert_tokens
from llmsys.data_pipeline.inspection.verify_dataset import verify_dataset
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.token_shards import open_tokens
from llmsys.errors import ConfigError, DataError
from llmsys.launch.main import main
from tests.helpers.tiny_crawl import build_tiny_config, make_crawl


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    prepare_dataset(
        build_tiny_config(folder / "data", make_crawl(folder / "crawl", files=2, pages=8))
    )
    return folder / "data"


def list_documents(folder: Path, split: str) -> list[tuple[str, list[int]]]:
    shards = open_tokens(folder, split)
    return [
        (str(shards.get_lineage(number)["id"]), shards.get_tokens(number).tolist())
        for number in range(shards.num_documents)
    ]


def read_mds(folder: Path) -> list[tuple[str, list[int]]]:
    """Read a split as streaming's reader does: offsets, sizes of the columns, shape and values
    of an array.
    """
    found = []
    for shard in json.loads((folder / "index.json").read_text())["shards"]:
        assert (shard["format"], shard["version"], shard["column_encodings"][1]) == (
            "mds",
            2,
            "ndarray:uint16",
        )
        data = (folder / shard["raw_data"]["basename"]).read_bytes()
        assert len(data) == shard["raw_data"]["bytes"]
        for number in range(shard["samples"]):
            begin, end = np.frombuffer(data, np.uint32, 2, (1 + number) * 4).tolist()
            sample = data[begin:end]
            first, second = struct.unpack_from("<II", sample)
            name, array = sample[8 : 8 + first], sample[8 + first :]
            assert len(array) == second
            axes, width = array[0] >> 2, 1 << (array[0] & 3)
            (length,) = np.frombuffer(array, f"<u{width}", axes, 1).tolist()
            values = np.frombuffer(array, np.uint16, -1, 1 + axes * width)
            assert len(values) == length
            found.append((name.decode(), values.tolist()))
    return found


def test_nanogpt_and_mds_hold_every_document_in_order(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["convert", str(dataset), str(tmp_path / "nano"), "--tokens", "nanogpt"]) == 0
    monkeypatch.setattr("llmsys.convert.token_formats._MdsWriter._SHARD_BYTES", 4_000)
    convert_tokens(dataset, tmp_path / "mds", "mds")
    for split, name in (("train", "train"), ("heldout", "val")):
        documents = list_documents(dataset, split)
        ids = np.fromfile(tmp_path / "nano" / f"{name}.bin", np.uint16).tolist()
        assert ids == [token for _, tokens in documents for token in tokens]
        assert read_mds(tmp_path / "mds" / name) == documents
    assert len(list((tmp_path / "mds" / "train").glob("*.mds"))) > 1
    assert (tmp_path / "nano" / "tokenizer" / "tokenizer.model").is_file()
    with pytest.raises(ConfigError, match="exists already"):
        convert_tokens(dataset, tmp_path / "nano", "megatron")


def build_tokens_config(folder: Path, dataset: Path, **data: Any) -> RunConfig:
    section = {"kind": "tokens", "folder": folder, "executor": {"kind": "inline"}} | data
    tokenizer = {"kind": "file", "path": dataset / "tokenizer"}
    return RunConfig.model_validate({"data": section, "tokenizer": tokenizer})


def test_megatrons_files_become_a_dataset_of_the_same_documents(
    dataset: Path, tmp_path: Path
) -> None:
    made = convert_tokens(dataset, tmp_path / "megatron", "megatron")
    config = build_tokens_config(
        tmp_path / "data",
        dataset,
        inputs=[made / "train.idx"],
        heldout_inputs=[made / "heldout.idx"],
    )
    manifest = prepare_dataset(config)
    for split in ("train", "heldout"):
        documents, again = (sorted(tokens for _, tokens in list_documents(one, split))
                            for one in (dataset, tmp_path / "data"))  # fmt: skip
        assert again == documents
        # what bits per byte are counted over
        assert (
            open_tokens(tmp_path / "data", split).num_text_bytes
            == open_tokens(dataset, split).num_text_bytes
        )
    assert verify_dataset(tmp_path / "data", 4).findings == []
    assert prepare_dataset(config) == manifest


def write_megatron(
    prefix: Path, sequences: list[list[int]], borders: list[int], dtype: str, code: int
) -> Path:
    """Write an index as Megatron does, with documents of several sequences."""
    lengths = np.array([len(one) for one in sequences], np.int32)
    offsets = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    prefix.with_suffix(".bin").write_bytes(np.concatenate(sequences).astype(dtype).tobytes())
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(borders))
    arrays = (lengths, offsets.astype(np.int64), np.array(borders, np.int64))
    prefix.with_suffix(".idx").write_bytes(head + b"".join(array.tobytes() for array in arrays))
    return prefix.with_suffix(".idx")


def test_documents_of_several_sequences_are_joined_and_ended(dataset: Path, tmp_path: Path) -> None:
    sequences = [[5, 6], [7], [], [9, 2], [8]]
    index = write_megatron(tmp_path / "few", sequences, [0, 2, 3, 4, 5], "<i4", 4)
    manifest = prepare_dataset(
        build_tokens_config(
            tmp_path / "data", dataset, inputs=[index], split={"heldout_fraction": 0}
        )
    )
    end = open_tokens(dataset, "train").get_tokens(0)[-1]
    assert end == 2
    found = sorted(tokens for _, tokens in list_documents(tmp_path / "data", "train"))
    assert found == [[5, 6, 7, 2], [8, 2], [9, 2]]
    assert [(drop.test, drop.documents) for drop in manifest.funnel[0].dropped] == [
        ("no tokens", 1)
    ]


def test_wrong_files_are_named_before_a_dataset_is_made(dataset: Path, tmp_path: Path) -> None:
    def prepare(path: Path) -> None:
        prepare_dataset(build_tokens_config(tmp_path / "data", dataset, inputs=[path]))

    index = write_megatron(tmp_path / "wide", [[5, 70_000]], [0, 1], "<i4", 4)
    with pytest.raises(
        DataError, match=r"wide\.idx: document 0 has the id 70000, and the tokenizer has 400"
    ):
        prepare(index)
    with pytest.raises(
        DataError, match=r"none\.idx cannot be read: No such file or directory\. Name index files"
    ):
        prepare(tmp_path / "none.idx")
    with pytest.raises(DataError, match=r"wide\.bin is no index of Megatron-LM"):
        prepare(index.with_suffix(".bin"))
    index.with_suffix(".bin").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"wide\.bin has 0 bytes, and its index names 8\. Copy both again"
    ):
        prepare(index)
    with pytest.raises(
        ConfigError,
        match=r"tokenizer\.kind: sentencepiece is trained on text, and data\.kind=tokens",
    ):
        load_run_config("train/demo", ["data.kind=tokens"])
