"""Measure the bubble of a pipeline: the time of a step against the bubble formula, and the CPU time
of its ranks.

    python tools/bench/pipeline.py [--ranks 2] [--micro-batches 8] [--steps 5] [--schedules 1f1b …]

As many processes as `--ranks` each train the model alone, side by side, so that they share the
processor's caches and memory as stages do; then they train it in stages that cost the same, with
every schedule, one thread each. A pipeline of p ranks should take 1/p of the time alone, and a
bubble of (p - 1) / (v M) of that with v stages per rank and M micro-batches (Narayanan 2021,
arXiv:2104.04473). Everything is the least over steps, of each pass and of each micro-batch alone,
because other work on the machine only adds.

Wall time needs a core for each process. The replayed time does not: it puts the CPU time of every
pass into the order in which the rank ran it, after the passes of other stages that it needs, and
adds what the slowest rank does outside of passes (messages, clipping, the optimizer).
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    "vocab_size": 512, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": LENGTH,
}  # fmt: skip


def main(words: Sequence[str]) -> None:
    """Print a table row for each schedule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="Measured steps of each schedule.")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    asked = parser.parse_args(words)
    alone = run_alone(asked.ranks, asked.micro_batches, asked.steps)
    print(
        f"{asked.ranks} processes, each alone: {alone.seconds:.3f} s a step, "
        f"{alone.cpu_seconds:.3f} CPU s"
    )
    print(
        "| schedule | by CPU time, s | formula, s | ratio | by the clock, s | formula, s | ratio "
        "| CPU s of its share |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.schedules:
        schedule = SCHEDULES[name]
        chunks, ranks = schedule.get("stages_per_rank", 1), asked.ranks
        layout = {
            "pipeline": ranks,
            "pipeline_schedule": schedule,
            "layers_per_stage": [8 // (ranks * chunks)] * ranks * chunks,
        }
        found = run_case(ranks, partial(measure_steps, layout, asked.micro_batches, asked.steps))
        share = (1 + (ranks - 1) / (chunks * asked.micro_batches)) / ranks
        pairs = (
            (found.replayed_seconds, alone.replayed_seconds * share),
            (found.seconds, alone.seconds * share),
        )
        cells = [f"{time:.3f} | {formula:.3f} | {time / formula:.2f}" for time, formula in pairs]
        print(
            f"| {name} | {' | '.join(cells)} | "
            f"{found.cpu_seconds * ranks / alone.cpu_seconds:.2f} |",
            flush=True,
        )


class Pass(NamedTuple):
    """A forward or backward pass of a micro-batch in a stage, or both without stages, with its
    CPU time.
    """

    kind: str
    stage: int
    number: int
    seconds: float


class StepTimes(NamedTuple):
    """Times of a step: by the clock, of a free core for each rank, and of the rank with most CPU
    time.
    """

    seconds: float
    replayed_seconds: float
    cpu_seconds: float


class PassRecorder:
    """The passes of each step, with the CPU time of the process."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self._text, self._began = "", 0.0

    def record_pass(self, text: str) -> None:
        """End the pass before, and begin one such as "forward of micro-batch 3 in stage 1"; ""
        begins none.
        """
        now = time.process_time()
        if self._text:
            words = self._text.split()
            self.passes.append(Pass(words[0], int(words[-1]), int(words[3]), now - self._began))
        self._text, self._began = text, now

    def begin_micro_batch(self, *_: Any) -> None:
        """Begin both passes of the next micro-batch of a model without stages."""
        self.record_pass("")
        self.record_pass(f"both of micro-batch {len(self.passes)} in stage 0")


def run_alone(processes: int, micro_batches: int, steps: int) -> StepTimes:
    """Return the least times of a step of so many processes that do not know of each other."""
    barrier = multiprocessing.get_context("spawn").Barrier(processes)
    task = partial(measure_steps, {}, micro_batches, steps, begin_step=barrier.wait)
    with ThreadPoolExecutor(processes) as pool:
        found = list(pool.map(lambda _: run_case(1, task), range(processes)))
    return StepTimes(*map(min, zip(*found, strict=True)))


def run_case(ranks: int, task: Callable[[int], StepTimes]) -> StepTimes:
    """Return the times of a step on so many processes."""
    [(_, result)] = run_tasks(task, [0], ranks, TIMEOUT_SECONDS)
    if isinstance(result, TaskFailure):
        raise SystemExit(str(result))
    return StepTimes(*result)


def begin_together() -> None:
    """Wait for all ranks. Collective."""
    all_gather_object(0)


def measure_steps(
    layout: dict[str, Any],
    micro_batches: int,
    steps: int,
    number: int,
    *,
    begin_step: Callable[[], object] = begin_together,
) -> StepTimes:
    """Return the times of a step, each pass the least over steps. Collective."""
    batch = {"sequence_length": LENGTH, "sequences": micro_batches, "micro_sequences": 1}
    train = {"precision": "fp32", "threads_per_process": 1}
    config = RunConfig.model_validate(
        {"model": MODEL, "layout": layout, "batch": batch, "train": train}
    )
    device, recorder = torch.device("cpu"), PassRecorder()
    meshes = build_device_meshes(config.resolve_layout(get_world_size()), device)
    engine = build_engine(config, meshes, device, report_pass=recorder.record_pass)
    if not layout:
        engine.module.register_forward_pre_hook(recorder.begin_micro_batch)
    tokens_BT = torch.randint(
        0, 512, (1, LENGTH + 1), generator=torch.Generator().manual_seed(number)
    )
    batches = [Batch(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())] * micro_batches
    found = []
    for _ in range(steps + 1):
        begin_step()
        recorder.passes.clear()
        began, cpu_began = time.perf_counter(), time.process_time()
        engine.train_step(batches, 1e-3)
        recorder.record_pass("")
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
        outside = cpu - sum(one.seconds for one in recorder.passes)
        found.append((seconds, cpu, outside, list(recorder.passes)))
    walls, cpus, outsides, passes = zip(*found[1:], strict=True)
    least = [min(same, key=lambda one: one.seconds) for same in zip(*passes, strict=True)]
    ranks = all_gather_object((min(walls), min(cpus), min(outsides), least))
    replayed = replay_passes([one[3] for one in ranks]) + max(one[2] for one in ranks)
    return StepTimes(max(one[0] for one in ranks), replayed, max(one[1] for one in ranks))


def replay_passes(by_rank: list[list[Pass]]) -> float:
    """Return the time of the passes of all ranks, each in the order of its rank and after those
    that it needs.
    """
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
                clocks[rank] = ends[kind, stage, number] = (
                    max(clocks[rank], ends.get(before, 0.0)) + seconds
                )
                passes.pop()
    return max(clocks)


if __name__ == "__main__":
    main(sys.argv[1:])
