"""Measure the host's time of a Transformer block on a CPU, without an accelerator: what a step
waits for where the kernels are short.

    python -m tools.bench.host_time [--paths fsdp fsdp-never ddp plain …] [--compile none block]
        [--layers 4 12] [--rounds 2] [--steps 12] [--words section.key=value …] [--profile]

Each row is a process that trains a tiny model as on an H100: the same kernels are chosen, and
attention returns zeros, so hardly anything but the host's work is left. What is printed is the
slope between two depths: CPU microseconds of a block and micro-batch, in forward, backward and the
rest of the micro-batch, of the fastest of the steps, because other work only adds. Paths take turns
in `--rounds`, so that a busy minute does not fall on one of them alone. `operators` are those that
reach the dispatcher, in a block and micro-batch. `share` is the time over that of the first path
with the same `--compile`; `losses` says if the losses of four steps have the same bits.

Ratios within one run hold; microseconds are those of the machine.
"""

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

PATHS: dict[str, tuple[str, ...]] = {
    "fsdp": ("engine.data_parallel=fsdp",),
    "fsdp-never": ("engine.data_parallel=fsdp", "engine.reshard=never"),
    "fsdp-step": ("engine.data_parallel=fsdp", "engine.reshard=after_step"),
    "fsdp-step-whole": (
        "engine.data_parallel=fsdp",
        "engine.reshard=after_step",
        "engine.gradient_accumulation=whole",
    ),
    "ddp": ("engine.data_parallel=ddp",),
    "plain": ("engine.data_parallel=plain",),
}
MICRO_BATCHES = 4
WORDS = (
    "model.hidden_size=64", "model.vocab_size=256", "model.intermediate_size=128",
    "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.head_dim=16",
    "batch.sequence_length=64", f"batch.sequences={MICRO_BATCHES}", "batch.micro_sequences=1",
    "train.precision=bf16", "optimizer.max_grad_norm=1.0",
)  # fmt: skip
COMPARED_STEPS = 4
PARTS = ("forward", "backward", "micro-batch")


@dataclass(frozen=True)
class HostTime:
    """A training run of one depth.

    Attributes:
        seconds: CPU seconds of a micro-batch, by part; that of `micro-batch` includes the others.
        operators: Operators of a micro-batch that reach the dispatcher; 0 if blocks are compiled.
        losses: Of the first steps.
    """

    seconds: dict[str, float]
    operators: float
    losses: list[float]


@dataclass(frozen=True)
class BlockTime:
    """Host microseconds and operators of one block and micro-batch."""

    forward: float
    backward: float
    rest: float
    operators: float

    @property
    def total(self) -> float:
        """Microseconds."""
        return self.forward + self.backward + self.rest


def merge_least(first: HostTime, second: HostTime) -> HostTime:
    """Return the least times of two runs of the same depth.

    Args:
        first: A run.
        second: Another one, which has the same losses.

    Returns:
        Its parts are of either run.
    """
    seconds = {name: min(first.seconds[name], second.seconds[name]) for name in PARTS}
    return HostTime(seconds, first.operators, first.losses)


def compute_block_time(few: HostTime, many: HostTime, blocks: int) -> BlockTime:
    """Return the slope between two depths.

    Args:
        few: Of a model with some blocks.
        many: Of one with `blocks` more.
        blocks: The difference.

    Returns:
        The part of one block.
    """
    slope = {name: 1e6 * (many.seconds[name] - few.seconds[name]) / blocks for name in PARTS}
    rest = slope["micro-batch"] - slope["forward"] - slope["backward"]
    operators = (many.operators - few.operators) / blocks
    return BlockTime(slope["forward"], slope["backward"], rest, operators)


@contextlib.contextmanager
def simulate_hopper() -> Iterator[None]:
    """Take the decisions of an H100 on CPU tensors; attention returns zeros."""
    from unittest.mock import patch

    import torch
    import torch.nn.attention.varlen  # registers the operators

    from llmsys.config.attention_device import AttentionDevice
    from llmsys.engine import micro_batch_loss
    from llmsys.model import attention_device, cpu_kernels

    def run_attention(q: Any, k: Any, v: Any, *others: Any) -> Any:
        lse = torch.empty(q.shape[1], q.shape[0])
        return v.new_zeros((*q.shape[:2], v.shape[-1])), lse, torch.empty(2)

    def run_attention_backward(gradient: Any, q: Any, k: Any, v: Any, *others: Any) -> Any:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    # Kernels stay registered until the library is freed.
    library = torch.library.Library("torch_attn", "IMPL", "CPU")
    library.impl("_varlen_attn", run_attention)
    library.impl("_varlen_attn_backward", run_attention_backward)
    with contextlib.ExitStack() as stack:
        hopper = AttentionDevice("cuda", (9, 0))
        stack.enter_context(patch.object(attention_device, "describe_device", lambda _: hopper))
        stack.enter_context(patch.object(micro_batch_loss, "is_on_host", lambda _: False))
        for name in ("norm", "rotary", "grouped_mm"):
            never: Callable[..., bool] = lambda *_: False  # noqa: E731
            stack.enter_context(patch.object(cpu_kernels, f"is_cpu_{name}_supported", never))
        yield
    del library


def measure_depth(words: Sequence[str], steps: int, *, profiles: bool = False) -> HostTime:
    """Train a model of one depth in this process, alone.

    Args:
        words: Changes of the config.
        steps: Measured steps.
        profiles: Print where the time of Python goes.

    Returns:
        The times.
    """
    import torch

    from llmsys.calibrate.training_steps import build_step_engine, draw_batches, run_step
    from llmsys.config.loading.load import read_config
    from llmsys.parallel.process_group import get_local_device, init_process_group

    torch.set_num_threads(1)
    with simulate_hopper(), init_process_group():
        config = read_config("model/qwen2.5-0.5b", [*WORDS, *words]).run
        engine: Any = build_step_engine(config, get_local_device())
        batches = draw_batches(config)
        losses = [run_step(engine, batches) for _ in range(COMPARED_STEPS)]
        clock = _Clock()
        data_parallel = engine._data_parallel
        with clock.watch(engine, data_parallel):
            for _ in range(steps):
                run_step(engine, batches)
                clock.end_step()
        operators = 0
        if config.train.compile == "none":
            with _build_counter() as counter:
                run_step(engine, batches)
            operators = counter.count
        if profiles:
            with cProfile.Profile(time.process_time) as watcher:
                run_step(engine, batches)
            pstats.Stats(watcher).sort_stats("tottime").print_stats(40)
    seconds = {name: value / len(batches) for name, value in clock.least.items()}
    return HostTime(seconds, operators / len(batches), losses)


class _Clock:
    """CPU seconds of the parts of a step, and the least over steps."""

    def __init__(self) -> None:
        self._now = dict.fromkeys(PARTS, 0.0)
        self.least = dict.fromkeys(PARTS, float("inf"))

    @contextlib.contextmanager
    def watch(self, engine: Any, data_parallel: Any) -> Iterator[None]:
        """Time the calls of an engine's parts."""
        import torch

        enter = data_parallel.enter_micro_batch

        @contextlib.contextmanager
        def enter_timed(**named: Any) -> Iterator[None]:
            began = time.process_time()
            with enter(**named):
                yield
            self._now["micro-batch"] += time.process_time() - began

        kept = data_parallel.forward, torch.Tensor.backward
        data_parallel.enter_micro_batch = enter_timed
        data_parallel.forward = self._wrap("forward", kept[0])
        torch.Tensor.backward = self._wrap("backward", kept[1])  # type: ignore[method-assign]
        try:
            yield
        finally:
            data_parallel.forward, torch.Tensor.backward = kept  # type: ignore[method-assign]
            data_parallel.enter_micro_batch = enter

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self._now[name] += time.process_time() - began

        return run

    def end_step(self) -> None:
        """Keep the least time of each part."""
        for name, seconds in self._now.items():
            self.least[name] = min(self.least[name], seconds)
            self._now[name] = 0.0


def _build_counter() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.count = 0

        def __torch_dispatch__(
            self, operation: Any, types: Any, arguments: Any = (), named: Any = None
        ) -> Any:
            self.count += 1
            return operation(*arguments, **(named or {}))

    return Counter()


def run_apart(words: Sequence[str], steps: int, *, profiles: bool = False) -> HostTime:
    """Run `measure_depth` in a process of its own, whose compiler and caches are new.

    Args:
        words: Changes of the config.
        steps: Measured steps.
        profiles: Print where the time of Python goes.

    Returns:
        The times.

    Raises:
        RuntimeError: The process failed; the message has its last lines.
    """
    command = [sys.executable, "-m", "tools.bench.host_time", "--alone", json.dumps([*words])]
    command += ["--steps", str(steps), *(["--profile"] if profiles else [])]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    *printed, last = done.stdout.splitlines() or [""]
    if done.returncode:
        lines = "\n".join(done.stderr.splitlines()[-5:])
        raise RuntimeError(f"{' '.join(words)}: the measurement ended with\n{lines}")
    if profiles:
        print("\n".join(printed))
    return HostTime(**json.loads(last))


def main(words: Sequence[str]) -> None:
    """Print a table row for each path."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--compile", nargs="+", choices=("none", "block"), default=["block"])
    parser.add_argument("--layers", nargs=2, type=int, default=[4, 12])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--words", nargs="+", default=[], metavar="section.key=value")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.alone is not None:
        found = measure_depth(json.loads(asked.alone), asked.steps, profiles=asked.profile)
        print(json.dumps(asdict(found)), flush=True)
        return
    print(
        "| path | compile | forward | backward | rest | µs a block | share | operators | losses |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for compiled in asked.compile:
        runs: dict[tuple[str, int], HostTime] = {}
        for _, path, layers in product(range(asked.rounds), asked.paths, asked.layers):
            words = [f"train.compile={compiled}", f"model.num_hidden_layers={layers}"]
            run = run_apart(
                [*PATHS[path], *asked.words, *words], asked.steps, profiles=asked.profile
            )
            known = runs.get((path, layers))
            runs[path, layers] = run if known is None else merge_least(known, run)
        few, many = asked.layers
        first: tuple[BlockTime, list[float]] | None = None
        for path in asked.paths:
            block = compute_block_time(runs[path, few], runs[path, many], many - few)
            losses = runs[path, many].losses
            first = first or (block, losses)
            print(format_row(path, compiled, block, losses, first), flush=True)


def format_row(
    path: str,
    compiled: str,
    block: BlockTime,
    losses: list[float],
    first: tuple[BlockTime, list[float]],
) -> str:
    """Return a row of the table.

    Args:
        path: Name of the path.
        compiled: `train.compile`.
        block: Its time.
        losses: Its losses.
        first: Time and losses that it is compared with.

    Returns:
        A line of Markdown.
    """
    parts = [f"{value:,.0f}" for value in (block.forward, block.backward, block.rest, block.total)]
    equal = "equal" if losses == first[1] else "differ"
    counted = f"{block.operators:.1f}" if block.operators else ""
    share = f"{block.total / first[0].total:.2f}"
    return f"| {' | '.join([path, compiled, *parts, share, counted, equal])} |"


if __name__ == "__main__":
    main(sys.argv[1:])
