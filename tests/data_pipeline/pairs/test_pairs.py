"""Laws of pairs: rows stay in step, what is dropped says why, and workers change no byte."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.run import RunConfig
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import Manifest
from llmsys.dataset.token_shards import open_tokens, verify_checksums
from llmsys.errors import DataError
from llmsys.vocabulary.tokenizer import load_tokenizer
from tests.helpers.tiny_pairs import build_sentence_pairs, write_pairs, write_pairs_config


def with_data(config: RunConfig, **changes: Any) -> RunConfig:
    data = config.data.model_dump() | changes
    return RunConfig.model_validate({"data": data, "tokenizer": config.tokenizer})


def drops(manifest: Manifest) -> dict[str, int]:
    return {drop.test: drop.documents for stage in manifest.funnel for drop in stage.dropped}


def test_source_and_target_rows_translate_each_other(tmp_path: Path) -> None:
    config = write_pairs_config(tmp_path, shard_pairs=100)
    manifest = prepare_dataset(config)
    assert verify_checksums(config.data.folder) == manifest
    tokenizer = load_tokenizer(config.data.folder / "tokenizer")
    for split, pairs in (
        ("train", build_sentence_pairs(300, seed=1)),
        ("heldout", build_sentence_pairs(30, seed=2)),
    ):
        targets, sources = (
            open_tokens(config.data.folder, split),
            open_tokens(config.data.folder, f"{split}_source"),
        )
        for row, (source, target) in enumerate(pairs):
            assert tokenizer.decode(sources.get_tokens(row).tolist()) == source
            assert tokenizer.decode(targets.get_tokens(row).tolist()) == target
            assert targets.get_tokens(row)[-1] == sources.get_tokens(row)[-1] == tokenizer.eos_id
            assert targets.get_lineage(row)["offset"] == row + 1
            assert targets.get_lineage(row)["id"] == sources.get_lineage(row)["id"]


def test_workers_compression_and_crashes_change_no_byte(tmp_path: Path) -> None:
    config = write_pairs_config(tmp_path, pairs=25_000, shard_pairs=10_000)
    whole = prepare_dataset(config)
    assert len(whole.splits["train"].files) == 3
    pool = with_data(config, folder=tmp_path / "pool", executor={"kind": "local", "workers": 2})
    assert prepare_dataset(pool) == whole
    (tmp_path / "pool" / "tokens" / "train-00001.arrow").unlink()
    assert prepare_dataset(pool) == whole
    for name in ("tokens", "documents", "tokenizer", "dropped"):
        for path in (config.data.folder / name).iterdir():
            assert (tmp_path / "pool" / name / path.name).read_bytes() == path.read_bytes()
    source, target = write_pairs(
        tmp_path / "gz", "train", build_sentence_pairs(25_000, seed=1), compress=True
    )
    packed = prepare_dataset(
        with_data(config, folder=tmp_path / "packed", source=[source], target=[target])
    )
    assert packed.splits["train"].tokens == whole.splits["train"].tokens


def test_a_second_run_has_nothing_to_do(tmp_path: Path) -> None:
    config = write_pairs_config(tmp_path)
    prepare_dataset(config)
    manifest = config.data.folder / "manifest.json"
    before = manifest.stat().st_mtime_ns
    prepare_dataset(config)
    assert manifest.stat().st_mtime_ns == before


def test_lines_that_cannot_be_used_are_dropped_and_counted(tmp_path: Path) -> None:
    config = write_pairs_config(tmp_path)
    good = build_sentence_pairs(50, seed=5)
    lines = [(s.encode(), t.encode()) for s, t in good]
    lines[3:3] = [(b"", b"katze"), (b"cat", b"  "), (b"c\xfft", b"katze"), (b"cat", b"ka\xc3")]
    lines.append((b"cat " * 300, b"katze"))
    for place, path in enumerate((config.data.source[0], config.data.target[0])):
        path.write_bytes(b"\n".join(line[place] for line in lines))  # no newline at the end
    manifest = prepare_dataset(config)
    assert drops(manifest) == {
        "source_empty": 1, "target_empty": 1, "source_not_utf8": 1, "target_not_utf8": 1,
        "source_tokens": 1,
    }  # fmt: skip
    assert manifest.splits["train"].documents == manifest.splits["train_source"].documents == 50
    examples = {drop.test: drop.examples[0] for stage in manifest.funnel for drop in stage.dropped}
    assert examples["source_tokens"].threshold == 256
    assert examples["source_tokens"].value > 256
    assert examples["source_not_utf8"].reason == "the source is not UTF-8: byte 1 is 0xff"
    assert examples["target_empty"].url.endswith("train.en:5")
    targets = open_tokens(config.data.folder, "train")
    tokenizer = load_tokenizer(config.data.folder / "tokenizer")
    assert [tokenizer.decode(targets.get_tokens(row).tolist()) for row in range(50)] == [
        target for _, target in good
    ]


def test_no_heldout_pair_is_dropped_for_its_length(tmp_path: Path) -> None:
    manifest = prepare_dataset(write_pairs_config(tmp_path, max_tokens=8))
    assert drops(manifest)["target_tokens"] + drops(manifest).get("source_tokens", 0) > 0
    assert manifest.splits["heldout"].documents == 30


def test_files_out_of_step_are_refused_with_both_counts(tmp_path: Path) -> None:
    config = write_pairs_config(tmp_path)
    with config.data.target[0].open("ab") as file:
        file.write(b"eine zeile mehr\n")
    with pytest.raises(
        DataError, match=r"train.en has 300 lines and .*train.de has 301: .* after line 300"
    ):
        prepare_dataset(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ["nowhere.en"]}, r"nowhere.en cannot be read: No such file"),
        ({"source": [], "target": []}, r"data.source is empty. Name files"),
        ({"heldout_source": [], "heldout_target": []}, r"data.heldout_source is empty. Name files"),
        ({"max_tokens": 2}, r"every training pair is longer than data.max_tokens=2"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = with_data(write_pairs_config(tmp_path), **changes)
    with pytest.raises(DataError, match=message):
        prepare_dataset(config)


def test_a_cut_gzip_file_is_named(tmp_path: Path) -> None:
    config = write_pairs_config(tmp_path)
    source, target = write_pairs(
        tmp_path / "gz", "train", build_sentence_pairs(500, seed=1), compress=True
    )
    source.write_bytes(source.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train.en.gz cannot be read: .*end-of-stream"):
        prepare_dataset(with_data(config, source=[source], target=[target]))


def labelled(tmp_path: Path, suffix: str, **data: Any) -> RunConfig:
    rows = [
        ("good" if place % 3 else "bad", source)
        for place, (source, _) in enumerate(build_sentence_pairs(200, seed=1))
    ]
    if suffix.startswith(".tsv"):
        text = "".join(f"{label}\t{body}\n" for label, body in rows)
    else:
        text = "".join(json.dumps({"label": label, "text": body}) + "\n" for label, body in rows)
    path = tmp_path / f"texts{suffix}"
    path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    section = {
        "kind": "labelled", "folder": tmp_path / f"data{suffix}", "executor": {"kind": "inline"},
        "inputs": [path], "heldout_inputs": [path],
    }  # fmt: skip
    return RunConfig.model_validate(
        {"data": section | data, "tokenizer": {"kind": "sentencepiece", "vocab_size": 310}}
    )


def test_labelled_texts_say_the_same_in_every_format(tmp_path: Path) -> None:
    configs = [labelled(tmp_path, suffix) for suffix in (".tsv", ".jsonl", ".tsv.gz")]
    manifests = [prepare_dataset(config) for config in configs]
    assert [manifest.labels for manifest in manifests] == [("bad", "good")] * 3
    for config in configs:
        labels = open_tokens(config.data.folder, "train")
        assert [labels.get_tokens(row).tolist() for row in range(6)] == [
            [0],
            [1],
            [1],
            [0],
            [1],
            [1],
        ]
        texts = open_tokens(config.data.folder, "train_source")
        tokenizer = load_tokenizer(config.data.folder / "tokenizer")
        assert (
            tokenizer.decode(texts.get_tokens(0).tolist())
            == build_sentence_pairs(200, seed=1)[0][0]
        )


def test_long_texts_are_cut_and_keep_their_end(tmp_path: Path) -> None:
    config = labelled(tmp_path, ".tsv", max_tokens=4)
    manifest = prepare_dataset(config)
    texts = open_tokens(config.data.folder, "train_source")
    assert texts.lengths.max() == 4
    assert len({int(texts.get_tokens(row)[-1]) for row in range(texts.num_documents)}) == 1
    assert manifest.splits["train"].documents == 200


def test_an_unknown_label_and_an_unknown_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"train texts have the label 'good', but the labels are bad, ugly"
    ):
        prepare_dataset(labelled(tmp_path, ".tsv", labels=["bad", "ugly"]))
    with pytest.raises(
        DataError, match=re.escape("are read from .tsv and .jsonl, not from '.txt'")
    ):
        prepare_dataset(labelled(tmp_path, ".txt"))


def test_a_source_without_a_target_file_is_refused_by_the_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"1 target files for 2 source files\. Give one for each"):
        write_pairs_config(tmp_path, source=["a", "b"])
