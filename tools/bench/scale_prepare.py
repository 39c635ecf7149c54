"""Measure what grows with the blocks of a preparation and with the ranks of a save, and extrapolate to full size.

    python tools/bench/scale_prepare.py [--only NAME …] [--fractions 0.001 0.01 0.1]

Full size: 5.8 million blocks of 90,000 crawl files, 10^10 documents, 14 million chunks of tensors on 4,096 ranks. The
journal, the planning and the merging are those of a preparation; its workers are simulated, and return at once what
judged blocks returned. Every measurement has a process of its own. Times are CPU seconds of one thread; memory is the
peak of the whole process, imports included. The exit status is 1 if a limit is not met.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

BLOCKS, DOCUMENTS, CHUNKS, RANKS = 5_800_000, 10_000_000_000, 14_000_000, 4_096
MAX_TIME_EXPONENT, MAX_MEMORY_EXPONENT = 1.05, 0.1
FRACTIONS = (1e-3, 1e-2, 1e-1)


class Quantity(NamedTuple):
    """One row of the table: what is measured, its unit, full size and its items, limits, resolution and function."""

    name: str
    unit: str
    full: int
    items: str
    limit: float
    max_exponent: float
    resolution: float
    measure: Callable[[int], float]


def measure_peak_mib() -> float:
    """Return the peak memory of this process, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- the driver ---


def build_result(number: int) -> dict[str, Any]:
    """Return what judging a block returns: 60 tests with three examples each, 30 kB of JSON."""
    examples = [
        {"id": f"{number * 180 + each:032x}", "url": f"https://example.org/{number}/{each}", "value": 1.5,
         "threshold": 1.0, "reason": "rule: a test with a value 1.5 > 1", "excerpt": f"{number} words " * 8}
        for each in range(3)
    ]  # fmt: skip
    drops = [
        {"stage": "rule", "rule": "rule", "test": f"test {test}", "documents": 5, "bytes": 900, "examples": examples}
        for test in range(60)
    ]
    counts = {"documents_in": 620, "bytes_in": 10**7, "documents_out": 104, "bytes_out": 10**6}
    tally = {"stages": {"rule": counts}, "changes": {}, "drops": drops}
    batches = [[shard, 1] for shard in range(100)]
    return {"tally": tally, "languages": {"en": [600, 10**6]}, "kept_batches": batches, "dropped_batches": batches}


def run_driver(blocks: int) -> float:
    """Run the driver's part of two stages and of the manifest. Return its CPU seconds without its workers'."""
    began = time.process_time()
    from data_pipeline.core.funnel import FunnelCounts
    from data_pipeline.core.task_record import TaskOutput, pack_result
    from data_pipeline.executors.base import Event, Job, LazySequence, TaskDone
    from data_pipeline.graph.stage_runner import StageRunner
    from data_pipeline.graph.tasks import Task
    from data_pipeline.stages.split_inputs import InputBlockList
    from llmsys.config.executor import InlineExecutorConfig
    from llmsys.folder_lock import lock_folder

    class ReturnAtOnce:
        """An executor whose workers need no time."""

        eager_jobs = None
        seconds = 0.0

        def run_jobs(self, jobs: Sequence[Job], seconds: float = 0) -> Iterator[Event]:
            for index in range(len(jobs)):
                names = jobs[index].outputs  # type: ignore[attr-defined]
                began = time.process_time()
                result = pack_result(build_result(index), [TaskOutput(name, 1, 10**18, "0" * 32) for name in names])
                self.seconds += time.process_time() - began
                yield TaskDone(index, result)

        def close(self) -> None:
            pass

    inputs = [
        (f"/crawl/CC-MAIN-20240101-{file:05d}.warc.gz", f"CC-MAIN-20240101-{file:05d}") for file in range(blocks // 64)
    ]
    found = {"blocks": [[part << 24, (part + 1) << 24, f"{part:032x}"] for part in range(64)]}
    listed = InputBlockList(inputs, lambda index: found)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with lock_folder(folder) as lock:
            runner = StageRunner(folder, InlineExecutorConfig(), lock)
            runner._executor = workers = ReturnAtOnce()
            for stage in ("extract", "judge"):

                def build_task(index: int, stage: str = stage) -> Task:
                    block = listed[index]
                    outputs = [f"work/{stage}/{block.name}.{number}.arrow" for number in range(2)]
                    depends_on = [block.source, block.digest, block.start]
                    return Task(f"{stage}/{block.name}", depends_on, outputs, lambda report: {}, block.size)

                records = runner.run_stage(stage, LazySequence(len(listed), build_task), unit="B", code="")
            tally = FunnelCounts()
            for record in records:
                tally.merge_counts(FunnelCounts(record.result["tally"]))
            runner.close()
    return time.process_time() - began - workers.seconds


def measure_driver_seconds(blocks: int) -> float:
    """Return the driver's CPU seconds for two stages and the manifest, less those of the simulated workers."""
    return run_driver(blocks)


def measure_driver_memory(blocks: int) -> float:
    """Return the peak memory of the driver, MiB."""
    run_driver(blocks)
    return measure_peak_mib()


# --- near duplicates ---


def measure_join_memory(documents: int) -> float:
    """Return the peak memory of finding the clusters of near copies, of which a third of the documents are, MiB."""
    from data_pipeline.dedup.duplicate_graph import find_labels

    rows = 200_000  # of the 2,000,000 that a task holds: so the sort is external at small sizes too

    def draw_pairs() -> Iterator[Any]:
        choose = np.random.default_rng(0)
        for _ in range(0, documents // 3, 100_000):
            first = choose.integers(0, documents, 100_000)
            yield np.stack([first, np.minimum(first + choose.integers(1, 9, 100_000), documents - 1)], axis=1)

    with tempfile.TemporaryDirectory() as name:
        for _ in find_labels(draw_pairs(), Path(name) / "near.arrow", rows):
            pass
    return measure_peak_mib()


# --- checkpoints ---


def measure_save_planning(chunks: int) -> float:
    """Return the CPU seconds in which a rank finds the chunks that it writes, if every chunk is on two ranks."""
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


def measure_index_read(chunks: int) -> float:
    """Return the CPU seconds in which a rank finds its chunks in the indices of other ranks at another world size."""
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
                fqn, properties = f"first_moment/blocks.{number}.weight", TensorProperties(dtype=torch.float32)
                entries[fqn] = TensorStorageMetadata(properties, torch.Size([ranks * 13, 16]), [chunk])
                place = _StorageInfo(f"__{rank}_0.distcp", number * 900, 900)
                results.append(WriteResult(MetadataIndex(fqn, chunk.offsets), 900, place))
            write_index(Path(name) / f"__{rank}_0.index", Metadata(dict(entries)), results)
            with (Path(name) / f"__{rank}_0.distcp").open("wb") as file:
                file.truncate(tensors * 900)
        wanted = {f"first_moment/blocks.{number}.weight": [([5, 0], [20, 16])] for number in range(tensors)}
        began = time.process_time()
        read_indices(Path(name), wanted)
        return time.process_time() - began


QUANTITIES = (
    Quantity("driver_seconds", "s", BLOCKS, "blocks", BLOCKS / 1_000, MAX_TIME_EXPONENT, 1e-2, measure_driver_seconds),
    Quantity("driver_memory", "MiB", BLOCKS, "blocks", 1_024, MAX_MEMORY_EXPONENT, 1, measure_driver_memory),
    Quantity("near_join_memory", "MiB", DOCUMENTS // 100, "documents", 1_024, MAX_MEMORY_EXPONENT, 1,
             measure_join_memory),
    Quantity("save_planning", "s", CHUNKS, "chunks of tensors", 5, MAX_TIME_EXPONENT, 1e-2, measure_save_planning),
    Quantity("load_planning", "s", CHUNKS, "chunks of tensors", 60, MAX_TIME_EXPONENT, 1e-2, measure_index_read),
)  # fmt: skip


def measure_growth(quantity: Quantity, fractions: Sequence[float]) -> dict[str, Any]:
    """Measure a quantity at some fractions of full size, each in a process of its own.

    Args:
        quantity: The quantity.
        fractions: Fractions of full size, rising.

    Returns:
        The sizes, the values, the fitted exponent, the value at full size, and whether the limits are met.
    """
    sizes = [max(64, round(quantity.full * fraction)) for fraction in fractions]
    values = []
    for size in sizes:
        command = [sys.executable, __file__, "--measure", quantity.name, "--size", str(size)]
        values.append(float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    logs = np.log(np.maximum(values, quantity.resolution))
    exponent = round(float(np.polyfit(np.log(sizes), logs, 1)[0]), 3)
    at_full = values[-1] * (quantity.full / sizes[-1]) ** max(exponent, 0.0)
    is_met = at_full <= quantity.limit and exponent <= quantity.max_exponent
    return {"name": quantity.name, "unit": quantity.unit, "sizes": sizes, "values": values, "exponent": exponent,
            "full": quantity.full, "value_at_full": at_full, "limit": quantity.limit, "is_met": is_met}  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [quantity.name for quantity in QUANTITIES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="quantities (default: all)")
    parser.add_argument("--fractions", nargs="+", type=float, default=FRACTIONS, help="fractions of full size")
    parser.add_argument("--measure", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        [quantity] = [one for one in QUANTITIES if one.name == arguments.measure]
        print(quantity.measure(arguments.size))
        return 0
    rows = [measure_growth(one, arguments.fractions) for one in QUANTITIES if one.name in arguments.only]
    print(
        "| quantity | measured at | exponent | full size | at full size | limit | met |\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        values = ", ".join(f"{size:,}: {value:.3g}" for size, value in zip(row["sizes"], row["values"], strict=True))
        full = f"{row['full']:,} | {row['value_at_full']:.3g} | {row['limit']:g} | {'yes' if row['is_met'] else 'NO'}"
        print(f"| {row['name']}, {row['unit']} | {values} | {row['exponent']:.2f} | {full} |")
    return 0 if all(row["is_met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
