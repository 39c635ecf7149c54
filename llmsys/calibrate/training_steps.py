"""Train a few steps of a config on random tokens, and measure how long one takes.

The engine, the optimizer and the loss are those of a run, so that a step costs what it costs there.
"""

import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean, pstdev
from typing import Any

import torch

from llmsys.config.run import RunConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import Engine
from llmsys.estimate.activation_memory import compute_micro_batch
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.device_setup import trim_allocator
from llmsys.parallel.process_group import (
    all_reduce_max,
    get_local_device,
    get_rank,
    get_world_size,
)
from llmsys.train.build_engine import build_engine
from llmsys.train.build_trainer import set_num_threads
from llmsys.train.expert_load import update_expert_balance
from llmsys.train.precision import choose_native_precision, set_matmul_numerics

LEARNING_RATE = 1e-3
# Steps before the clock counts: the first ones allocate memory and choose kernels.
WARM_UP_STEPS = 2
MIN_STEPS = 4


@dataclass(frozen=True)
class StepRate:
    """Measured training steps.

    Attributes:
        seconds: Mean seconds of a step. A run is a sum of steps, so slow ones count.
        spread: Standard error of the mean by the means of quarters, as a share of it: how the load
            of the machine changes.
        steps: Measured steps.
        threads: CPU threads that took them.
    """

    seconds: float
    spread: float
    steps: int
    threads: int = 1


def measure_fastest_rate(config: RunConfig, budget_seconds: float) -> StepRate:
    """Measure the steps of a config with one thread and with one for each core, and half of them.

    Threads wait for each other after every small product, so that on a busy machine one of them
    may be faster than all. Needs a process group of one rank (`init_process_group`).

    Args:
        config: A config of one rank.
        budget_seconds: Time for the measured steps of all numbers of threads together.

    Returns:
        The measurement of the number of threads with the shortest step.
    """
    cores = os.cpu_count() or 1
    numbers = sorted({1, max(1, cores // 2), cores})
    if get_local_device().type != "cpu":
        numbers = [cores]
    best: StepRate | None = None
    for threads in numbers:
        train = config.train.model_copy(update={"threads_per_process": threads})
        one = config.model_copy(update={"train": train})
        limit = math.inf if best is None else 1.5 * best.seconds
        found = measure_step_rate(one, budget_seconds / len(numbers), give_up_seconds=limit)
        if best is None or found.seconds < best.seconds:
            best = found
    assert best is not None, "at least one thread is measured"
    return best


def measure_step_rate(
    config: RunConfig,
    budget_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
    *,
    give_up_seconds: float = math.inf,
) -> StepRate:
    """Train a config on random tokens, with the threads of training. Collective.

    Needs a process group (`init_process_group`).

    Args:
        config: A config that fits the ranks of the group; `train.precision` may be auto.
        budget_seconds: Time for the measured steps; at least four are measured.
        clock: Return seconds. Tests replace it.
        give_up_seconds: Measure no more after a step of the warm-up that took longer; it is then
            the result.

    Returns:
        The measurement.
    """
    device = get_local_device()
    config = config.resolve_precision(choose_native_precision(device)).resolve_compile(
        has_triton=False
    )
    set_num_threads(config)
    set_matmul_numerics()
    engine, batches = build_step_engine(config, device), draw_batches(config)
    seconds: list[float] = []
    for _ in range(WARM_UP_STEPS):
        began = clock()
        run_step(engine, batches)
        took = _find_slowest(clock() - began)
    is_slow = took > give_up_seconds
    while not is_slow and (len(seconds) < MIN_STEPS or sum(seconds) < budget_seconds):
        began = clock()
        run_step(engine, batches)
        # Every rank ends after the same step.
        seconds.append(_find_slowest(clock() - began))
    del engine
    release_engine(device)
    threads = torch.get_num_threads()
    if is_slow:
        return StepRate(took, 0.0, 1, threads)
    return replace(summarize_steps(seconds), threads=threads)


def _find_slowest(seconds: float) -> float:
    """Return the seconds of the slowest rank. Collective."""
    if get_world_size() == 1:
        return seconds
    own = torch.tensor(seconds, dtype=torch.float64, device=get_local_device())
    return float(all_reduce_max(own))


def summarize_steps(seconds: list[float]) -> StepRate:
    """Return the mean of steps, and how much the means of quarters differ.

    Args:
        seconds: Seconds of each step, at least four.

    Returns:
        The summary.
    """
    size = len(seconds) // 4
    quarters = [mean(seconds[first : first + size]) for first in range(0, 4 * size, size)]
    average = mean(seconds)
    return StepRate(average, pstdev(quarters) / average / 2, len(seconds))


def build_step_engine(config: RunConfig, device: torch.device) -> Engine:
    """Build the engine of a config with its initial values. Collective.

    Args:
        config: a config with its precision resolved.
        device: device of this rank.

    Returns:
        The engine.
    """
    layout = config.resolve_layout(get_world_size())
    return build_engine(config, build_device_meshes(layout, device), device)


def release_engine(device: torch.device) -> None:
    """Free the memory of an engine after its last name is deleted.

    Its hooks refer to it, so it waits for the collector.

    Args:
        device: device of this rank.
    """
    gc.collect()
    trim_allocator(device)


def draw_batches(config: RunConfig) -> list[Batch]:
    """Draw this rank's micro-batches of random tokens in documents of random lengths.

    Args:
        config: gives micro-batches, their length and the vocabulary.

    Returns:
        Equal batches for every call.
    """
    layout = config.resolve_layout(get_world_size())
    sequences, count = compute_micro_batch(config, layout)
    generator = torch.Generator().manual_seed(get_rank())
    length = config.batch.sequence_length

    def draw() -> Batch:
        tokens_BT = torch.randint(
            config.model.vocab_size, (sequences, length + 1), generator=generator
        )
        # Eight borders in a row on average.
        opens_BT = torch.rand(sequences, length, generator=generator) < 8 / length
        return Batch(
            tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous(), opens_BT.cumsum(1)
        ).count_documents()

    return [draw() for _ in range(count)]


def run_step(engine: Engine, batches: list[Batch]) -> float:
    """Train one step. Collective.

    Args:
        engine: from `build_step_engine`.
        batches: micro-batches of this rank.

    Returns:
        The loss, in nats per token; reading it waits for the device.
    """
    result: Any = engine.train_step(batches, LEARNING_RATE)
    update_expert_balance(engine.module, result.is_applied)
    return float(result.loss)
