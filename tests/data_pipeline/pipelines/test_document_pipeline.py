"""Laws of preparation: the same bytes whoever works in whatever order, and only what changed is
done again.
"""

import json
import os
import re
import shutil
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.run import RunConfig
from llmsys.data_pipeline.inspection.verify_dataset import verify_dataset
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset, train_tokenizer
from llmsys.dataset.token_shards import load_manifest, read_batches, verify_checksums
from llmsys.errors import DataError
from llmsys.storage.folder_lock import lock_folder
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, make_crawl, read_packed_places


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_crawl(tmp_path_factory.mktemp("crawl"))


@pytest.fixture(scope="module")
def whole(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed dataset; tests copy it before they touch it."""
    folder = tmp_path_factory.mktemp("whole") / "data"
    prepare_dataset(build_tiny_config(folder, crawl))
    return folder


@pytest.fixture
def dataset(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "data")


def stages_run(folder: Path) -> list[str]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event["stage"] for event in map(json.loads, lines) if event["event"] == "stage"]


def test_the_dataset_is_whole_and_its_manifest_true(whole: Path, crawl: Path) -> None:
    manifest = verify_checksums(whole)
    assert {split: part.num_files for split, part in manifest.splits.items()} == {
        "train": 5,
        "heldout": 1,
    }
    kept = sum(file.rows for file in manifest.documents.files)
    assert kept == sum(part.documents for part in manifest.splits.values()) == 3 * 14
    assert manifest.read.records == 3 * 18
    assert set(manifest.languages) == {"en", "de"}
    assert sum(manifest.lengths.counts) == kept
    assert str(whole) not in (whole / "manifest.json").read_text()


def test_the_funnel_adds_up_and_its_examples_are_real(whole: Path) -> None:
    manifest = load_manifest(whole)
    stages = [
        "read",
        "extract",
        "language",
        "gopher_quality",
        "exact_duplicates",
        "near_duplicates",
    ]
    assert [stage.stage for stage in manifest.funnel] == stages
    for stage, following in zip(manifest.funnel, [*manifest.funnel[1:], None], strict=True):
        assert (
            stage.documents_in - sum(drop.documents for drop in stage.dropped)
            == stage.documents_out
        )
        if following and stage.stage != "read":
            assert (following.documents_in, following.bytes_in) == (
                stage.documents_out,
                stage.bytes_out,
            )
    counted = Counter(
        {
            (stage.stage, drop.test): drop.documents
            for stage in manifest.funnel
            for drop in stage.dropped
        }
    )
    assert counted == {
        ("language", "language"): 3,
        ("gopher_quality", "words"): 3,
        ("exact_duplicates", "same text"): 3,
        ("near_duplicates", "shares a bucket"): 3,
    }
    rows = [
        row
        for path in sorted((whole / "dropped").iterdir())
        for b in read_batches(path)
        for row in b.to_pylist()
    ]
    assert Counter((row["stage"], row["test"]) for row in rows) == counted
    reasons = {row["url"]: row["reason"] for row in rows}
    for stage in manifest.funnel:
        for drop in stage.dropped:
            assert len(drop.examples) == 3
            assert all(reasons[example.url] == example.reason for example in drop.examples)
    words = next(row for row in rows if row["rule"] == "gopher_quality")
    assert (words["value"], words["threshold"], words["text"]) == (4.0, 30.0, "Too short to stay.")


@pytest.mark.parametrize("workers", [1, 7])
def test_any_number_of_workers_gives_the_same_bytes(
    whole: Path, crawl: Path, tmp_path: Path, workers: int
) -> None:
    prepare_dataset(
        build_tiny_config(tmp_path / "data", crawl, executor={"kind": "local", "workers": workers})
    )
    assert hash_files(tmp_path / "data") == hash_files(whole)


def test_any_order_of_inputs_gives_the_same_bytes(crawl: Path, tmp_path: Path) -> None:
    names = [f"{crawl}/crawl-{i}.warc.gz" for i in range(3)]
    for name, inputs in (
        ("a", names),
        ("b", [names[2], f"{crawl}/./crawl-1.warc.gz", names[1], names[0]]),
    ):
        prepare_dataset(build_tiny_config(tmp_path / name, inputs))
    a, b = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in "ab")
    assert len(a["config"].pop("data")["inputs"]) == 3
    assert len(b["config"].pop("data")["inputs"]) == 4
    assert a | {"config_digest": "", "checksum": ""} == b | {"config_digest": "", "checksum": ""}
    assert {**hash_files(tmp_path / "a"), "manifest.json": ""} == {
        **hash_files(tmp_path / "b"),
        "manifest.json": "",
    }


def test_a_finished_dataset_is_left_alone(
    dataset: Path, crawl: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = {path: path.stat().st_mtime_ns for path in dataset.rglob("*.*") if path.is_file()}
    runs = len(stages_run(dataset))
    with caplog.at_level("INFO"):
        prepare_dataset(build_tiny_config(dataset, crawl))
    assert {path: path.stat().st_mtime_ns for path in before if path.name != ".lock"} == {
        path: time for path, time in before.items() if path.name != ".lock"
    }
    assert len(stages_run(dataset)) == runs
    assert "is up to date" in caplog.text


ALL = [
    "filter",
    "signatures",
    "exact_duplicates",
    "cluster",
    "near_duplicates",
    "collect",
    "thresholds",
    "tokenizer",
    "encode",
    "tokens",
    "token_index",
]
CHANGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"rules": [{"kind": "gopher_quality", "min_words": 3, "min_stop_words": 0}]}, ALL),
    ({"deduplicate": {"minhash": {"kind": "none"}}}, ["signatures", *ALL[5:]]),
    ({"split": {"heldout_fraction": 0.4}}, ALL[7:]),
    ({"tokens": {"shard_tokens": 9_000, "batch_tokens": 500}}, ALL[9:]),
    ({"documents": {"num_shards": 1}}, ALL[:-1]),  # the same token files
    # A rule that decides nothing new gives the same documents, so that nothing is done again but
    # what knows thresholds.
    ({"language": {"min_score": 0.66}}, ["filter", "thresholds"]),
    ({"name": "renamed"}, []),
]


@pytest.mark.parametrize(
    ("change", "redone"), CHANGES, ids=[next(iter(change)) for change, _ in CHANGES]
)
def test_a_changed_setting_redoes_what_depends_on_it(
    dataset: Path, crawl: Path, tmp_path: Path, change: dict[str, Any], redone: list[str]
) -> None:
    runs = len(stages_run(dataset))
    prepare_dataset(build_tiny_config(dataset, crawl, **change))
    found = stages_run(dataset)[runs:]
    assert found == redone
    prepare_dataset(build_tiny_config(tmp_path / "fresh", crawl, **change))
    assert hash_files(dataset) == hash_files(tmp_path / "fresh")


def test_a_changed_input_redoes_its_own_tasks_only(
    dataset: Path, crawl: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(crawl, tmp_path / "crawl")
    config = build_tiny_config(tmp_path / "data", other)
    prepare_dataset(config)
    make_crawl(tmp_path / "new", files=1, seed=9)
    shutil.copy(tmp_path / "new" / "crawl-0.warc.gz", other / "crawl-1.warc.gz")
    before = read_packed_places(tmp_path / "data", "extract")
    prepare_dataset(config)
    after = read_packed_places(tmp_path / "data", "extract")
    changed = [name for name, places in after.items() if places != before[name]]
    assert [name.split(".")[0] for name in changed] == ["crawl-1"]
    prepare_dataset(build_tiny_config(tmp_path / "fresh", other))
    assert hash_files(tmp_path / "data") == hash_files(tmp_path / "fresh")
    (other / "crawl-1.warc.gz").unlink()
    prepare_dataset(config)
    prepare_dataset(build_tiny_config(tmp_path / "fresh", other))
    assert hash_files(tmp_path / "data") == hash_files(tmp_path / "fresh")
    rows = sqlite3.connect(tmp_path / "data" / "journal" / "records.sqlite").execute(
        "select item from record"
    )
    assert not [item for (item,) in rows if b"crawl-1" in item]


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@pytest.mark.parametrize("room", ["documents", "tokens", "tokenizer"])
def test_a_damaged_file_is_made_again(
    dataset: Path, whole: Path, crawl: Path, room: str, damage: str
) -> None:
    path = sorted((dataset / room).iterdir())[0]
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "truncate":
        os.truncate(path, len(data) // 2)
    else:
        path.unlink()
    prepare_dataset(build_tiny_config(dataset, crawl))
    assert hash_files(dataset) == hash_files(whole)


def test_leftovers_of_killed_writers_and_other_settings_go(
    dataset: Path, whole: Path, crawl: Path
) -> None:
    (dataset / "tokens" / ".train-00000.arrow.123.tmp").write_bytes(b"half")
    (dataset / "tokens" / "train-00077.arrow").write_bytes(b"of another time")
    prepare_dataset(build_tiny_config(dataset, crawl))
    assert hash_files(dataset) == hash_files(whole)


def test_preparation_stops_where_it_is_told_and_goes_on_from_there(
    whole: Path, crawl: Path, tmp_path: Path
) -> None:
    config = build_tiny_config(tmp_path / "data", crawl)
    documents = prepare_dataset(config, until="documents")
    assert documents.splits == {}
    assert documents.tokenizer_fingerprint is None
    assert not (tmp_path / "data" / "tokens").exists()
    path = train_tokenizer(config)
    assert path == tmp_path / "data" / "tokenizer" / "tokenizer.model"
    assert (
        load_manifest(tmp_path / "data").tokenizer_fingerprint
        == load_manifest(whole).tokenizer_fingerprint
    )
    prepare_dataset(config)
    assert hash_files(tmp_path / "data") == hash_files(whole)
    assert prepare_dataset(config, until="documents").splits  # asking for less takes nothing away
    assert hash_files(tmp_path / "data") == hash_files(whole)


def test_unreadable_input_is_a_counted_skip(crawl: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(crawl, tmp_path / "crawl")
    data = (broken / "crawl-1.warc.gz").read_bytes()
    (broken / "crawl-1.warc.gz").write_bytes(data[: len(data) // 2])
    (broken / "crawl-2.warc.gz").write_bytes(b"this is no WARC file at all")
    (broken / "crawl-3.warc.gz").symlink_to("/nowhere/at/all")
    (broken / "crawl-4.warc.gz").write_bytes(b"")
    manifest = prepare_dataset(build_tiny_config(tmp_path / "data", broken))
    skipped = {Path(skip.file).name: skip for skip in manifest.read.skipped}
    assert {"crawl-1.warc.gz", "crawl-2.warc.gz", "crawl-3.warc.gz"} <= set(skipped)
    assert "No such file" in skipped["crawl-3.warc.gz"].reason
    assert 0 < skipped["crawl-1.warc.gz"].offset <= len(data) // 2
    assert sum(file.rows for file in manifest.documents.files) > 14


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ([], r"data\.inputs is empty\. Name crawl files"),
        (["{crawl}/*.warc.zst"], r"no file matches '.*/\*\.warc\.zst' .* Correct the pattern"),
        (["{crawl}/*.gz", "nowhere.warc.gz"], r"no file matches 'nowhere\.warc\.gz'"),
        (["{crawl}"], r"is a folder, not a file\. Give the files in it: '.*/\*\.warc\.gz'"),
    ],
)
def test_inputs_that_are_not_there_are_named(
    crawl: Path, tmp_path: Path, inputs: list[str], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        prepare_dataset(
            build_tiny_config(
                tmp_path / "data", [pattern.format(crawl=crawl) for pattern in inputs]
            )
        )
    assert not (tmp_path / "data").exists()


def test_a_dataset_without_documents_says_what_dropped_them(crawl: Path, tmp_path: Path) -> None:
    config = build_tiny_config(
        tmp_path / "data", crawl, rules=[{"kind": "gopher_quality", "min_words": 5_000}]
    )
    with pytest.raises(
        DataError,
        match=r"no document is left of 54 pages in 3 files: 51 by gopher_quality \(words\), 3",
    ):
        prepare_dataset(config)
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_vocabulary_that_cannot_be_trained_is_one_message(dataset: Path, crawl: Path) -> None:
    config = build_tiny_config(dataset, crawl)
    large = config.model_copy(
        update={"tokenizer": config.tokenizer.model_copy(update={"vocab_size": 9_000})}
    )
    with pytest.raises(
        DataError,
        match=r"tokenizer\.vocab_size=9000 cannot be trained on \d+ documents .* Choose another "
        r"tokenizer",
    ):
        prepare_dataset(large)
    assert verify_dataset(dataset, 4).findings == []


def test_an_existing_tokenizer_is_copied_into_the_dataset(
    dataset: Path, crawl: Path, tmp_path: Path
) -> None:
    config = build_tiny_config(tmp_path / "data", crawl).model_dump()
    own = RunConfig.model_validate(
        {
            "data": config["data"],
            "tokenizer": {"kind": "file", "path": dataset / "tokenizer" / "tokenizer.model"},
        }
    )
    manifest = prepare_dataset(own)
    assert manifest.tokenizer_fingerprint == load_manifest(dataset).tokenizer_fingerprint
    assert manifest.splits == load_manifest(dataset).splits
    missing = own.model_copy(
        update={"tokenizer": own.tokenizer.model_copy(update={"path": tmp_path / "none.model"})}
    )
    with pytest.raises(DataError, match=r"none\.model cannot be read"):
        prepare_dataset(missing)
    folder = own.model_copy(
        update={"tokenizer": own.tokenizer.model_copy(update={"path": dataset / "tokenizer"})}
    )
    assert prepare_dataset(folder).splits == manifest.splits


def test_a_missing_tokenizer_is_said_before_the_crawl_is_read(crawl: Path, tmp_path: Path) -> None:
    config = build_tiny_config(tmp_path / "data", crawl).model_dump() | {
        "tokenizer": {"kind": "file", "path": "none.model"}
    }
    with pytest.raises(DataError, match=r"none\.model cannot be read"):
        prepare_dataset(RunConfig.model_validate(config))
    assert not (tmp_path / "data").exists()


def test_a_file_where_the_folder_should_be_is_named(crawl: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("mine")
    with pytest.raises(
        DataError, match=r"data is not a writable folder: File exists\. Use another folder"
    ):
        prepare_dataset(build_tiny_config(tmp_path / "data", crawl))
    assert (tmp_path / "data").read_text() == "mine"


def test_two_commands_do_not_write_one_folder(dataset: Path) -> None:
    text = (
        rf"is being written by process {os.getpid()}, and two commands cannot .* end it \(kill "
        rf"{os.getpid()}\)"
    )
    with (
        lock_folder(dataset),
        pytest.raises(DataError, match=text),
        lock_folder(dataset, wait_seconds=0.1),
    ):
        pass
    with lock_folder(dataset, wait_seconds=0):
        pass


def test_a_full_disk_is_one_message_and_the_next_run_goes_on(
    whole: Path, crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    fsync, synced = os.fsync, []

    def full(handle: int) -> None:
        synced.append(handle)
        if len(synced) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DataError, match="No space left on device"):
            prepare_dataset(build_tiny_config(tmp_path / "data", crawl))
    assert not (tmp_path / "data" / "manifest.json").exists()
    assert not list((tmp_path / "data").rglob("*.tmp"))
    prepare_dataset(build_tiny_config(tmp_path / "data", crawl))
    assert hash_files(tmp_path / "data") == hash_files(whole)


def test_each_place_that_could_not_be_read_is_named_among_what_was_dropped(tmp_path: Path) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=1)
    path = crawl / "crawl-0.warc.gz"
    content = bytearray(path.read_bytes())
    starts = [match.start() for match in re.finditer(rb"\x1f\x8b\x08", content)]
    for start in (starts[3], starts[6]):
        content[start + 40 : start + 60] = b"\xff" * 20
    path.write_bytes(content)
    manifest = prepare_dataset(build_tiny_config(tmp_path / "data", crawl), until="documents")
    files = [tmp_path / "data" / "dropped" / file.name for file in manifest.dropped.files]
    dropped = [row for file in files for batch in read_batches(file) for row in batch.to_pylist()]
    unread = [row for row in dropped if row["stage"] == "read"]
    assert [(row["file"], row["offset"]) for row in unread] == [
        (str(path), starts[3]),
        (str(path), starts[6]),
    ]
    assert all(row["reason"].startswith("damaged gzip member: ") for row in unread)
    assert sum(skip.count for skip in manifest.read.skipped) == 2
