"""Measure tokens per second of the loader, next to common loaders on the same tokens.

    python tools/bench/loader.py DATASET [--length 512] [--sequences 32] [--seconds 2] [--consumes
    8000] [--json]

DATASET is a folder that `llmsys prepare` has written. Every loader makes batches of inputs and
targets on the CPU, in one thread, and all alternate in rounds; rates are medians over the rounds.
The memory-mapped file with random crops is nanoGPT's loader: no epochs, no documents, no resume.
MosaicML streaming reads samples of one packed sequence each, shuffled (py1e), through torch's
DataLoader in this process; it is measured where it is installed:

    python -m venv streaming && streaming/bin/pip install -e . mosaicml-streaming
    streaming/bin/python tools/bench/loader.py DATASET

It also prints how uneven attention is over ranks in data order and when balanced
(`batch.assignment`).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from llmsys.config.batch import BatchConfig
from llmsys.data.dataloader import StepLoader
from llmsys.data.step_batches import WindowStepBatches
from llmsys.data.step_plan import RunPlan
from llmsys.dataset.token_shards import TokenShards, open_tokens
from llmsys.train.build_objective import build_source_windows

ROUNDS = 5
# (positions, ranks, windows of a rank, windows of a forward pass) that are looked at for balance.
SHAPES = ((512, 8, 8, 8), (2048, 2, 4, 4), (2048, 8, 4, 4), (2048, 8, 4, 1), (8192, 4, 2, 1))
Next = Callable[[], Any]


def build_packed_source(
    shards: TokenShards,
    length: int,
    sequences: int,
    *,
    deal: str = "sequential",
    masked: bool = True,
) -> Next:
    """Return our steps: shuffled epochs of packed documents, with document ids where they are
    `masked`.
    """
    micro = max(1, sequences // 4) if deal == "balanced" else 0
    settings = {
        "sequence_length": length,
        "sequences": sequences,
        "assignment": deal,
        "micro_sequences": micro,
    }
    batch = BatchConfig.model_validate(settings)
    packed = build_source_windows(shards, BatchConfig(sequence_length=length), 0)
    steps = WindowStepBatches(
        packed, RunPlan(batch, 1, 0), separate_documents=masked, deal=batch.assignment
    )
    numbers = iter(range(1 << 40))
    return lambda: steps.get_micro_batches(next(numbers))


def build_read_ahead_source(shards: TokenShards, length: int, sequences: int) -> Next:
    """Return the same through the prefetch thread, as the trainer reads it."""
    batch = BatchConfig(sequence_length=length, sequences=sequences)
    steps = WindowStepBatches(
        build_source_windows(shards, BatchConfig(sequence_length=length), 0),
        RunPlan(batch, 1, 0),
        separate_documents=True,
    )
    batches = StepLoader(steps).iter_steps(0, 1 << 40)
    return lambda: next(batches)


def build_random_crop_source(file: Path, length: int, sequences: int) -> Next:
    """Return nanoGPT's loader: a memory map of all tokens, and sequences from random offsets."""
    data = np.memmap(file, dtype=np.uint16, mode="r")
    generator = torch.Generator().manual_seed(0)

    def draw_batch() -> Any:
        starts = torch.randint(len(data) - length, (sequences,), generator=generator)
        inputs = torch.stack(
            [torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts]
        )
        targets = torch.stack(
            [torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts]
        )
        return inputs, targets

    return draw_batch


def build_streaming_source(
    folder: Path, shards: TokenShards, length: int, sequences: int
) -> Next | None:
    """Return MosaicML streaming over sequences of the same tokens; None where it is not
    installed.
    """
    try:
        from streaming import MDSWriter, StreamingDataset  # type: ignore[import-not-found]
    except ImportError:
        return None
    packed = build_source_windows(shards, BatchConfig(sequence_length=length), 0)
    with MDSWriter(out=str(folder), columns={"tokens": "ndarray:uint16"}) as writer:
        for window in range(packed.windows_per_epoch):
            writer.write({"tokens": packed.get_rows([window]).tokens[0].astype(np.uint16)})
    data = StreamingDataset(
        local=str(folder), shuffle=True, batch_size=sequences, num_canonical_nodes=1
    )
    rows = iter(
        _repeat_loader(
            torch.utils.data.DataLoader(data, batch_size=sequences, collate_fn=_collate_samples)
        )
    )
    return lambda: next(rows)


def _collate_samples(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _repeat_loader(loader: Any) -> Any:
    while True:
        yield from loader


def measure_rates(contenders: dict[str, Next], tokens: int, seconds: float) -> dict[str, float]:
    """Return tokens per second of each loader, measured in turn."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for following in contenders.values():
        following()  # maps files, orders the first epoch
    for _ in range(ROUNDS):
        for name, following in contenders.items():
            began, batches = time.perf_counter(), 0
            while (spent := time.perf_counter() - began) < seconds / ROUNDS:
                following()
                batches += 1
            found[name].append(batches * tokens / spent)
    return {name: statistics.median(values) for name, values in found.items()}


def compute_imbalance(shards: TokenShards) -> list[dict[str, Any]]:
    """Return the attention time of the slowest rank over the even share, in order and balanced,
    means over first
    steps.
    """
    found = []
    for length, ranks, per_rank, micro in SHAPES:
        settings = {
            "sequence_length": length,
            "sequences": ranks * per_rank,
            "micro_sequences": micro,
        }
        batch = BatchConfig.model_validate(settings | {"assignment": "balanced"})
        packed = build_source_windows(shards, BatchConfig(sequence_length=length), 0)
        steps = WindowStepBatches(
            packed, RunPlan(batch, ranks, 0), separate_documents=True, deal=batch.assignment
        )
        said = [steps.get_step_metrics(step) for step in range(20)]
        means = [
            statistics.fmean(one[f"attention_imbalance{end}"] for one in said)
            for end in ("_sequential", "")
        ]
        shape = {"length": length, "ranks": ranks, "windows": per_rank, "micro": micro}
        found.append(shape | {"sequential": means[0], "balanced": means[1]})
    return found


def measure_loader(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return every printed value."""
    shards = open_tokens(arguments.dataset, "train")
    length, sequences = arguments.length, arguments.sequences
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "tokens.bin"
        np.concatenate(
            [shards.get_tokens(number) for number in range(shards.num_documents)]
        ).astype(np.uint16).tofile(file)
        contenders: dict[str, Next | None] = {
            "llmsys": build_packed_source(shards, length, sequences),
            "llmsys, read ahead by its thread": build_read_ahead_source(shards, length, sequences),
            "llmsys, assignment=balanced": build_packed_source(
                shards, length, sequences, deal="balanced"
            ),
            "llmsys, attention_scope=window": build_packed_source(
                shards, length, sequences, masked=False
            ),
            "memory map, random crops": build_random_crop_source(file, length, sequences),
            "MosaicML streaming": build_streaming_source(
                Path(folder) / "mds", shards, length, sequences
            ),
        }
        there = {name: one for name, one in contenders.items() if one is not None}
        found, uneven = (
            measure_rates(there, length * sequences, arguments.seconds),
            compute_imbalance(shards),
        )
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    return {
        "machine": next(
            (line.split(": ")[1] for line in lines if line.startswith("model name")),
            platform.processor(),
        ),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "dataset": {"documents": shards.num_documents, "tokens": shards.num_tokens},
        "batch": {"length": length, "sequences": sequences},
        "tokens_per_second": found,
        "missing": [name for name in contenders if name not in there],
        "times_consumption": found["llmsys"] / arguments.consumes,
        "unevenness": uneven,
    }


def format_table(found: dict[str, Any]) -> str:
    """Return the measurement as text."""
    lines = [f"{found['cores']} cores of {found['machine']}, torch {found['torch']}"]
    lines += [
        f"{part}: {', '.join(f'{k} {v:,}' for k, v in found[part].items())}"
        for part in ("dataset", "batch")
    ]
    lines += [
        f"  {name:<34} {rate / 1e6:8.2f} million tokens/s"
        for name, rate in found["tokens_per_second"].items()
    ]
    lines += [f"  {name:<34} not installed: see --help" for name in found["missing"]]
    lines.append(
        f"llmsys delivers {found['times_consumption']:,.0f} times what the model consumes "
        "(wanted: 20)"
    )
    lines.append("work of attention over the even share (1 is even):   in order   balanced")
    for one in found["unevenness"]:
        shape = (
            f"{one['ranks']} ranks of {one['windows']} windows of {one['length']}, {one['micro']} "
            "in a forward pass"
        )
        lines.append(f"  {shape:<50} {one['sequential']:8.3f} {one['balanced']:10.3f}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; 1 when the loader delivers less than 20 times what the model consumes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dataset", type=Path, help="dataset folder, such as demo/data")
    parser.add_argument(
        "--length", type=int, default=512, help="positions of a window (default: %(default)s)"
    )
    parser.add_argument(
        "--sequences", type=int, default=32, help="windows of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="for each contender (default: %(default)s)"
    )
    parser.add_argument(
        "--consumes",
        type=float,
        default=8000.0,
        help="tokens/s of the model (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the table"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure_loader(arguments)
    print(json.dumps(found) if arguments.json else format_table(found))
    return 0 if found["times_consumption"] >= 20 else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # the threads of streaming would go on to read files that are gone
