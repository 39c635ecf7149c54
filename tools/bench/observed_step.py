"""Measure what profiles, norms by layer and corruption checks cost a step, in the steps they watch
and in the others.

    python tools/bench/observed_step.py [--config recipes/ladder-64] [--every 8] [--steps 64]
    [--pairs 200] [--json]

CPU seconds of one process with one thread, which other work on the machine changes least. Every
kind watches each `--every`-th step of one engine; the steps between them are compared with those
before anything watched. After that steps that a profile does not record alternate with steps
without a profile: medians, and the ratios within pairs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from llmsys.config.loading.load import load_run_config
from llmsys.config.run import RunConfig
from llmsys.config.train import ProfileConfig
from llmsys.data.batch import Batch
from llmsys.engine.engine import Engine
from llmsys.engine.torch_engine import TorchEngine
from llmsys.parallel.device_mesh import build_device_meshes
from llmsys.parallel.process_group import init_process_group
from llmsys.train.build_engine import build_engine
from llmsys.train.corruption_check import CorruptionCheck
from llmsys.train.norm_meter import NormMeter
from llmsys.train.step_profiler import StepProfiler

CPU, RATE = torch.device("cpu"), 1e-4
# (median CPU seconds of watched steps, of the others)
Medians = tuple[float, float]
# Step, counted from 1 → the context that watches it.
Watch = Callable[[int], AbstractContextManager[None]]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="recipes/ladder-64", help="default: %(default)s")
    parser.add_argument(
        "--every", type=int, default=8, help="steps from one watched step to the next"
    )
    parser.add_argument(
        "--steps", type=int, default=64, help="steps of each kind (default: %(default)s)"
    )
    parser.add_argument(
        "--pairs", type=int, default=200, help="pairs of alternating steps (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_run_config(
        arguments.config, ["train.precision=fp32", "train.reproducibility=fast"]
    )
    with init_process_group(300):
        found, pairs = measure_kinds(config, arguments.every, arguments.steps, arguments.pairs)
    print(
        json.dumps({"kinds": found, "pairs": pairs._asdict()})
        if arguments.json
        else format_table(found, pairs)
    )
    return 0


class Pairs(NamedTuple):
    """Alternating steps: median CPU seconds of those inside of a profile and of those without, and
    their ratio.

    The ratio is the median of those within a pair, with its quartiles.
    """

    inside: float
    without: float
    ratio: float
    quartiles: tuple[float, float]


def measure_kinds(
    config: RunConfig, every: int, steps: int, pairs: int
) -> tuple[dict[str, Medians], Pairs]:
    """Return medians by kind; `nothing` first and last, because a process slows down as it runs;
    and the pairs.
    """
    meshes = build_device_meshes(config.resolve_layout(1), CPU)
    engine = build_engine(config, meshes, CPU)
    assert isinstance(engine, TorchEngine), "the config has fast mode and no average"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        profiler = StepProfiler(
            ProfileConfig(steps=tuple(range(every, steps + 1, every))), folder, 0, CPU
        )
        watched = config.model_copy(
            update={
                "train": config.train.model_copy(update={"corruption_check_every_steps": every})
            }
        )
        check = CorruptionCheck(watched, engine, lambda step, _: [make_batch(config, step)], 0, 1)
        meter = NormMeter(every, engine)
        measure_steps(engine, config, every, 8, watch_nothing)  # warms up
        kinds: dict[str, Watch] = {
            "nothing": watch_nothing,
            "profile": profiler.record_step,
            "norms": partial(watch_norms, meter),
            "corruption check": partial(watch_corruption, check),
            "nothing, again": watch_nothing,
        }
        found = {
            name: measure_steps(engine, config, every, steps, watch)
            for name, watch in kinds.items()
        }
        return found, measure_pairs(engine, config, steps, pairs, profiler.record_step)


def measure_pairs(engine: Engine, config: RunConfig, first: int, count: int, watch: Watch) -> Pairs:
    """Return the CPU seconds of steps inside of a context that does not record them, and of steps
    without it.

    Both steps of a pair have the same batch; the one that comes first changes from pair to pair.
    """
    inside: list[float] = []
    without: list[float] = []
    for number in range(count):
        batch = make_batch(config, number)
        for is_inside in (number % 2 == 0, number % 2 == 1):
            began = time.process_time()
            with watch(first + 1 + number) if is_inside else nullcontext():
                engine.train_step([batch], RATE)
            (inside if is_inside else without).append(time.process_time() - began)
    ratios = [one / other for one, other in zip(inside, without, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Pairs(statistics.median(inside), statistics.median(without), middle, (low, high))


def watch_nothing(number: int) -> AbstractContextManager[None]:
    """Return a context that does nothing."""
    return nullcontext()


@contextmanager
def watch_norms(meter: NormMeter, number: int) -> Iterator[None]:
    """Measure the norms of the step inside of the block if it is due."""
    meter.begin_step(number)
    yield
    meter.end_step()


@contextmanager
def watch_corruption(check: CorruptionCheck, number: int) -> Iterator[None]:
    """Repeat the step inside of the block if it is due."""
    check.begin_step(number - 1)
    yield
    check.end_step()


def make_batch(config: RunConfig, step: int) -> Batch:
    """Return random tokens of one step."""
    generator = torch.Generator().manual_seed(step)
    shape = config.batch.sequences_per_step, config.batch.sequence_length + 1
    tokens_BT = torch.randint(config.model.vocab_size, shape, generator=generator)
    return Batch(tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous())


def measure_steps(
    engine: Engine, config: RunConfig, every: int, steps: int, watch: Watch
) -> Medians:
    """Return median CPU seconds of every `every`-th step and of the others, with what watches
    them.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(1, steps + 1):
        batch = make_batch(config, number - 1)
        began = time.process_time()
        with watch(number):
            engine.train_step([batch], RATE)
        seconds[number % every == 0].append(time.process_time() - began)
    return statistics.median(seconds[True]), statistics.median(seconds[False])


def format_table(found: dict[str, Medians], pairs: Pairs) -> str:
    """Return one line per kind, and one about the pairs."""
    plain = found["nothing"][1]
    lines = [
        "| watched by | CPU ms of a watched step | of other steps | more than unwatched |",
        "|---|---|---|---|",
    ]
    for name, (watched, other) in found.items():
        lines.append(
            f"| {name} | {1e3 * watched:.1f} | {1e3 * other:.1f} | {other / plain - 1:+.1%} |"
        )
    low, high = pairs.quartiles
    lines += [
        "",
        f"Inside of a profile that does not record: {1e3 * pairs.inside:.1f} ms, without one "
        f"{1e3 * pairs.without:.1f} ms; ratio within pairs {pairs.ratio:.4f} (quartiles {low:.4f} "
        f"to {high:.4f}).",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
