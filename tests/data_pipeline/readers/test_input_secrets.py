"""Laws of inputs whose address holds a secret: they are read, and no file of the dataset has the
secret.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

import llmsys.data_pipeline.readers.input_stream as source_module
from llmsys.config.executor import SlurmExecutorConfig
from llmsys.data_pipeline.executors.base import try_job
from llmsys.data_pipeline.executors.slurm import SlurmExecutor
from llmsys.data_pipeline.graph.quarantine import read_quarantine
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.input_files import find_inputs
from llmsys.dataset.token_shards import read_batches
from llmsys.errors import DataError
from tests.helpers import fake_slurm
from tests.helpers.failing_tasks import count
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, make_crawl

PLACE = "memory://me:hush@host/x"
ANSWER = f"403 for {PLACE}/a?sig=hush"


@pytest.fixture
def memory() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def refuse(report: Any) -> dict[str, Any]:
    raise RuntimeError(ANSWER)


def test_no_file_of_a_dataset_has_the_secret_of_its_inputs(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    crawl = make_crawl(tmp_path / "crawl", files=2, pages=6)
    for path in sorted(crawl.iterdir()):
        memory.pipe(f"/me:hush@host/x/{path.name}", path.read_bytes())
    last = path.name
    inputs = [f"{PLACE}/{path.name}" for path in sorted(crawl.iterdir())]
    remote = source_module._RemoteFile

    def open_remote(url: str, **options: int) -> Any:
        if url.endswith(last):
            raise RuntimeError(f"403 for {url}?sig=hush")
        return remote(url, **options)

    monkeypatch.setattr(source_module, "_RemoteFile", open_remote)
    monkeypatch.setattr(source_module, "sleep", lambda seconds: None)
    executor = {"kind": "inline", "max_attempts": 1}
    config = build_tiny_config(
        tmp_path / "data", inputs, documents={"num_shards": 1}, executor=executor
    )
    manifest = prepare_dataset(config, until="documents")
    names = {name for path in (tmp_path / "data").rglob("*.arrow") for name in files_named(path)}
    assert any("memory://REDACTED@host/x/" in name for name in names)
    assert [name for name in names if "hush" in name] == []
    written = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert [path for path in written if b"hush" in path.read_bytes()] == []
    redacted = [f"memory://REDACTED@host/x/{path.name}" for path in sorted(crawl.iterdir())]
    assert manifest.config["data"]["inputs"] == redacted
    assert [skip.file for skip in manifest.read.skipped] == [f"memory://REDACTED@host/x/{last}"]
    assert "403 for memory://REDACTED@host/x/" in manifest.read.skipped[0].reason
    assert "hush" not in str(read_quarantine(tmp_path / "data"))


def files_named(path: Path) -> set[str]:
    """What an Arrow file says about where its rows came from, and why."""
    found: set[str] = set()
    for batch in read_batches(path):
        for column in {"file", "reason", "test"} & set(batch.schema.names):
            found.update(str(value) for value in batch.column(column).to_pylist())
    return found


def test_a_failed_try_tells_no_secret() -> None:
    failed = try_job(0, refuse, lambda amount, dropped: None)
    assert "403 for memory://REDACTED@host/x/a?sig=REDACTED" in str(failed)
    assert "hush" not in str(failed)


def test_an_address_without_its_secret_is_not_taken_for_an_input() -> None:
    with pytest.raises(
        DataError,
        match=r"data.inputs: 'https://REDACTED@host/a.gz' comes from the stored config .* Give the",
    ):
        find_inputs(["https://REDACTED@host/a.gz"])


def test_jobs_of_slurm_are_for_their_owner_alone_and_their_folder_may_have_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in fake_slurm.install(tmp_path / "fake").items():
        monkeypatch.setenv(name, value)
    config = SlurmExecutorConfig(poll_seconds=0.1, jobs_per_task=2)
    folder = tmp_path / "my data" / "slurm"
    arrays = SlurmExecutor(config, folder)
    arrays._submit_array([(0, count_one)], 0)
    files = [path for path in folder.rglob("*") if path.suffix in (".job", ".sh")]
    assert len(files) == 2
    assert {path.name for path in [folder / "0", *files] if path.stat().st_mode & 0o077} == set()
    arrays.close()
    crawl = make_crawl(tmp_path / "a crawl", files=1, pages=6)
    plain = {"rules": [], "deduplicate": {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}}
    prepare_dataset(
        build_tiny_config(tmp_path / "my data", crawl, executor=config.model_dump(), **plain),
        until="documents",
    )
    prepare_dataset(build_tiny_config(tmp_path / "here", crawl, **plain), until="documents")
    assert hash_files(tmp_path / "my data") == hash_files(tmp_path / "here")


def count_one(report: Any) -> dict[str, Any]:
    return count(1, report)
