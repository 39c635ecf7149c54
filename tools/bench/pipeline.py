"""Measure the bubble of a pipeline: the time of a step against the bubble formula, and the CPU time of its ranks.

    python tools/bench/pipeline.py [--ranks 2] [--micro-batches 8] [--steps 5] [--schedules 1f1b …]

One process trains the model alone; then as many processes as `--ranks` train it in stages that cost the same, with
every schedule, one thread each. A pipeline of p ranks should take 1/p of the time alone, and a bubble of
(p - 1) / (v M) of that with v stages per rank and M micro-batches (Narayanan 2021, arXiv:2104.04473). Everything is a
median over steps. Wall time needs a core for each process; the CPU time of the slowest rank, which a busy machine
disturbs less, has no bubble in it: it shows what stages cost besides their share of the layers.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.doctor.rank_pool import TaskFailure, run_tasks
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import all_gather_object, get_world_size
from llmsys.train.build_engine import build_engine

SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"kind": "gpipe"},
    "1f1b": {"kind": "1f1b"},
    "interleaved": {"kind": "interleaved", "stages_per_rank": 2},
}
LENGTH, TIMEOUT_SECONDS = 256, 600.0
# A small vocabulary, so that the head costs little and equal numbers of layers are equal stages.
MODEL = {
    "vocab_size": 512, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": LENGTH,
}  # fmt: skip


def main(words: Sequence[str]) -> None:
    """Print a table row for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="Measured steps of each schedule.")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    asked = parser.parse_args(words)
    alone_seconds, alone_cpu = run_case(1, {}, asked.micro_batches, asked.steps)
    print(f"one process: {alone_seconds:.3f} s a step, {alone_cpu:.3f} CPU s")
    print(
        "| schedule | seconds | bubble formula | measured / formula | CPU seconds of the slowest rank | of its share |"
    )
    print("|---|---|---|---|---|---|")
    for name in asked.schedules:
        schedule = SCHEDULES[name]
        chunks, ranks = schedule.get("stages_per_rank", 1), asked.ranks
        layout = {
            "pipeline": ranks,
            "pipeline_schedule": schedule,
            "layers_per_stage": [8 // (ranks * chunks)] * ranks * chunks,
        }
        seconds, cpu = run_case(ranks, layout, asked.micro_batches, asked.steps)
        formula = alone_seconds / ranks * (1 + (ranks - 1) / (chunks * asked.micro_batches))
        print(f"| {name} | {seconds:.3f} | {formula:.3f} | {seconds / formula:.2f} | {cpu:.3f} "
              f"| {cpu * ranks / alone_cpu:.2f} |", flush=True)  # fmt: skip


def run_case(ranks: int, layout: dict[str, Any], micro_batches: int, steps: int) -> tuple[float, float]:
    """Return the seconds of a step, and the CPU seconds of the rank that has most, on so many processes."""
    task = partial(measure_steps, layout, micro_batches, steps)
    [(_, result)] = run_tasks(task, [0], ranks, TIMEOUT_SECONDS)
    if isinstance(result, TaskFailure):
        raise SystemExit(str(result))
    seconds, cpu = result
    return seconds, cpu


def measure_steps(layout: dict[str, Any], micro_batches: int, steps: int, number: int) -> tuple[float, float]:
    """Return medians over steps: seconds, and CPU seconds of the rank that has most. Collective."""
    batch = {"sequence_length": LENGTH, "sequences": micro_batches, "micro_sequences": 1}
    train = {"precision": "fp32", "threads_per_process": 1}
    config = RunConfig.model_validate({"model": MODEL, "layout": layout, "batch": batch, "train": train})
    device = torch.device("cpu")
    engine = build_engine(config, build_device_meshes(config.resolve_layout(get_world_size()), device), device)
    tokens_BT = torch.randint(0, 512, (1, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    batches = [Batch(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())] * micro_batches
    seconds, cpu = [], []
    for _ in range(steps + 1):
        all_gather_object(0)  # begin together
        began, cpu_began = time.perf_counter(), time.process_time()
        engine.train_step(batches, 1e-3)
        seconds.append(time.perf_counter() - began)
        cpu.append(max(all_gather_object(time.process_time() - cpu_began)))
    return statistics.median(seconds[1:]), statistics.median(cpu[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
