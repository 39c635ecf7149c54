"""Laws of a dataset of many blocks: its files follow from workers and bytes, not from blocks; a
block is read once, judged where it was read, and done again only when its bytes changed.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmsys.data_pipeline.core.journal import Journal
from llmsys.data_pipeline.core.task_record import TaskRecord, list_extracted_texts
from llmsys.data_pipeline.executors.base import Report
from llmsys.data_pipeline.pipelines import document_pipeline
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.data_pipeline.readers.input_stream import InputStream
from llmsys.data_pipeline.stages import split_inputs
from llmsys.data_pipeline.stages.apply_rules import apply_rules_to_file
from llmsys.data_pipeline.stages.split_inputs import split_file
from llmsys.dataset.token_shards import read_batches
from llmsys.events import read_events
from llmsys.storage.pack_files import build_pack_path, list_intact_parts
from tests.helpers.paths import ROOT
from tests.helpers.tiny_crawl import (
    build_tiny_config,
    format_page,
    format_record,
    hash_files,
    list_blocks,
    make_crawl,
    read_packed_places,
)

ALL = {"deduplicate": {"url": {"kind": "url"}, "exact": {"kind": "text"}}}
# Prepares in this process and is killed in the middle of its 9th part of filtered documents.
KILLED = """
import os, signal, sys
from llmsys.data_pipeline.pipelines.prepare_dataset import prepare_dataset
from llmsys.storage.pack_files import PackWriter
from tests.helpers.tiny_crawl import build_tiny_config
write, seen = PackWriter.write, set()
def write_and_die(self, data):
    if "filtered.packs" in str(self._path):
        seen.add(self._path)
        if len(seen) == 9:
            write(self, bytes(data)[:50])
            self.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    return write(self, data)
PackWriter.write = write_and_die
prepare_dataset(build_tiny_config(sys.argv[1], sys.argv[2].split(",")), until="documents")
"""


def make_files(folder: Path, count: int) -> list[str]:
    """Write crawl files of one page each."""
    folder.mkdir()
    paths = []
    for number in range(count):
        words = f"page {number} has the words that a good page of this kind will have to have. "
        page = format_page([words * 12])
        path = folder / f"{number:03d}.warc.gz"
        path.write_bytes(
            format_record(f"https://example.org/{number}", "2024-05-01T00:00:00Z", page)
        )
        paths.append(str(path))
    return paths


def list_files(folder: Path) -> list[str]:
    return sorted(
        str(path.relative_to(folder)) for path in (folder / "work").rglob("*") if path.is_file()
    )


def list_stages(folder: Path) -> dict[str, int]:
    """The tasks that ran in each stage of the last run."""
    lines = read_events(folder / "events.jsonl")
    return {event["stage"]: event["tasks"] for event in lines if event["event"] == "stage"}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_files_of_a_dataset_do_not_grow_with_its_blocks(tmp_path: Path, workers: int) -> None:
    executor: dict[str, Any] = (
        {"kind": "local", "workers": workers} if workers else {"kind": "inline"}
    )
    counts = []
    for blocks in (12, 48):
        paths = make_files(tmp_path / f"crawl{blocks}", blocks)
        config = build_tiny_config(tmp_path / f"{blocks}", paths, executor=executor, **ALL)
        prepare_dataset(config, until="documents")
        folder = tmp_path / f"{blocks}"
        assert len(list_blocks(folder)) == blocks
        packs = [name for name in list_files(folder) if name.endswith(".pack")]
        # Texts, unreadable places, kept, dropped, documents, and three kinds of keys.
        assert 8 <= len(packs) <= 8 * max(1, workers)
        counts.append(len(list_files(folder)) - len(packs))
    assert counts[0] == counts[1]


def test_a_rerun_with_other_settings_leaves_no_pack_that_nothing_needs(tmp_path: Path) -> None:
    paths = make_files(tmp_path / "crawl", 4)
    folder = tmp_path / "data"
    for minimum in (30, 40, 50):
        rules = [{"kind": "gopher_quality", "min_words": minimum, "min_stop_words": 0}]
        prepare_dataset(build_tiny_config(folder, paths, rules=rules, **ALL), until="documents")
    assert len([name for name in list_files(folder) if name.endswith(".pack")]) == 8
    plain: dict[str, Any] = {
        "deduplicate": {"exact": {"kind": "none"}, "minhash": {"kind": "none"}}
    }
    prepare_dataset(build_tiny_config(folder, paths, rules=[], **plain), until="documents")
    # What an earlier config made is kept until it may not be.
    assert len([name for name in list_files(folder) if name.endswith(".pack")]) == 8
    plain |= {"executor": {"kind": "inline", "earlier_results_bytes": 0}}
    prepare_dataset(build_tiny_config(folder, paths, rules=[], **plain), until="documents")
    kinds = {name.split("/")[1] for name in list_files(folder) if name.endswith(".pack")}
    assert kinds == {
        "extracted.packs",
        "unread.packs",
        "filtered.packs",
        "filtered.dropped.packs",
    }


def test_a_run_killed_in_the_middle_of_a_part_keeps_the_parts_before_and_ends_with_the_same_bytes(
    tmp_path: Path,
) -> None:
    paths = make_files(tmp_path / "crawl", 20)
    whole = tmp_path / "whole"
    prepare_dataset(build_tiny_config(whole, paths), until="documents")
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(folder), ",".join(paths)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    pack = build_pack_path(folder / "work" / "filtered.packs", 0)
    intact, is_sound = list_intact_parts(pack)
    assert (len(intact), is_sound) == (8, True)
    assert pack.stat().st_size > max(start + length for start, length in intact) + 64
    before = read_packed_places(folder, "filter")
    assert len(before) == 8
    prepare_dataset(build_tiny_config(folder, paths), until="documents")
    assert hash_files(folder) == hash_files(whole)
    after = read_packed_places(folder, "filter")
    assert {name: after[name] for name in before} == before
    assert list_stages(folder)["extract"] == 12
    # The pack goes on where the complete parts end.
    assert {name.rpartition("/")[0] for places in after.values() for name in places[:1]} == {
        str(pack.relative_to(folder))
    }


def test_lost_texts_are_extracted_again_and_nothing_else_is_done(tmp_path: Path) -> None:
    paths = make_files(tmp_path / "crawl", 3)
    folder = tmp_path / "data"
    config = build_tiny_config(folder, paths, **ALL)
    prepare_dataset(config, until="documents")
    before = {stage: read_packed_places(folder, stage) for stage in ("filter", "signatures")}
    shutil.rmtree(folder / "work" / "extracted.packs")
    prepare_dataset(config, until="documents")
    assert {stage: read_packed_places(folder, stage) for stage in before} == before
    assert len(list_extracted_texts(folder)) == 3


def test_inputs_that_were_only_touched_or_moved_are_not_extracted_again(tmp_path: Path) -> None:
    """Neither short ones nor blocks of a long one; of a changed one, the changed block is."""
    paths = make_files(tmp_path / "crawl", 3)
    make_crawl(tmp_path / "long", files=1)
    long = tmp_path / "long" / "crawl-0.warc.gz"
    executor = {"kind": "inline", "block_bytes": 2_000}
    config = build_tiny_config(tmp_path / "data", [*paths, str(long)], executor=executor, **ALL)
    prepare_dataset(config, until="documents")
    before = read_packed_places(tmp_path / "data", "extract")
    assert len(before) > 6
    for path in (*paths, str(long)):
        os.utime(path, ns=(1, 1))
    prepare_dataset(config, until="documents")
    assert read_packed_places(tmp_path / "data", "extract") == before
    content = long.read_bytes()
    new = format_record("https://new.org/", "2024-05-01T00:00:00Z", format_page(["new words " * 9]))
    long.write_bytes(content + new)
    prepare_dataset(config, until="documents")
    after = read_packed_places(tmp_path / "data", "extract")
    changed = {name for name, places in after.items() if before.get(name) != places}
    assert 1 <= len(changed) <= 2
    assert changed <= {name for name in after if name.startswith("crawl-0")}
    prepare_dataset(
        build_tiny_config(tmp_path / "fresh", [*paths, str(long)], executor=executor, **ALL),
        until="documents",
    )
    assert hash_files(tmp_path / "data") == hash_files(tmp_path / "fresh")


def test_a_short_local_file_is_opened_by_the_worker_that_extracts_it_alone(tmp_path: Path) -> None:
    paths = make_files(tmp_path / "crawl", 3)
    prepare_dataset(build_tiny_config(tmp_path / "data", paths, **ALL), until="documents")
    assert "split_inputs" not in list_stages(tmp_path / "data")


def test_a_long_local_file_is_split_without_reading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_inputs, "_RUN", 10_000)
    noise = [os.urandom(3_000).hex() for _ in range(2_000)]
    records = [
        format_record(f"https://e.org/{number}", "2024-05-01T00:00:00Z", text.encode())
        for number, text in enumerate(noise)
    ]
    path = tmp_path / "long.warc.gz"
    path.write_bytes(b"".join(records))
    read = 0
    read_block = InputStream.read_block

    def count(stream: InputStream, position: int, size: int) -> bytes:
        nonlocal read
        block = read_block(stream, position, size)
        read += len(block)
        return block

    monkeypatch.setattr(InputStream, "read_block", count)
    ranges = split_file(str(path), 1 << 20, "stamp", split_inputs.LEAST_PROBED)
    assert len(ranges) == -(-path.stat().st_size >> 20)
    assert read < path.stat().st_size / 5
    # A split point is the end of a record.
    ends = set[int]()
    for record in records:
        ends.add((max(ends) if ends else 0) + len(record))
    assert {one.stop for one in ranges} <= ends


def test_a_following_job_that_fails_is_tried_by_its_own_stage_with_all_its_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_files(tmp_path / "crawl", 3)
    apply_rules = apply_rules_to_file
    tried = list[str]()

    def fail_twice(report: Report, *, source: Path, kept: Path, **others: Any) -> dict[str, Any]:
        tried.append(kept.name)
        if kept.name.startswith("001") and tried.count(kept.name) < 3:
            report(1, 5)
            raise ValueError("not yet")
        return apply_rules(report, source=source, kept=kept, **others)

    monkeypatch.setattr(document_pipeline, "apply_rules_to_file", fail_twice)
    executor = {"kind": "inline", "backoff_seconds": 0}
    config = build_tiny_config(tmp_path / "data", paths, executor=executor, **ALL)
    manifest = prepare_dataset(config, until="documents")
    assert not manifest.read.skipped
    assert sorted(name[:3] for name in tried) == ["000", "001", "001", "001", "002"]
    lines = read_events(tmp_path / "data" / "events.jsonl")
    events = {event["stage"]: event for event in lines if event["event"] == "stage"}
    counts = {
        name: (events[name]["tasks"], events[name]["retries"]) for name in ("extract", "filter")
    }
    # The texts were extracted once.
    assert counts == {"extract": (3, 0), "filter": (1, 1)}


def test_inspection_reads_the_texts_of_the_last_run_and_none_of_those_before(
    tmp_path: Path,
) -> None:
    paths = make_files(tmp_path / "crawl", 3)
    for texts in (paths, paths[:2]):
        config = build_tiny_config(tmp_path / "data", texts, **ALL)
        prepare_dataset(config, until="documents")
    shown: Sequence[Path] = list_extracted_texts(tmp_path / "data")
    urls = [
        url for path in shown for batch in read_batches(path) for url in batch["url"].to_pylist()
    ]
    assert sorted(urls) == ["https://example.org/0", "https://example.org/1"]
    shutil.rmtree(tmp_path / "data" / "work")
    assert list_extracted_texts(tmp_path / "data") == []


# Reads of a block's record after its worker made it: for the task of the next stage, and once for
# everything that the driver lists and sums.
MAX_READS = {"extract": 4, "filter": 5, "signatures": 1}


def test_the_record_of_a_block_is_read_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = dict.fromkeys(MAX_READS, 0)
    read_records = Journal.read_records

    def count_records(journal: Journal, stage: str, first: int, count: int) -> list[TaskRecord]:
        records = read_records(journal, stage, first, count)
        if stage in reads:
            reads[stage] += len(records)
        return records

    monkeypatch.setattr(Journal, "read_records", count_records)
    blocks = 7
    deduplicate = {**ALL["deduplicate"], "minhash": {"kind": "minhash"}}
    config = build_tiny_config(
        tmp_path / "dataset", make_files(tmp_path / "crawl", blocks), deduplicate=deduplicate
    )
    prepare_dataset(config, until="documents")
    assert {stage: count / blocks for stage, count in reads.items()} == MAX_READS
