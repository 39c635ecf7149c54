"""Laws of a changed rerun: the published dataset stays whole until the next one is, whenever the
rerun ends.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest

from llmsys.config.run import RunConfig
from llmsys.data_pipeline.core.staging import STAGING
from llmsys.data_pipeline.inspection.verify_dataset import verify_dataset
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.manifest import MANIFEST_NAME, load_manifest
from llmsys.dataset.token_shards import open_tokens
from llmsys.errors import DataError
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, make_crawl


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_crawl(tmp_path_factory.mktemp("crawl"), files=1)


@pytest.fixture(scope="module")
def published(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published") / "data"
    prepare_dataset(build_tiny_config(folder, crawl))
    return folder


@pytest.fixture(scope="module")
def changed(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of the changed config, made from nothing."""
    folder = tmp_path_factory.mktemp("changed") / "data"
    prepare_dataset(change(folder, crawl))
    return folder


def change(folder: Path, crawl: Path, vocab_size: int = 300) -> RunConfig:
    """Another threshold, other shards and another tokenizer: no file stays what it was."""
    config = build_tiny_config(
        folder,
        crawl,
        rules=[{"kind": "gopher_quality", "min_words": 175}],
        documents={"num_shards": 1},
    )
    return config.model_copy(
        update={"tokenizer": config.tokenizer.model_copy(update={"vocab_size": vocab_size})}
    )


def stop(*_: Any, **__: Any) -> Any:
    raise DataError("stopped here.")


@pytest.mark.parametrize(
    "where",
    [
        "llmsys.data_pipeline.tokenize.train_sentencepiece.train_document_tokenizer",
        "llmsys.data_pipeline.pipelines.build_manifest._compute_usage",
        "encode_file",
    ],
)
def test_an_interrupted_change_leaves_the_published_dataset_whole(
    published: Path,
    changed: Path,
    crawl: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "data"))
    before = hash_files(folder)
    names = {
        "llmsys.data_pipeline.tokenize.train_sentencepiece.train_document_tokenizer": (
            "llmsys.data_pipeline.pipelines.output_stages.train_document_tokenizer"
        ),
        "encode_file": "llmsys.data_pipeline.pipelines.output_stages.encode_file",
    }
    with monkeypatch.context() as patch:
        patch.setattr(names.get(where, where), stop)
        with pytest.raises(DataError, match=r"stopped here\."):
            prepare_dataset(change(folder, crawl))
    assert verify_dataset(folder, 8).findings == []
    assert open_tokens(folder, "train").fingerprint == load_manifest(published).fingerprint
    now = hash_files(folder)
    assert {
        name for name in before if not name.startswith("work/") and now.get(name) != before[name]
    } == set()
    prepare_dataset(change(folder, crawl))
    assert hash_files(folder) == hash_files(changed)
    assert not (folder / STAGING).exists()


def test_who_goes_back_after_an_interrupted_change_has_the_old_dataset(
    published: Path, crawl: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "data"))
    with pytest.raises(DataError, match="cannot be trained"):
        prepare_dataset(change(folder, crawl, vocab_size=9_000))
    prepare_dataset(build_tiny_config(folder, crawl))
    assert hash_files(folder) == hash_files(published)
    assert not (folder / STAGING).exists()


def test_a_publication_that_ends_between_two_files_is_finished_by_the_next_run(
    published: Path, changed: Path, crawl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "data"))
    move, moved = shutil.move, []

    def once(source: Path, target: Path) -> Any:
        moved.append(source)
        if len(moved) > 2:
            stop()
        return move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "move", once)
        with pytest.raises(DataError, match="stopped here"):
            prepare_dataset(change(folder, crawl))
    assert not (folder / MANIFEST_NAME).exists()
    prepare_dataset(change(folder, crawl))
    assert hash_files(folder) == hash_files(changed)


def test_a_staged_file_that_no_record_knows_is_not_used(
    published: Path, crawl: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(published, tmp_path / "data"))
    (name,) = [entry.name for entry in load_manifest(folder).documents.files[:1]]
    (folder / STAGING / "documents").mkdir(parents=True)
    (folder / STAGING / "documents" / name).write_bytes(
        b"written by a task that was killed before its record"
    )
    prepare_dataset(build_tiny_config(folder, crawl))
    assert hash_files(folder) == hash_files(published)
    assert not (folder / STAGING).exists()
