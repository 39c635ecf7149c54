"""Measure what grows with the size of a run, at 1/1000, 1/100 and 1/10 of full size, and
extrapolate.

    python tools/bench/scale.py [--only NAME …] [--json]

Full size: 15 trillion tokens in 150,000 token files, a model of 405 billion parameters over 2,048
ranks, 4,096 ranks. Sizes are made up (an index that lists one small file many times, a slice of a
parameter that no memory holds), and the code that reads them is that of a run. Every measurement
has a separate process. Times are CPU seconds of one thread, the least of several repetitions;
memory is that of the whole process, imports included.

The exponent is the slope of log value over log size; 0 for values that stay below the resolution of
the measurement. The value at full size follows from the largest measured one and the exponent. The
exit status is 1 if a limit is not met.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.bench.growth import MAX_MEMORY_EXPONENT, MAX_TIME_EXPONENT, Quantity, run_program

LENGTH, FILE_TOKENS = 8192, 1_000_000


def write_dataset(folder: Path, files: int) -> None:
    """Write one token file, an index that lists it `files` times, and their manifest."""
    import pyarrow as pa

    from llmsys.dataset import token_shards
    from llmsys.dataset.manifest import Histogram, Manifest, ReadSummary

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6.1, 1.0, 4_000), 20, 100_000).astype(np.int64)
    ends = np.minimum(np.cumsum(lengths), FILE_TOKENS)
    ends = ends[: int(np.searchsorted(ends, FILE_TOKENS)) + 1]
    ids = rng.integers(0, 120_000, FILE_TOKENS).astype(np.uint32)
    rows = len(ends)
    columns = {
        "tokens": pa.ListArray.from_arrays(np.concatenate([[0], ends]).astype(np.int32), ids),
        "id": [f"{row:032x}" for row in range(rows)],
        "file": ["crawl.warc.gz"] * rows,
        "offset": list(range(rows)),
        "url_hash": list(range(rows)),
        "text_bytes": [4] * rows,
    }
    schema = token_shards.build_token_schema("uint32")
    path = folder / "tokens" / "train-00000.arrow"
    with token_shards.ArrowFileWriter(path, schema) as writer:
        writer.write(pa.record_batch({name: columns[name] for name in schema.names}).cast(schema))
    entry = token_shards.write_page_table(path)
    index = folder / "tokens" / "train.index"
    token_shards.write_token_index(index, [entry] * files)
    named = token_shards.TokenIndex(
        name=index.name, files=files, digest=token_shards.compute_file_digest(index)
    )
    split = token_shards.Split(
        documents=rows * files, tokens=FILE_TOKENS * files, bytes=4 * rows * files, index=named
    )
    manifest = Manifest(
        name="scale", fingerprint="5" * 32, config={}, config_digest="", vocab_size=120_000,
        token_dtype="uint32",
        tokenizer_fingerprint="7" * 32, splits={"train": split},
        documents=token_shards.DocumentFiles(),
        dropped=token_shards.DocumentFiles(), funnel=(), languages={}, lengths=Histogram(edges=(0,
            1), counts=(0,)),
        read=ReadSummary(files=0, records=0, html_bytes=0),
    )  # fmt: skip
    token_shards.write_manifest(folder, manifest)


def measure_seconds(action: Callable[[], Any], repetitions: int = 5) -> float:
    """Return the least CPU seconds of several calls."""
    found = []
    for _ in range(repetitions):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return min(found)


def get_resident_bytes() -> int:
    """Return the memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_windows(folder: Path) -> Any:
    """Open a dataset as a rank does."""
    from llmsys.data.stream_windows import StreamWindows
    from llmsys.dataset.paged_token_shards import require_paged
    from llmsys.dataset.token_shards import open_tokens

    return StreamWindows(require_paged(open_tokens(folder, "train")), length=LENGTH, seed=0)


def read_random_windows(windows: Any, count: int) -> None:
    """Read windows from all over the corpus."""
    for number in np.random.default_rng(1).integers(0, windows.windows_per_epoch, count).tolist():
        windows.get_rows([number])


def measure_index_read(files: int) -> float:
    """Return the seconds of reading and verifying an index."""
    from llmsys.dataset.manifest import load_manifest
    from llmsys.dataset.token_split import read_token_index

    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), files)
        index = load_manifest(folder).splits["train"].index
        assert index is not None
        return measure_seconds(lambda: read_token_index(Path(folder), index))


def measure_loader_start(files: int) -> float:
    """Return the seconds from a folder to the first window."""
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), files)
        return measure_seconds(lambda: open_windows(Path(folder)).get_rows([0]))


def measure_loader_memory(files: int) -> float:
    """Return the memory of a process after many windows, in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), files)
        command = [sys.executable, __file__, folder]
        return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_loader_memory(folder: Path) -> None:
    """Print the memory of this process with a loader; it did not write the dataset."""
    windows = open_windows(folder)
    read_random_windows(windows, 2_000)
    print(get_resident_bytes() / 2**20)


def measure_window(files: int) -> float:
    """Return the microseconds of a window of 8,192 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), files)
        windows = open_windows(Path(folder))
        return measure_seconds(lambda: read_random_windows(windows, 500)) / 500 * 1e6


def measure_trace(files: int) -> float:
    """Return the milliseconds of finding the windows of a document."""
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder), files)
        windows = open_windows(Path(folder))
        epochs = 2 * windows.windows_per_epoch
        return measure_seconds(lambda: windows.list_windows_with_document(1_000, epochs)) * 1e3


def measure_initial_values(parameters: int) -> float:
    """Return the seconds of the starting values of a rank: its rows of a matrix over 2,048
    ranks.
    """
    import torch

    from llmsys.model.indexed_normal import draw_normal

    torch.set_num_threads(1)
    width = 16_384
    rows = max(1, parameters // width)
    return measure_seconds(
        lambda: draw_normal(7, (rows * 2048, width), [(rows * 1000, rows), (0, width)]), 2
    )


def measure_checkpoint_stats(ranks: int) -> float:
    """Return the files of a checkpoint, one per rank, that the first rank asks the file system
    for.
    """
    from llmsys.train import checkpoint_record

    asked: list[Path] = []
    checkpoint_record.is_present = lambda path: not asked.append(path)  # type: ignore[func-returns-value]
    checkpoint_record.compute_digest = lambda file: ""
    names = {f"__{rank}_0.distcp": "" for rank in range(ranks)}
    checkpoint_record.find_damaged_file(Path("checkpoint"), names, 0, ranks)
    return len(asked)


def measure_dataset_reads(ranks: int) -> float:
    """Return how often all ranks together open the manifest and an index, to open the data of a
    run.
    """
    from llmsys.config.loading.load import load_run_config
    from llmsys.dataset.manifest import load_manifest
    from llmsys.dataset.token_shards import open_tokens
    from llmsys.storage.received_files import hold_received_files
    from llmsys.train.shared_dataset import read_dataset_files

    opened = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder, 150)
        sys.addaudithook(
            lambda event, words: (
                opened.append(words[0])
                if event == "open" and str(words[0]).endswith(("manifest.json", ".index"))
                else None
            )
        )
        with hold_received_files(
            read_dataset_files(load_run_config("train/demo", [f"data.folder={folder}"]))
        ):
            for _ in range(ranks):
                load_manifest(folder)
                open_tokens(folder, "train")
        return len(opened)


FILES = 150_000
QUANTITIES = (
    Quantity("index_read", "s", FILES, "token files", 5, MAX_TIME_EXPONENT, 1e-3,
        measure_index_read),
    Quantity("loader_start", "s", FILES, "token files", 60, MAX_TIME_EXPONENT, 1e-2,
        measure_loader_start),
    Quantity("loader_memory", "MiB", FILES, "token files", 200, MAX_MEMORY_EXPONENT, 1,
        measure_loader_memory),
    Quantity("window", "µs", FILES, "token files", 1_000, MAX_TIME_EXPONENT, 10, measure_window),
    Quantity("trace", "ms", FILES, "token files", 1_000, MAX_TIME_EXPONENT, 0.1, measure_trace),
    Quantity("initial_values", "s", 405_000_000_000 // 2048, "parameters of a rank", 30,
        MAX_TIME_EXPONENT, 1e-3,
             measure_initial_values),
    Quantity("dataset_reads", "opens", 4096, "ranks", 16, MAX_MEMORY_EXPONENT, 1,
        measure_dataset_reads),
    Quantity("checkpoint_stats", "files", 4096, "ranks", 16, MAX_MEMORY_EXPONENT, 1,
        measure_checkpoint_stats),
)  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) == 2 and Path(sys.argv[1]).is_dir():
        print_loader_memory(Path(sys.argv[1]))  # `measure_loader_memory` asks for it
    else:
        sys.exit(run_program(QUANTITIES, __file__, __doc__))
