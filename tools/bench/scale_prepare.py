"""Measure what grows with the blocks of a preparation and with the ranks of a save, and extrapolate
to full size.

    python tools/bench/scale_prepare.py [--only NAME …] [--fractions 0.001 0.01 0.1]

Full size: 5.8 million blocks of 90,000 crawl files, 10^10 documents, 14 million chunks of tensors
on 4,096 ranks of 512 hosts. The journal, the planning and the merging are those of a preparation;
its workers are simulated, and return at once what filtered blocks returned. The join of near
duplicates is measured with 10^7 and 10^8 documents. Times are CPU seconds of one thread; memory is
the peak of the whole process, imports included.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.growth import MAX_MEMORY_EXPONENT, MAX_TIME_EXPONENT, Quantity, run_program

# A block of 16 MB has 104 documents, each with 14 keys; the default of
# `data.deduplicate.key_filter.keys_per_task`.
KEYS_PER_BLOCK, KEYS_PER_TASK = 104 * 14, 2_000_000
BLOCKS, DOCUMENTS, CHUNKS, RANKS, HOSTS = 5_800_000, 10_000_000_000, 14_000_000, 4_096, 512


def measure_peak_mib() -> float:
    """Return the peak memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- the driver ---


def build_result(number: int) -> dict[str, Any]:
    """Return what judging a block returns: 60 tests with three examples each, 30 kB of JSON."""
    examples = [
        {"id": f"{number * 180 + each:032x}", "url": f"https://example.org/{number}/{each}",
            "value": 1.5,
         "threshold": 1.0, "reason": "rule: a test with a value 1.5 > 1",
         "excerpt": f"{number} words " * 8}
        for each in range(3)
    ]  # fmt: skip
    drops = [
        {
            "stage": "rule",
            "rule": "rule",
            "test": f"test {test}",
            "documents": 5,
            "bytes": 900,
            "examples": examples,
        }
        for test in range(60)
    ]
    counts = {"documents_in": 620, "bytes_in": 10**7, "documents_out": 104, "bytes_out": 10**6}
    tally = {"stages": {"rule": counts}, "changes": {}, "drops": drops}
    batches = [[shard, 1] for shard in range(100)]
    return {
        "tally": tally,
        "languages": {"en": [600, 10**6]},
        "kept_batches": batches,
        "dropped_batches": batches,
    }


def measure_driver(blocks: int) -> dict[str, float]:
    """Return CPU seconds and peak memory of the driver's part of two stages and of the manifest."""
    from llmsys.config.executor import InlineExecutorConfig
    from llmsys.data_pipeline.core.funnel import FunnelCounts
    from llmsys.data_pipeline.core.task_record import TaskOutput, pack_result
    from llmsys.data_pipeline.executors.base import Event, Job, LazySequence, TaskDone
    from llmsys.data_pipeline.graph.stage_runner import StageRunner
    from llmsys.data_pipeline.graph.tasks import Task
    from llmsys.data_pipeline.stages.split_inputs import InputBlockList
    from llmsys.storage.local_files import lock_folder

    results = [pack_result(build_result(number), []) for number in range(64)]

    class ReturnAtOnce:
        """An executor whose workers need no time."""

        eager_jobs = None

        def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event]:
            for index in range(len(jobs)):
                names = jobs[index].outputs  # type: ignore[attr-defined]
                outputs = [vars(TaskOutput(name, 1, 10**18, "0" * 32)) for name in names]
                yield TaskDone(index, results[index % 64] | {"outputs": outputs})

        def close(self) -> None:
            pass

    inputs = [
        (f"/crawl/CC-MAIN-20240101-{file:05d}.warc.gz", f"CC-MAIN-20240101-{file:05d}")
        for file in range(blocks // 64)
    ]
    found = {"blocks": [[part << 24, (part + 1) << 24, f"{part:032x}"] for part in range(64)]}
    listed = InputBlockList(inputs, lambda index: found)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with lock_folder(folder) as lock:
            runner = StageRunner(folder, InlineExecutorConfig(), lock)
            runner._executor = ReturnAtOnce()
            began = time.process_time()
            for stage in ("extract", "filter"):

                def build_task(index: int, stage: str = stage) -> Task:
                    block = listed[index]
                    outputs = [f"work/{stage}/{block.name}.{number}.arrow" for number in range(2)]
                    depends_on = [block.source, block.digest, block.start]
                    return Task(
                        f"{stage}/{block.name}", depends_on, outputs, lambda report: {}, block.size
                    )

                records = runner.run_stage(
                    stage, LazySequence(len(listed), build_task), unit="B", code=""
                )
            tally = FunnelCounts()
            for record in records:
                tally.merge_counts(FunnelCounts(record.result["tally"]))
            runner.close()
    return {"driver_seconds": time.process_time() - began, "driver_memory": measure_peak_mib()}


# --- near duplicates ---


def measure_join(documents: int) -> dict[str, float]:
    """Return peak memory, CPU seconds and bytes written when finding clusters: two thirds of
    documents have a copy.
    """
    from llmsys.data_pipeline.dedup.duplicate_graph import find_labels

    rows = 2_000_000  # as in a task

    def draw_pairs() -> Iterator[Any]:
        choose = np.random.default_rng(0)
        for _ in range(0, documents // 3, 100_000):
            first = choose.integers(0, documents, 100_000)
            yield np.stack(
                [first, np.minimum(first + choose.integers(1, 9, 100_000), documents - 1)], axis=1
            )

    written, began = read_written_bytes(), time.process_time()
    with tempfile.TemporaryDirectory() as name:
        for _ in find_labels(draw_pairs(), Path(name) / "near.arrow", rows):
            pass
    return {
        "near_join_memory": measure_peak_mib(),
        "near_join_seconds": time.process_time() - began,
        "near_join_bytes": (read_written_bytes() - written) / documents,
    }


def read_written_bytes() -> int:
    """Return the bytes that this process has written to files."""
    return int(
        dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"]
    )


def count_exchange_opens(blocks: int) -> float:
    """Return the files that one comparison by MinHash opens: every block once, and every group
    by each range.
    """
    from llmsys.data_pipeline.dedup.keys import FILES_PER_GROUP, compute_group_size

    ranges = -(-blocks * KEYS_PER_BLOCK // KEYS_PER_TASK)
    groups = -(-blocks // compute_group_size(blocks)) if blocks > FILES_PER_GROUP else blocks
    return blocks + groups * ranges


# --- checkpoints ---


def measure_save_planning(chunks: int) -> float:
    """Return the CPU seconds in which a rank finds the chunks that it writes, if every chunk is
    on two ranks.
    """
    from llmsys.train.checkpoint_plan import CHUNKS_AT_ONCE, select_owned

    choose, seconds = np.random.default_rng(0), 0.0
    for _ in range(max(1, -(-2 * chunks // CHUNKS_AT_ONCE))):
        count = min(2 * chunks, CHUNKS_AT_ONCE)
        half = choose.integers(0, 1 << 63, count // 2, np.uint64)
        gathered = np.array_split(np.concatenate([half, half]), RANKS)
        began = time.process_time()
        select_owned(gathered[0], gathered, 0)
        seconds += time.process_time() - began
    return seconds


def measure_saved_files(hosts: int) -> float:
    """Return the files of a checkpoint per host of eight ranks, each of which writes its part of
    50 tensors.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    from llmsys.train.checkpoint_storage import RankWriter

    with tempfile.TemporaryDirectory() as name:
        for rank in range(8 * hosts):
            tensors: dict[str, Any] = {
                f"blocks.{number}.weight": torch.zeros(2) for number in range(50)
            }
            dcp.save(tensors, storage_writer=RankWriter(Path(name), rank), no_dist=True)
        return len(list(Path(name).iterdir())) / hosts


def measure_index_read(chunks: int) -> float:
    """Return the CPU seconds in which a rank finds its chunks in the indices of other ranks at
    another world size.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )  # fmt: skip
    from torch.distributed.checkpoint.storage import WriteResult

    from llmsys.train.checkpoint_index import read_indices, write_index

    tensors = CHUNKS // RANKS
    ranks = max(1, chunks // tensors)
    with tempfile.TemporaryDirectory() as name:
        for rank in range(ranks):
            entries, results = {}, []
            for number in range(tensors):
                chunk = ChunkStorageMetadata(torch.Size([rank * 13, 0]), torch.Size([13, 16]))
                fqn, properties = (
                    f"first_moment/blocks.{number}.weight",
                    TensorProperties(dtype=torch.float32),
                )
                entries[fqn] = TensorStorageMetadata(
                    properties, torch.Size([ranks * 13, 16]), [chunk]
                )
                place = _StorageInfo(f"__{rank}_0.distcp", number * 900, 900)
                results.append(WriteResult(MetadataIndex(fqn, chunk.offsets), 900, place))
            write_index(Path(name) / f"__{rank}_0.index", Metadata(dict(entries)), results)
            with (Path(name) / f"__{rank}_0.distcp").open("wb") as file:
                file.truncate(tensors * 900)
        wanted = {
            f"first_moment/blocks.{number}.weight": [([5, 0], [20, 16])]
            for number in range(tensors)
        }
        began = time.process_time()
        read_indices(Path(name), wanted)
        return time.process_time() - began


MAX_PASSES_EXPONENT = 0.2  # rounds and merges grow with the logarithm
JOIN = (1e-3, 1e-2)  # of 10^10 documents: at fewer the pairs fit into memory
QUANTITIES = (
    Quantity("driver_seconds", "s", BLOCKS, "blocks", BLOCKS / 1_000, MAX_TIME_EXPONENT, 1e-2,
        measure_driver),
    Quantity("driver_memory", "MiB", BLOCKS, "blocks", 1_024, MAX_MEMORY_EXPONENT, 1,
        measure_driver),
    Quantity("near_join_memory", "MiB", DOCUMENTS, "documents", 1_024, MAX_MEMORY_EXPONENT, 1,
        measure_join, JOIN),
    Quantity("near_join_seconds", "s", DOCUMENTS, "documents", 360_000, MAX_TIME_EXPONENT, 1e-1,
        measure_join, JOIN),
    Quantity("near_join_bytes", "B/document", DOCUMENTS, "documents", 2_000, MAX_PASSES_EXPONENT, 1,
        measure_join,
             JOIN),
    Quantity("exchange_opens", "files", BLOCKS, "blocks", 2 * BLOCKS, MAX_TIME_EXPONENT, 1,
        count_exchange_opens),
    Quantity("save_planning", "s", CHUNKS, "chunks of tensors", 5, MAX_TIME_EXPONENT, 1e-2,
        measure_save_planning),
    Quantity("load_planning", "s", CHUNKS, "chunks of tensors", 60, MAX_TIME_EXPONENT, 1e-2,
        measure_index_read),
    Quantity("saved_files", "files/host", HOSTS, "hosts", 32, MAX_MEMORY_EXPONENT, 1,
        measure_saved_files),
)  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_program(QUANTITIES, __file__, __doc__))
