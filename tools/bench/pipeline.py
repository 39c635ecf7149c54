"""Measure the bubble of a pipeline: the time of a step against the bubble formula, and the CPU time of its ranks.

    python tools/bench/pipeline.py [--ranks 2] [--micro-batches 8] [--steps 5] [--schedules 1f1b …]

One process trains the model alone; then as many processes as `--ranks` train it in stages that cost the same, with
every schedule, one thread each. A pipeline of p ranks should take 1/p of the time alone, and a bubble of
(p - 1) / (v M) of that with v stages per rank and M micro-batches (Narayanan 2021, arXiv:2104.04473). Everything is the
least over steps, because other work on the machine only adds.

Wall time needs a core for each process. The replayed time does not: it puts the CPU time of every pass into the order
in which the rank ran it, after the passes of other stages that it needs, and adds what the slowest rank does outside of
passes (messages, clipping, the optimizer).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

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
    alone = run_case(1, {}, asked.micro_batches, asked.steps)
    print(f"one process: {alone.seconds:.3f} s a step, {alone.cpu_seconds:.3f} CPU s")
    print(
        "| schedule | replayed s | bubble formula | replayed / formula | wall s | CPU s of the slowest rank | of its share |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in asked.schedules:
        schedule = SCHEDULES[name]
        chunks, ranks = schedule.get("stages_per_rank", 1), asked.ranks
        layout = {
            "pipeline": ranks,
            "pipeline_schedule": schedule,
            "layers_per_stage": [8 // (ranks * chunks)] * ranks * chunks,
        }
        found = run_case(ranks, layout, asked.micro_batches, asked.steps)
        formula = alone.cpu_seconds / ranks * (1 + (ranks - 1) / (chunks * asked.micro_batches))
        print(f"| {name} | {found.replayed_seconds:.3f} | {formula:.3f} | {found.replayed_seconds / formula:.2f} "
              f"| {found.seconds:.3f} | {found.cpu_seconds:.3f} | {found.cpu_seconds * ranks / alone.cpu_seconds:.2f} |",
              flush=True)  # fmt: skip


class Pass(NamedTuple):
    """A forward or backward pass of a micro-batch in a stage, with its CPU time."""

    kind: str
    stage: int
    number: int
    seconds: float


class StepTimes(NamedTuple):
    """Times of a step: by the clock, of a free core for each rank, and of the rank with most CPU time."""

    seconds: float
    replayed_seconds: float
    cpu_seconds: float


def run_case(ranks: int, layout: dict[str, Any], micro_batches: int, steps: int) -> StepTimes:
    """Return the times of a step on so many processes."""
    task = partial(measure_steps, layout, micro_batches, steps)
    [(_, result)] = run_tasks(task, [0], ranks, TIMEOUT_SECONDS)
    if isinstance(result, TaskFailure):
        raise SystemExit(str(result))
    return StepTimes(*result)


def measure_steps(layout: dict[str, Any], micro_batches: int, steps: int, number: int) -> StepTimes:
    """Return the least over steps of each time. Collective."""
    batch = {"sequence_length": LENGTH, "sequences": micro_batches, "micro_sequences": 1}
    train = {"precision": "fp32", "threads_per_process": 1}
    config = RunConfig.model_validate({"model": MODEL, "layout": layout, "batch": batch, "train": train})
    device, passes = torch.device("cpu"), list[Pass]()
    began_pass = [("", 0.0)]

    def record_pass(text: str) -> None:
        begun, began_pass[0] = began_pass[0], (text, time.process_time())
        if not text:
            words = begun[0].split()  # such as "forward of micro-batch 3 in stage 1"
            passes.append(Pass(words[0], int(words[-1]), int(words[3]), time.process_time() - begun[1]))

    meshes = build_device_meshes(config.resolve_layout(get_world_size()), device)
    engine = build_engine(config, meshes, device, report_pass=record_pass)
    tokens_BT = torch.randint(0, 512, (1, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    batches = [Batch(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())] * micro_batches
    found = []
    for _ in range(steps + 1):
        all_gather_object(0)  # begin together
        passes.clear()
        began, cpu_began = time.perf_counter(), time.process_time()
        engine.train_step(batches, 1e-3)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        ranks = all_gather_object((cpu, list(passes)))
        outside = max(total - sum(one.seconds for one in own) for total, own in ranks)
        replayed = replay_passes([own for _, own in ranks]) + outside
        found.append((seconds, replayed, max(total for total, _ in ranks)))
    return StepTimes(*map(min, zip(*found[1:], strict=True)))


def replay_passes(by_rank: list[list[Pass]]) -> float:
    """Return the time of the passes of all ranks, each in the order of its rank and after those that it needs."""
    last = max((one.stage for passes in by_rank for one in passes), default=0)
    ends: dict[tuple[str, int, int], float] = {}
    clocks, left = [0.0] * len(by_rank), [list(reversed(passes)) for passes in by_rank]
    while any(left):
        for rank, passes in enumerate(left):
            while passes:
                kind, stage, number, seconds = passes[-1]
                before = (kind, stage + (1 if kind == "backward" else -1), number)
                if 0 <= before[1] <= last and before not in ends:
                    break
                clocks[rank] = ends[kind, stage, number] = max(clocks[rank], ends.get(before, 0.0)) + seconds
                passes.pop()
    return max(clocks)


if __name__ == "__main__":
    main(sys.argv[1:])
