"""Laws of little room: a full disk ends with a clear error and nothing half-published, and
memory does not grow.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from llmsys.config.run import RunConfig
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.dataset.token_shards import ArrowFileWriter
from llmsys.errors import DataError
from llmsys.storage.pack_files import PackWriter
from tests.helpers.paths import ROOT
from tests.helpers.tiny_crawl import build_tiny_config, hash_files, make_crawl

PREPARE = """
import resource, sys
from pathlib import Path
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.errors import DataError
from tests.data_pipeline.pipelines.test_disk_and_memory_limits import plain_config
folder, crawl, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
try:
    prepare_dataset(plain_config(folder, crawl), until="documents")
except DataError as error:
    print(error)
    sys.exit(2)
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak) * 1024)  # rusage would begin with the peak of the process that started this one
"""


def plain_config(folder: Path, crawl: str) -> RunConfig:
    plain = {"rules": [], "deduplicate": {"exact": {"kind": "text"}, "minhash": {"kind": "none"}}}
    return build_tiny_config(
        folder, [crawl], documents={"num_shards": 2, "batch_bytes": 300_000}, **plain
    )


def run(folder: Path, crawl: str, limit: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PREPARE, str(folder), crawl, str(limit)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_half_published(tmp_path: Path) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=2, pages=20)
    pattern = f"{crawl}/*"
    prepare_dataset(plain_config(tmp_path / "whole", pattern), until="documents")
    # only the last stage is left to do
    late = shutil.copytree(tmp_path / "whole", tmp_path / "late")
    largest = max(path.stat().st_size for path in (late / "documents").iterdir())
    shutil.rmtree(late / "documents")
    # The journal is the first file to reach the limit.
    text = (
        "records.sqlite could not be read or written: disk I/O error. Free space or repair the "
        "folder"
    )
    for folder, limit in ((tmp_path / "early", 700), (late, largest - 1)):
        full = run(folder, pattern, limit)
        assert full.returncode == 2, full.stderr
        assert text in full.stdout
        assert "again to continue" in full.stdout
        # what it names is as it was before
        assert (folder / "manifest.json").exists() == (folder == late)
        assert not list(folder.rglob(".*.tmp"))
        assert not list(folder.glob("quarantine/*"))
        prepare_dataset(plain_config(folder, pattern), until="documents")
        assert hash_files(folder) == hash_files(tmp_path / "whole")


WRITERS = [
    *("work/extracted.packs/*", "work/unread.packs/*", "work/filtered.packs/*"),
    *("work/filtered.dropped.packs/*", "work/signatures.minhash.packs/*"),
    *("documents/*.arrow", "dropped/*", "documents/*.parquet", "documents/*.jsonl.zst"),
    *("tokenizer/*", "work/encoded/*", "tokens/*", "manifest.json"),
]


def test_a_disk_that_fills_up_at_any_writer_is_named_and_the_next_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crawl = make_crawl(tmp_path / "crawl", files=1, pages=8)
    whole, data = (
        build_tiny_config(
            tmp_path / name,
            crawl,
            documents={"num_shards": 1, "export_formats": ["parquet", "jsonl.zst"]},
        )
        for name in ("whole", "data")
    )
    prepare_dataset(whole)
    folder, replace, write = tmp_path / "data", os.replace, PackWriter.write
    for pattern in WRITERS:
        # Made by the run that failed at another file of this stage.
        for made in folder.glob(pattern):
            shutil.rmtree(made) if made.is_dir() else made.unlink()

        def full(source: Any, target: Any, pattern: str = pattern) -> None:
            if Path(target).relative_to(folder).match(pattern):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(source, target)

        def full_pack(writer: Any, data: bytes, pattern: str = pattern) -> int:
            if writer._path.relative_to(folder).match(pattern):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(writer, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            patch.setattr(PackWriter, "write", full_pack)
            with pytest.raises(
                DataError,
                match=rf"{folder}/.* could not be written: No space left.* again to continue",
            ):
                prepare_dataset(data)
        assert not (folder / "manifest.json").exists()
        assert not [*folder.rglob("*.tmp"), *folder.glob("quarantine/*")]
    prepare_dataset(data)
    assert hash_files(folder) == hash_files(tmp_path / "whole")


def test_a_disk_that_refuses_the_first_byte_of_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pa.ipc, "new_file", full)
    writer = ArrowFileWriter(tmp_path / "x.arrow", pa.schema([("a", pa.int64())]))
    with (
        pytest.raises(DataError, match=r"x\.arrow could not be written: No space left on device"),
        writer,
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_by_the_batch_and_not_by_the_input(tmp_path: Path) -> None:
    """Texts of 60 kB, 150 and 1,200 of them: 72 MB may need little more than 9 MB did."""
    peaks = []
    for count in (150, 1_200):
        path = tmp_path / f"{count}.jsonl"
        text = " ".join(
            f"This is sentence {number} of a long page about nothing." for number in range(1_200)
        )
        with open(path, "w") as file:
            for number in range(count):
                file.write(json.dumps({"text": f"The page has the number {number}. {text}"}) + "\n")
        done = run(tmp_path / str(count), str(path))
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 40 << 20
    assert peaks[1] < 1 << 30


def test_words_are_split_without_spacy_and_torch() -> None:
    program = (
        "import sys\n"
        "from llmsys.data_pipeline.rules.chain import RuleChain\n"
        "from llmsys.config.quality_rules import GopherQualityConfig\n"
        "import pyarrow as pa\n"
        "RuleChain([GopherQualityConfig()]).apply(pa.array(['The house (and mine) is here.']))\n"
        "assert not {'spacy', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
