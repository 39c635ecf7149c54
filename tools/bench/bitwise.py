"""Measure the cost of bitwise mode: tokens per second and bytes sent, next to fast mode, on 1, 2
and 4 processes.

    python tools/bench/bitwise.py [--processes 1 2 4] [--steps 12]

The demo's model and batch, one thread per process. Modes alternate step by step in the same
processes, so that other work on the machine affects all of them. Everything is a median over steps:
the time of the slowest rank, the CPU time of rank 0 (which a busy machine disturbs less), and the
bytes that rank 0 writes to its peers, as the kernel counts them.
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import Engine
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.train.build_engine import build_engine
from llmsys.train.expert_load import update_expert_balance
from llmsys.train.precision import choose_native_precision

COMMON = ("train.threads_per_process=1", "batch.sequences=4")
MODES = {
    "fast": (),
    "fast, a sequence at a time": ("batch.micro_sequences=1",),
    "bitwise": ("batch.micro_sequences=1", "train.reproducibility=bitwise"),
}


def main(words: Sequence[str]) -> None:
    """Print one table row for each number of processes, expert degree and mode."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=12, help="Measured steps of each mode.")
    parser.add_argument("--config", default="train/demo")
    asked = parser.parse_args(words)
    print(
        "| processes | expert | mode | tokens/s | CPU seconds of a rank | of fast | MB that a "
        "rank sends |"
    )
    print("|---|---|---|---|---|---|---|")
    for processes in asked.processes:
        for expert in sorted({1, processes}):
            rows = measure_ranks(processes, (asked.config, asked.steps, expert))
            for mode, (speed, cpu, sent) in rows.items():
                share = cpu / rows["fast"][1]
                print(
                    f"| {processes} | {expert} | {mode} | {speed:,.0f} | {cpu:.2f} | {share:.2f} "
                    f"| {sent:.0f} |"
                )
                sys.stdout.flush()


def measure_ranks(processes: int, arguments: tuple[Any, ...]) -> dict[str, list[float]]:
    """Return rank 0's measurements on fresh processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        ranks = [
            context.Process(
                target=run_rank, args=(answers, folder, rank, processes, *arguments), daemon=True
            )
            for rank in range(processes)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            raise SystemExit("a rank failed; see above")
        found: dict[str, list[float]] = answers.get()
        return found


def run_rank(
    answers: Any, folder: str, rank: int, processes: int, name: str, steps: int, expert: int
) -> None:
    """Run one process: all modes in turn. Rank 0 answers with (tokens per second, CPU seconds,
    megabytes) of each.
    """
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    configs = {
        mode: load_run_config(name, (*COMMON, f"layout.expert={expert}", *more))
        for mode, more in MODES.items()
    }
    engines = {mode: build_mode_engine(config) for mode, config in configs.items()}
    told: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in MODES}
    for step in range(steps + 2):  # the first two warm up
        for mode, engine in engines.items():
            told[mode].append(
                measure_step(engine, build_batches(configs[mode], step, rank, processes))
            )
    if rank == 0:
        tokens = configs["fast"].batch.tokens_per_step
        medians = {
            mode: [statistics.median(column) for column in zip(*told[mode][2:], strict=True)]
            for mode in MODES
        }
        answers.put(
            {mode: [tokens / wall, cpu, sent] for mode, (wall, cpu, sent) in medians.items()}
        )
    dist.barrier()
    dist.destroy_process_group()


def build_mode_engine(config: RunConfig) -> Engine:
    """Return the engine of one mode, as a run would build it."""
    device = torch.device("cpu")
    config = config.resolve_precision(choose_native_precision(device))
    layout = config.layout.resolve(dist.get_world_size(), config.model)
    return build_engine(config, build_device_meshes(layout, device), device)


def build_batches(config: RunConfig, step: int, rank: int, processes: int) -> list[Batch]:
    """Return random tokens: a step's sequences sharded over ranks, in micro-batches of the
    config's size.
    """
    length, total = config.batch.sequence_length, config.batch.sequences_per_step
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, config.model.vocab_size, (total, length + 1), generator=generator)[
        rank::processes
    ]
    size = config.batch.resolve_micro_sequences(total // processes)
    return [
        Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens.split(size)
    ]


def measure_step(engine: Engine, batches: list[Batch]) -> tuple[float, ...]:
    """Return (seconds until the last rank finished, CPU seconds of this rank, megabytes that it
    wrote).
    """
    process = psutil.Process()
    dist.barrier()
    written, busy, began = (
        process.io_counters().write_chars,
        time.process_time(),
        time.perf_counter(),
    )
    engine.train_step(batches, 1e-4)
    update_expert_balance(engine.module)
    busy, written = time.process_time() - busy, process.io_counters().write_chars - written
    dist.barrier()
    return time.perf_counter() - began, busy, written / 1e6


if __name__ == "__main__":
    main(sys.argv[1:])
